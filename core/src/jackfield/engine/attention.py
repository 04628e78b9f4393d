"""Packed attention: sequences lie end to end in one `[1, T]` row, and each attends to itself alone.

Registered under one name in transformers' public attention and mask registries, so modelling code stays untouched. What the batch looks
like is not passed through the model (DistilBERT drops unknown keyword arguments) but set for the duration of a forward pass.

On a CPU: one scaled-dot-product call for each run of sequences of equal length. On a GPU: torch's variable-length kernel (`varlen.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from jackfield.engine.varlen import varlen_attention

__all__ = ["PACKED", "PackedBatch", "calls_so_far", "packed_batch"]

PACKED = "jackfield_packed"


class PackedBatch:
    """The layout of one forward pass.

    lengths: tokens of each sequence, in the order in which they lie. groups: runs of equal length as (start, end, count, length).
    num_calls counts the attention calls of the pass: the load-time check wants one a layer.
    """

    __slots__ = ("causal", "cu_seqlens", "groups", "lengths", "max_length", "num_calls")

    def __init__(self, lengths: list[int], device: torch.device, *, causal: bool) -> None:
        self.lengths = lengths
        self.causal = causal
        self.num_calls = 0
        self.max_length = max(lengths)
        self.groups = _groups(lengths)
        self.cu_seqlens: torch.Tensor | None = None
        if device.type != "cpu":
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.cu_seqlens = ends.to(device, non_blocking=True)


_current: ContextVar[PackedBatch] = ContextVar("jackfield_packed_batch")
_calls = 0


def calls_so_far() -> int:
    """Attention calls of this process since it began: a sign of life within a long step, one a layer."""
    return _calls


@contextmanager
def packed_batch(batch: PackedBatch) -> Iterator[PackedBatch]:
    """Make `batch` the layout of the forward passes inside the block."""
    token = _current.set(batch)
    try:
        yield batch
    finally:
        _current.reset(token)


def _groups(lengths: list[int]) -> list[tuple[int, int, int, int]]:
    groups: list[tuple[int, int, int, int]] = []
    start = first = 0
    for position in range(1, len(lengths) + 1):
        if position == len(lengths) or lengths[position] != lengths[first]:
            end = start + lengths[first] * (position - first)
            groups.append((start, end, position - first, lengths[first]))
            start, first = end, position
    return groups


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query `[1, heads, T, dim]` to output `[1, T, heads, dim]`."""
    global _calls
    _calls += 1
    batch = _current.get()
    batch.num_calls += 1
    causal = batch.causal and bool(getattr(module, "is_causal", True))
    if batch.cu_seqlens is not None:
        return varlen_attention(query, key, value, batch.cu_seqlens, batch.max_length, scaling, causal), None
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    grouped = q.shape[1] != k.shape[1]
    out = torch.empty((1, *q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    for start, end, count, length in batch.groups:
        part = scaled_dot_product_attention(
            q[start:end].view(count, length, *q.shape[1:]).transpose(1, 2),
            k[start:end].view(count, length, *k.shape[1:]).transpose(1, 2),
            v[start:end].view(count, length, *v.shape[1:]).transpose(1, 2),
            is_causal=causal and length > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
        out[0, start:end] = part.transpose(1, 2).reshape(end - start, *out.shape[2:])
    return out, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout says who attends to whom; no mask is built."""


AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, _no_mask)
