"""Vectors of texts and of tokens: `embed`, `token_embed`, `hidden_states`.

Pooling follows sentence-transformers 6.2 (`sentence_transformer/modules/pooling.py`), except that sums are taken, and vectors kept, in
float32 whatever the model's dtype.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from jackfield.engine.poolers import Span
from jackfield.params import PoolingParams

__all__ = ["Dense", "VectorPooler"]


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


class VectorPooler:
    """Pools, projects and normalises.

    modes: names of pooling modes, concatenated. normalize: whether vectors are L2-normalised unless the request says. exclude_prompt:
    the instruction's tokens stay out of the pool.
    """

    outputs = ("embed", "token_embed", "hidden_states")

    def __init__(self, modes: tuple[str, ...], dense: list[Dense], *, normalize: bool, exclude_prompt: bool) -> None:
        self.modes = modes
        self.dense = dense
        self.normalize = normalize
        self.exclude_prompt = exclude_prompt

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
        """`[dim]` a span for embed, `[length, H]` for the others."""
        if output == "embed":
            vectors = self._pool(hidden, spans)
            vectors, unit = vectors.cpu(), normalize(vectors, dim=1).cpu()  # all rows in one copy
            rows = [(unit if self._activates(span) else vectors)[row] for row, span in enumerate(spans)]
            return [_shorten(row, span.params, self._activates(span)) for row, span in zip(rows, spans, strict=True)]
        states = [hidden[span.start : span.end].float() for span in spans]
        if output == "hidden_states":
            return states
        return [normalize(rows, dim=1) if self._activates(span) else rows for rows, span in zip(states, spans, strict=True)]

    def _activates(self, span: Span) -> bool:
        return self.normalize if span.params.use_activation is None else span.params.use_activation

    def _pool(self, hidden: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """`[T, H]` to `[n, dim]` in float32, before normalisation. Runs of equal length are pooled at once."""
        parts: list[torch.Tensor] = []
        first = 0
        for position in range(1, len(spans) + 1):
            if position < len(spans) and self._continues(spans[position - 1], spans[position]):
                continue
            span, count = spans[first], position - first
            states = hidden[span.start : span.start + span.length * count].view(count, span.length, hidden.shape[1])
            parts.append(torch.cat([_pool(states, mode, self._skip(span)) for mode in self.modes], dim=1))
            first = position
        vectors = torch.cat(parts)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors

    def _continues(self, one: Span, other: Span) -> bool:
        return one.end == other.start and one.length == other.length and self._skip(one) == self._skip(other)

    def _skip(self, span: Span) -> int:
        """Leading tokens that are not pooled."""
        return span.skip if self.exclude_prompt else 0


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
