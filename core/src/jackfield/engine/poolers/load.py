"""Makes the poolers of a model when it is loaded, and tries them."""

from __future__ import annotations

import importlib
import operator
from pathlib import Path

import torch
from safetensors.torch import load_file

from jackfield.client import ModelSpec
from jackfield.engine.files import DenseFiles, ModelFiles
from jackfield.engine.poolers import LoadedModel, Pooler, Span
from jackfield.engine.poolers.labels import ROWS, Head, LabelPooler
from jackfield.engine.poolers.vectors import Dense, VectorPooler
from jackfield.errors import ModelError
from jackfield.params import PoolingParams

__all__ = ["FLOAT32_TOLERANCE", "label_poolers", "plugin_poolers", "vector_poolers"]

# In a batch against alone, relative: what is still rounding in float32, and in half precision.
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.1
_ACTIVATIONS = {"none": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid(), "softmax": torch.nn.Softmax(dim=-1)}


def vector_poolers(spec: ModelSpec, files: ModelFiles, device: torch.device) -> dict[str, Pooler]:
    """Of every model: vectors of texts and of tokens. Raises: ModelError for Dense modules that cannot be loaded."""
    dense = [_load_dense(spec, entry, device) for entry in files.dense]
    pooler = VectorPooler(files.pooling, dense, normalize=files.card.normalize, exclude_prompt=files.card.exclude_prompt)
    return dict.fromkeys(pooler.outputs, pooler)


@torch.inference_mode()
def label_poolers(
    spec: ModelSpec, files: ModelFiles, head: Head, hidden: torch.Tensor, spans: list[Span], logits: list[torch.Tensor]
) -> dict[str, Pooler]:
    """Of a head, which reads whatever rows give the whole model's logits again.

    hidden: the states of a trial, where `spans` are its prompts'. logits: what the whole model says of each. Raises: ModelError when no
    rows give them.
    """
    assert files.classes is not None
    count = logits[0].shape[-1]
    if count != len(files.classes.labels):
        raise ModelError(f"model {spec.id!r}: its head has {count} classes, and its config.json names {len(files.classes.labels)}")
    activations = {name: _activation(spec, getattr(files.classes, name)) for name in ("activation", "score_activation")}
    right = torch.cat([one.reshape(-1, count) for one in logits])
    tried: list[tuple[float, LabelPooler]] = []
    for rows in (None,) if files.classes.per_token else ROWS:
        pooler = LabelPooler(head, rows, **activations)
        got = torch.cat([one.reshape(-1, count) for one in pooler.logits(hidden, spans)])
        tried.append((_relative(got, right), pooler))
    difference, best = min(tried, key=lambda one: one[0])
    if difference > _limit(hidden):
        raise ModelError(
            f"model {spec.id!r}: its head reads its states in a way that this server does not run: relative difference {difference:.1e}"
        )
    return dict.fromkeys(best.outputs, best)  # of a broken checkpoint any, and each request is told


@torch.inference_mode()
def plugin_poolers(spec: ModelSpec, loaded: LoadedModel, hidden: torch.Tensor, spans: list[Span]) -> dict[str, Pooler]:
    """Made by the factories of plugins, and tried. Raises: ModelError, naming operation and factory, for one that fails."""
    poolers: dict[str, Pooler] = {}
    for operation, factory in spec.poolers.items():
        who = f"model {spec.id!r}: the pooler {factory} of {operation!r}"
        try:
            module, _, name = factory.partition(":")
            pooler: Pooler = operator.attrgetter(name)(importlib.import_module(module))(loaded)
            why = _try(pooler, operation, hidden, spans)
        except Exception as error:  # code of a plugin's, which may raise anything
            raise ModelError(f"{who} raised {type(error).__name__}: {error}") from error
        if why:
            raise ModelError(f"{who} {why}")
        poolers[operation] = pooler
    return poolers


def _try(pooler: Pooler, operation: str, hidden: torch.Tensor, spans: list[Span]) -> str:
    """Run a pooler on a batch and on each of its sequences alone; say what is wrong with what it gives, or nothing."""
    params = PoolingParams(outputs=(operation,))
    wanted = [Span(span.start, span.length, 0, params) for span in spans]
    together = list(pooler(operation, hidden, wanted))
    if len(together) != len(spans):
        return f"gives {len(together)} tensors for {len(spans)} sequences"
    for span, result in zip(wanted, together, strict=True):
        if result.dtype != torch.float32:
            return f"gives {result.dtype}, and float32 is needed"
        (alone,) = pooler(operation, hidden[span.start : span.end], [Span(0, span.length, 0, params)])
        if alone.shape != result.shape:
            return f"gives the shape {tuple(result.shape)} in a batch and {tuple(alone.shape)} alone"
        difference = _relative(result, alone)
        if difference > _limit(hidden):
            return f"depends on the batch: relative difference {difference:.1e} between a sequence among others and alone"
    return ""


def _relative(got: torch.Tensor, right: torch.Tensor) -> float:
    """The greatest difference, relative to the greatest number; by size and not by angle: a single logit has none."""
    if not got.numel():
        return 0.0
    return float((got - right).abs().max()) / max(float(right.abs().max()), 1e-6)


def _limit(hidden: torch.Tensor) -> float:
    return FLOAT32_TOLERANCE if hidden.dtype == torch.float32 else HALF_TOLERANCE


def _activation(spec: ModelSpec, name: str) -> torch.nn.Module:
    """By the name that `classes.py` gives it."""
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    module, _, kind = name.rpartition(".")
    try:
        activation = getattr(importlib.import_module(module), kind)()
        if not isinstance(activation, torch.nn.Module):
            raise TypeError(f"{name} is no torch module")
    except Exception as error:  # a path out of a model's files
        raise ModelError(f"model {spec.id!r}: its activation {name!r} cannot be made: {error}") from error
    return activation


def _load_dense(spec: ModelSpec, entry: DenseFiles, device: torch.device) -> Dense:
    folder = Path(entry.folder)
    try:
        if (folder / "model.safetensors").is_file():
            weights = load_file(folder / "model.safetensors")
        else:
            weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        module, _, name = entry.activation.rpartition(".")
        activation = getattr(importlib.import_module(module), name)()
        if not isinstance(activation, torch.nn.Module):
            raise TypeError(f"{entry.activation} is no torch module")
        linear = torch.nn.Linear(entry.in_features, entry.out_features, bias=entry.bias)
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in weights.items()})
    except Exception as error:  # files of third parties: whatever is wrong with them, the operator needs the folder's name
        raise ModelError(f"model {spec.id!r}: the Dense module in {folder} cannot be loaded: {error}") from error
    return Dense(linear, activation).to(device).requires_grad_(False).eval()
