"""From the hidden states of a batch to the outputs that each sequence asked for: one pooler for each kind of output, a file each."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from jackfield.client import ModelCard
from jackfield.engine.scheduler import Sequence
from jackfield.errors import NonFiniteOutput, ServingError
from jackfield.outputs import FloatArray
from jackfield.params import PoolingParams

__all__ = ["LoadedModel", "Pooler", "SequenceResult", "Span", "pool", "spans_of"]

SequenceResult = dict[str, FloatArray] | ServingError


class Span:
    """Where a sequence's states lie, `[start:start + length]`, and what it wants of them. skip: leading tokens of its instruction."""

    __slots__ = ("length", "params", "skip", "start")

    def __init__(self, start: int, length: int, skip: int, params: PoolingParams) -> None:
        self.start = start
        self.length = length
        self.skip = skip
        self.params = params

    @property
    def end(self) -> int:
        """Where the next sequence begins."""
        return self.start + self.length


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What the factory of a plugin's pooler is given.

    card, config: what its files say, and its config.json. folder: of its transformers files, weights of heads among them. model: the base
    that makes the hidden states; its weights are shared, and not to be changed.
    """

    card: ModelCard
    config: dict[str, Any]
    folder: Path
    model: torch.nn.Module
    device: torch.device
    dtype: torch.dtype


class Pooler(Protocol):
    """Computes some outputs. One object a model, called by several threads at once; what it gives a sequence must not depend on others."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the operations that it computes."""
        ...

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> Many[torch.Tensor]:
        """hidden: `[T, H]`; spans: those that want this output, in the order of their states. One float32 tensor each."""
        ...


def spans_of(sequences: list[Sequence]) -> list[Span]:
    """The spans of sequences whose states lie end to end."""
    spans: list[Span] = []
    start = 0
    for sequence in sequences:
        params = sequence.group.request.params
        assert isinstance(params, PoolingParams)
        prefixes = sequence.group.request.prefix_lengths
        spans.append(Span(start, sequence.length, prefixes[sequence.index] if prefixes else 0, params))
        start += sequence.length
    return spans


def pool(poolers: dict[str, Pooler], hidden: torch.Tensor, spans: list[Span]) -> list[SequenceResult]:
    """One result a span. poolers: by output. Sequences of one batch may want different things."""
    values: list[dict[str, FloatArray]] = [{} for _ in spans]
    finite = [True] * len(spans)
    wanted: dict[str, list[int]] = {}
    for position, span in enumerate(spans):
        for output in span.params.outputs:
            wanted.setdefault(output, []).append(position)
    for output, positions in wanted.items():
        results = poolers[output](output, hidden, [spans[position] for position in positions])
        for position, result in zip(positions, results, strict=True):
            array: FloatArray = result.cpu().numpy()
            values[position][output] = array
            finite[position] &= bool(np.isfinite(array).all())
    return [
        kept if good else NonFiniteOutput("The model gave non-finite values (NaN or infinity) for this input.")
        for kept, good in zip(values, finite, strict=True)
    ]
