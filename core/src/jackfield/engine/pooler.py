"""From the hidden states of a packed batch to the outputs that each sequence asked for.

Pooling follows sentence-transformers 6.2 (`sentence_transformer/modules/pooling.py`), except that sums are taken, and vectors kept, in
float32 whatever the model's dtype.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from jackfield.engine.scheduler import Sequence
from jackfield.errors import NonFiniteOutput, ServingError
from jackfield.outputs import FloatArray
from jackfield.params import PoolingParams

__all__ = ["Dense", "Pooler", "SequenceResult"]

SequenceResult = dict[str, FloatArray] | ServingError


class Dense(torch.nn.Module):
    """A projection of the pooled vector, as sentence-transformers' Dense: a linear layer and an activation."""

    def __init__(self, linear: torch.nn.Linear, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """`[n, in]` to `[n, out]`."""
        result: torch.Tensor = self.activation(self.linear(vectors))
        return result


class Pooler:
    """Pools, projects and normalises; one a model.

    modes: names of pooling modes, concatenated. normalize: whether vectors are L2-normalised unless the request says. exclude_prompt:
    the instruction's tokens stay out of the pool.
    """

    def __init__(self, modes: tuple[str, ...], dense: list[Dense], *, normalize: bool, exclude_prompt: bool) -> None:
        self.modes = modes
        self.dense = dense
        self.normalize = normalize
        self.exclude_prompt = exclude_prompt

    def __call__(self, hidden: torch.Tensor, sequences: list[Sequence]) -> list[SequenceResult]:
        """hidden: `[T, H]`, the sequences' states end to end in their order. One result a sequence."""
        wanted = [_wanted(s) for s in sequences]
        vectors = unit = None
        finite: list[bool] = [True] * len(sequences)
        if any("embed" in params.outputs for params in wanted):
            vectors = self.pool(hidden, sequences)
            unit = normalize(vectors, dim=1)
            finite = torch.isfinite(vectors).all(dim=1).tolist()
            vectors, unit = vectors.cpu(), unit.cpu()
        results: list[SequenceResult] = []
        start = 0
        for row, (sequence, params) in enumerate(zip(sequences, wanted, strict=True)):
            end = start + sequence.length
            activate = self.normalize if params.use_activation is None else params.use_activation
            values: dict[str, torch.Tensor] = {}
            for output in params.outputs:
                if output == "embed":
                    assert vectors is not None
                    assert unit is not None
                    values[output] = _shorten((unit if activate else vectors)[row], params, activate)
                else:
                    states = hidden[start:end].float()
                    values[output] = normalize(states, dim=1) if output == "token_embed" and activate else states
            results.append(_arrays(values, finite[row]))
            start = end
        return results

    def pool(self, hidden: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """`[T, H]` to `[n, dim]` in float32, before normalisation. Runs of equal length are pooled at once."""
        parts: list[torch.Tensor] = []
        start = first = 0
        for position in range(1, len(sequences) + 1):
            if position < len(sequences) and self._like(sequences[first], sequences[position]):
                continue
            length, count = sequences[first].length, position - first
            end = start + length * count
            states = hidden[start:end].view(count, length, hidden.shape[1])
            parts.append(torch.cat([_pool(states, mode, self._skip(sequences[first])) for mode in self.modes], dim=1))
            start, first = end, position
        vectors = torch.cat(parts)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors

    def _like(self, one: Sequence, other: Sequence) -> bool:
        return one.length == other.length and self._skip(one) == self._skip(other)

    def _skip(self, sequence: Sequence) -> int:
        """Leading tokens that are not pooled."""
        lengths = sequence.group.request.prefix_lengths
        return lengths[sequence.index] if lengths and self.exclude_prompt else 0


def _wanted(sequence: Sequence) -> PoolingParams:
    params = sequence.group.request.params
    assert isinstance(params, PoolingParams)
    return params


def _pool(states: torch.Tensor, mode: str, skip: int) -> torch.Tensor:
    """`[n, L, H]` to `[n, H]` in float32; the first `skip` tokens are left out."""
    length = states.shape[1]
    if mode == "lasttoken":
        return states[:, -1].float()
    if mode == "cls":
        return states[:, skip if skip < length else 0].float()
    kept = states[:, skip:]
    if mode == "max":
        return kept.amax(1).float()
    count = max(length - skip, 1e-9)
    if mode == "weightedmean":
        weights = torch.arange(skip + 1, length + 1, device=states.device, dtype=torch.float32)
        return torch.einsum("nlh,l->nh", kept.float(), weights) / weights.sum().clamp(min=1e-9)
    return kept.sum(1, dtype=torch.float32) / (count if mode == "mean" else count**0.5)


def _shorten(vector: torch.Tensor, params: PoolingParams, activate: bool) -> torch.Tensor:
    if params.dimensions is None or params.dimensions == vector.shape[0]:
        return vector
    short = vector[: params.dimensions]
    return normalize(short, dim=0) if activate else short


def _arrays(values: dict[str, torch.Tensor], finite: bool) -> SequenceResult:
    if not finite or any(name != "embed" and not torch.isfinite(value).all() for name, value in values.items()):
        return NonFiniteOutput("The model gave non-finite values (NaN or infinity) for this input.")
    return {name: value.cpu().numpy() for name, value in values.items()}
