"""What goes over the pipe between the HTTP process and the engine process: length-prefixed msgpack frames, torch-free on both sides."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod

import msgspec
import numpy as np
from msgspec import Struct

from jackfield.client import EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.errors import ServingError, engine_error
from jackfield.outputs import Delta, FloatArray, PoolingOutputs
from jackfield.settings import EngineSettings

__all__ = [
    "Abort",
    "Beat",
    "Deltas",
    "Done",
    "EndChoice",
    "Failed",
    "Frames",
    "FromWorker",
    "LoadFailed",
    "Loaded",
    "Loading",
    "Start",
    "Stop",
    "Submit",
    "ToWorker",
    "frame",
]


class Start(Struct, frozen=True, tag=True):
    """The first message: what to load and how to run. backend: where the factory of another forward pass is; empty: torch."""

    specs: list[ModelSpec]
    settings: EngineSettings
    log_level: str
    backend: str = ""


class Submit(Struct, frozen=True, tag=True):
    """Compute this; answered unless aborted by one Done or Failed, or by Deltas, the last of each choice with its finish reason."""

    request: EngineRequest


class Abort(Struct, frozen=True, tag=True):
    """Nobody waits for this request any more."""

    id: int


class EndChoice(Struct, frozen=True, tag=True):
    """One choice of a request is wanted no longer."""

    id: int
    index: int


class Stop(Struct, frozen=True, tag=True):
    """End after the step in hand."""


class Loading(Struct, frozen=True, tag=True):
    """How far the loading is."""

    progress: Progress


class Loaded(Struct, frozen=True, tag=True):
    """All models are loaded."""

    cards: dict[str, ModelCard]


class LoadFailed(Struct, frozen=True, tag=True):
    """A model cannot be loaded; the process ends."""

    message: str


class Done(Struct, frozen=True, tag=True):
    """A request's outputs: for each operation the shapes of its arrays, and their float32 data in one buffer."""

    id: int
    shapes: dict[str, list[tuple[int, ...]]]
    data: dict[str, bytes]

    @classmethod
    def of(cls, request_id: int, outputs: PoolingOutputs) -> Done:
        """Flatten outputs for the wire."""
        shapes = {name: [array.shape for array in arrays] for name, arrays in outputs.values.items()}
        data = {name: b"".join([array.tobytes() for array in arrays]) for name, arrays in outputs.values.items()}
        return cls(request_id, shapes, data)

    def outputs(self) -> PoolingOutputs:
        """The arrays again, as views of the received buffer."""
        return PoolingOutputs(values={name: _split(self.data[name], shapes) for name, shapes in self.shapes.items()})


class Deltas(Struct, frozen=True, tag=True):
    """Pieces of what is generated: those of a step, by request."""

    items: list[tuple[int, Delta]]


class Failed(Struct, frozen=True, tag=True):
    """A request's error, by the name of its class."""

    id: int
    kind: str
    message: str

    @classmethod
    def of(cls, request_id: int, error: ServingError) -> Failed:
        """Describe an error for the wire."""
        return cls(request_id, type(error).__name__, error.message)

    def error(self) -> ServingError:
        """The error again."""
        return engine_error(self.kind, self.message)


class Beat(Struct, frozen=True, tag=True):
    """Sent every heartbeat. moved counts attention calls and steps: it stands still when the model does."""

    stats: EngineStats
    moved: int


ToWorker = Start | Submit | Abort | EndChoice | Stop
FromWorker = Loading | Loaded | LoadFailed | Done | Deltas | Failed | Beat

_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToWorker | FromWorker) -> bytes:
    """A message as bytes for the pipe."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what arrived; yields each frame that is now complete."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (size,) = _HEADER.unpack_from(buffer, start)
            if len(buffer) - start - 4 < size:
                break
            yield bytes(buffer[start + 4 : start + 4 + size])
            start += 4 + size
        if start:
            del buffer[:start]


def _split(data: bytes, shapes: list[tuple[int, ...]]) -> list[FloatArray]:
    flat = np.frombuffer(data, dtype=np.float32)
    if len(set(shapes)) == 1:
        return list(flat.reshape(len(shapes), *shapes[0]))
    ends = np.cumsum([prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]
