"""Packed attention: all sequences of a batch lie in one `[1, T]` row, and each attends to itself alone.

Registered under one name in transformers' public attention and mask registries, so modelling code stays untouched. What the batch looks
like is not passed through the model (DistilBERT drops unknown keyword arguments) but set for the duration of a forward pass.

On a CPU: one scaled-dot-product call for each size of block (`layout.py`). On a GPU: torch's variable-length kernel (`varlen.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from jackfield.engine.layout import Layout, Region, plan_blocks, plan_end_to_end
from jackfield.engine.varlen import varlen_attention

__all__ = ["PACKED", "PackedBatch", "attend", "calls_so_far", "is_packed", "packed_batch"]

PACKED = "jackfield_packed"


class PackedBatch:
    """One forward pass: its layout and, on a CPU, the masks of its blocks.

    rows: index of every token in the row, sequence by sequence: what gathers the hidden states. alone: tokens of the batch's only
    sequence, which begins its row; 0 where there are several.
    """

    __slots__ = ("alone", "causal", "cu_seqlens", "layout", "masks", "max_length", "rows")

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype, *, causal: bool) -> None:
        self.causal = causal
        self.max_length = max(lengths)
        self.alone = lengths[0] if len(lengths) == 1 else 0
        self.cu_seqlens: torch.Tensor | None = None
        self.masks: list[tuple[Region, torch.Tensor | None]] = []
        if device.type == "cpu":
            self.layout = plan_blocks(lengths)
            self.masks = self._masks(dtype)
        else:
            self.layout = plan_end_to_end(lengths)
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.cu_seqlens = ends.to(device, non_blocking=True)
        self.rows = torch.cat([torch.arange(s, s + n) for s, n in zip(self.layout.starts, lengths, strict=True)])

    def _masks(self, dtype: torch.dtype) -> list[tuple[Region, torch.Tensor | None]]:
        if self.alone and not self.causal:
            return [(self.layout.regions[0], None)]  # its padding is cut from the keys
        owners = _owners(self.layout)
        return [(region, _mask(owners[region.start : region.end], region, dtype, self.causal)) for region in self.layout.regions]


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


def is_packed() -> bool:
    """Whether this is the forward pass of a packed batch."""
    return _current.get(None) is not None


def _owners(layout: Layout) -> torch.Tensor:
    """For each token of the row the number of its sequence; -1 for padding, which attends to padding."""
    owners = torch.full((layout.total,), -1, dtype=torch.int32)
    for number, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        owners[start : start + length] = number
    return owners


def _mask(owners: torch.Tensor, region: Region, dtype: torch.dtype, causal: bool) -> torch.Tensor | None:
    """`[count, 1, size, size]` to be added to the scores, or None where every block is one whole sequence."""
    owners = owners.view(region.count, region.size)
    if not causal and bool((owners == owners[:, :1]).all()):
        return None
    together = owners[:, :, None] == owners[:, None, :]
    if causal:
        together &= torch.ones(region.size, region.size, dtype=torch.bool).tril()
    return torch.zeros(together.shape, dtype=dtype).masked_fill_(~together, float("-inf")).unsqueeze(1)


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
    """transformers' attention signature."""
    return attend(query, key, value, scaling), None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attention of the packed batch: query `[1, heads, T, dim]` to output `[1, T, heads, dim]`."""
    global _calls
    _calls += 1
    batch = _current.get()
    if batch.cu_seqlens is not None:
        return varlen_attention(query, key, value, batch.cu_seqlens, batch.max_length, scaling, batch.causal)
    if batch.alone and not batch.causal:
        key, value = key[:, :, : batch.alone], value[:, :, : batch.alone]
    parts = [_attend_blocks(query, key, value, region, mask, scaling) for region, mask in batch.masks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _attend_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, region: Region, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """The blocks of one region: `[count * size, heads, dim]`, nothing copied on the way in or out."""

    if region.count == 1 and region.size == query.shape[2]:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
        return out[0].transpose(0, 1)

    def blocks(states: torch.Tensor) -> torch.Tensor:
        rows = states[0].transpose(0, 1)[region.start : region.end]
        return rows.view(region.count, region.size, *rows.shape[1:]).transpose(1, 2)

    out = scaled_dot_product_attention(
        blocks(query), blocks(key), blocks(value), attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout says who attends to whom; no mask is built."""


AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, _no_mask)
