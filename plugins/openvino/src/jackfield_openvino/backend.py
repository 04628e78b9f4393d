"""The forward pass: a converted model on OpenVINO's CPU plugin, in padded batches of near lengths. Imported in the engine's process."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jackfield import EngineSettings, FloatArray, ModelError
from jackfield.engine.backends import BackendModel
from jackfield_openvino.batches import Batch, padded_batches
from jackfield_openvino.conversion import converted
from jackfield_openvino.quiet import openvino

__all__ = ["OpenVinoBackend", "load"]

log = logging.getLogger("jackfield.openvino")

DEVICE = "CPU"
# By dtype, the names of OpenVINO's own types.
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def load(model: BackendModel, settings: EngineSettings) -> OpenVinoBackend:
    """Compile a model, converting it first if that was not done yet.

    `options` of its table are properties of OpenVINO's CPU plugin, which win over those set here. Raises: ModelError.
    """
    name = model.spec.id
    if model.spec.device not in ("auto", "cpu"):
        raise ModelError(f"model {name!r}: device {model.spec.device!r} with engine 'openvino', which runs on the CPU: auto or cpu")
    path = converted(model)
    properties = {**_properties(model.dtype, settings), **model.spec.options}
    core = openvino.Core()
    try:
        compiled = core.compile_model(core.read_model(path), DEVICE, properties)
    except RuntimeError as error:
        raise ModelError(f"model {name!r}: OpenVINO cannot compile {path} with {properties}: {error}") from error
    log.info("model %s: OpenVINO %s, %s", name, openvino.__version__, properties)
    return OpenVinoBackend(compiled, model)


def _properties(dtype: str, settings: EngineSettings) -> dict[str, Any]:
    return {
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        # A stream for each lane, which has its share of the threads.
        "NUM_STREAMS": settings.lanes,
        "INFERENCE_NUM_THREADS": settings.threads,
        # The server's process wants a core now and then, and a thread that may not leave it would wait.
        "ENABLE_CPU_PINNING": False,
    }


class OpenVinoBackend:
    """A compiled model. Each thread that calls has an infer request of its own, whose streams run side by side."""

    device = "cpu"

    def __init__(self, compiled: openvino.CompiledModel, model: BackendModel) -> None:
        self._compiled = compiled
        self._requests = threading.local()
        self._has_segments = "token_type_ids" in model.forward.inputs
        self._max_length = model.card.max_length
        # Any id will do behind a sequence's end, nothing of it is read; the model's own has no surprises (RoBERTa counts positions by it).
        self._padding = int(model.config.get("pad_token_id") or 0)
        used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self.dtype = next((dtype for dtype, name in PRECISIONS.items() if name == used), used)

    def hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> FloatArray:
        """Last hidden states `[T, H]`."""
        batches = padded_batches([len(prompt) for prompt in prompts], self._max_length)
        parts = [self._run(batch, prompts[batch.start : batch.end], segments and segments[batch.start : batch.end]) for batch in batches]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run(self, batch: Batch, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> FloatArray:
        shape = (len(prompts), batch.length)
        lengths = np.array([len(prompt) for prompt in prompts])
        inside = np.arange(batch.length) < lengths[:, None]
        ids = np.full(shape, self._padding, dtype=np.int64)
        ids[inside] = np.concatenate(prompts)
        inputs = {"input_ids": ids, "attention_mask": inside.astype(np.int64)}
        if self._has_segments:
            kinds = np.zeros(shape, dtype=np.int64)
            if segments is not None:
                first = np.array(segments)[:, None]
                kinds[(first > 0) & (np.arange(batch.length) >= first)] = 1
            inputs["token_type_ids"] = kinds
        request = self._request()
        request.infer(inputs, share_inputs=True)
        # The request's own memory, which its next call writes over: what is picked out is a copy.
        states: FloatArray = request.get_output_tensor(0).data[inside]
        return states

    def _request(self) -> openvino.InferRequest:
        request: openvino.InferRequest | None = getattr(self._requests, "own", None)
        if request is None:
            request = self._requests.own = self._compiled.create_infer_request()
        return request
