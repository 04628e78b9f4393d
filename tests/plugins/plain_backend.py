"""The smallest backends: what the engine's process imports of the plugin in test_engines.py, right ones and wrong ones."""

from __future__ import annotations

import copy
import time
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jackfield import EngineSettings, FloatArray, ModelError
from jackfield.engine.backends import BackendModel

# What the factory was given at its last call, and the torch model's life.
seen: dict[str, Any] = {}


class PlainBackend:
    """One padded batch a step, through a copy of the model."""

    dtype = "float32"
    device = "cpu"

    def __init__(self, model: BackendModel) -> None:
        self._forward = copy.deepcopy(model.forward)
        self._has_segments = "token_type_ids" in model.forward.inputs

    def hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> FloatArray | torch.Tensor:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        places = torch.arange(int(lengths.max()))
        inside = places < lengths[:, None]
        ids = torch.zeros(inside.shape, dtype=torch.int64)
        ids[inside] = torch.from_numpy(np.concatenate(prompts).astype(np.int64))
        more: tuple[torch.Tensor, ...] = ()
        if self._has_segments:
            first = torch.tensor(segments or [0] * len(prompts))[:, None]
            more = (((first > 0) & (places >= first)).long(),)
        states: torch.Tensor = self._forward(ids, inside.long(), *more)
        return states[inside]


def load(model: BackendModel, settings: EngineSettings) -> PlainBackend:
    example = model.forward.example()
    assert list(example) == list(model.forward.inputs)
    assert model.forward(**example).shape[:2] == example["input_ids"].shape
    seen.update(model=model.spec, dtype=model.dtype, settings=settings, torch=weakref.ref(model.forward.model))
    return PlainBackend(model)


class _Slow(PlainBackend):
    """Gives NumPy arrays, after a while."""

    def hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> FloatArray:
        time.sleep(0.2)
        array: FloatArray = np.asarray(super().hidden(prompts, segments))
        return array


def slow(model: BackendModel, settings: EngineSettings) -> PlainBackend:
    return _Slow(model)


class _Off(PlainBackend):
    def hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        return torch.as_tensor(super().hidden(prompts, segments)) * 1.01


def off(model: BackendModel, settings: EngineSettings) -> PlainBackend:
    """By a hundredth."""
    return _Off(model)


class _Short(PlainBackend):
    def hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        return torch.as_tensor(super().hidden(prompts, segments))[1:]


def short(model: BackendModel, settings: EngineSettings) -> PlainBackend:
    """A token is missing."""
    return _Short(model)


def broken(model: BackendModel, settings: EngineSettings) -> PlainBackend:
    raise RuntimeError("no such device")


def refusing(model: BackendModel, settings: EngineSettings) -> PlainBackend:
    raise ModelError(f"model {model.spec.id!r}: not this one")
