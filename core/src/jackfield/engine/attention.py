"""Packed attention: all sequences of a batch lie in one `[1, T]` row, and each attends to itself alone.

Registered under one name in transformers' public attention and mask registries, so modelling code stays untouched. What the batch looks
like is not passed through the model (DistilBERT drops unknown keyword arguments) but set for the duration of a forward pass.

On a CPU: one scaled-dot-product call for each size of block (`layout.py`). On a GPU: torch's variable-length kernel (`varlen.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from jackfield.engine.layout import Layout, Region, plan_blocks, plan_end_to_end
from jackfield.engine.softcap import attention_with_softcap
from jackfield.engine.varlen import varlen_attention

__all__ = [
    "PACKED",
    "PackedBatch",
    "Reach",
    "attend",
    "calls_so_far",
    "count_call",
    "is_packed",
    "no_mask",
    "packed_attention",
    "packed_batch",
]

PACKED = "jackfield_packed"


# A sequence that is alone in its step, and attends through a window, is computed in pieces of so many queries.
WINDOW_CHUNK = 512


class Reach(NamedTuple):
    """Which tokens of its sequence a token sees: those before it only (causal), and those nearer than `window` only, itself included."""

    causal: bool
    window: int | None = None


EVERYTHING = Reach(causal=False)


class PackedBatch:
    """One forward pass: its layout and, on a CPU, the masks of its blocks, made when a layer asks for them.

    rows: index of every token in the row, sequence by sequence: what gathers the hidden states. alone: tokens of the batch's only
    sequence, which begins its row; 0 where there are several.
    """

    __slots__ = ("_dtype", "_masks", "_owners", "alone", "cu_seqlens", "layout", "max_length", "rows")

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.max_length = max(lengths)
        self.alone = lengths[0] if len(lengths) == 1 else 0
        self.cu_seqlens: torch.Tensor | None = None
        self._dtype = dtype
        self._owners: torch.Tensor | None = None
        self._masks: dict[tuple[int, Reach], torch.Tensor | None] = {}
        if device.type == "cpu":
            self.layout = plan_blocks(lengths)
        else:
            self.layout = plan_end_to_end(lengths)
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.cu_seqlens = ends.to(device, non_blocking=True)
        self.rows = torch.cat([torch.arange(s, s + n) for s, n in zip(self.layout.starts, lengths, strict=True)])

    def mask(self, number: int, reach: Reach) -> torch.Tensor | None:
        """Of the blocks of a region: `[count, 1, size, size]` to be added to the scores, or None where every token sees its whole block."""
        region = self.layout.regions[number]
        if reach.window is not None and reach.window >= region.size:
            reach = Reach(reach.causal)
        key = (number, reach)
        if key not in self._masks:
            if self._owners is None:
                self._owners = _owners(self.layout)
            self._masks[key] = _mask(self._owners[region.start : region.end], region, self._dtype, reach)
        return self._masks[key]


_current: ContextVar[PackedBatch] = ContextVar("jackfield_packed_batch")
_calls = 0


def calls_so_far() -> int:
    """Attention calls of this process since it began: a sign of life within a long step, one a layer."""
    return _calls


def count_call() -> None:
    """An attention call begins."""
    global _calls
    _calls += 1


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


def _mask(owners: torch.Tensor, region: Region, dtype: torch.dtype, reach: Reach) -> torch.Tensor | None:
    owners = owners.view(region.count, region.size)
    if reach == EVERYTHING and bool((owners == owners[:, :1]).all()):
        return None
    together = owners[:, :, None] == owners[:, None, :]
    places = torch.arange(region.size)
    together &= _seen(places, places, reach)
    return torch.zeros(together.shape, dtype=dtype).masked_fill_(~together, float("-inf")).unsqueeze(1)


def _seen(queries: torch.Tensor, keys: torch.Tensor, reach: Reach) -> torch.Tensor:
    """`[queries, keys]`: what each place of a sequence sees of others. A token always sees itself, so no row is empty."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0 if reach.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if reach.window is None else seen & (distance.abs() < reach.window)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature."""
    return attend(query, key, value, scaling, Reach(bool(getattr(module, "is_causal", False)), sliding_window), softcap), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    reach: Reach = EVERYTHING,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of the packed batch: query `[1, heads, T, dim]` to output `[1, T, heads, dim]`."""
    count_call()
    batch = _current.get()
    if batch.cu_seqlens is not None and softcap is None:
        return varlen_attention(query, key, value, batch.cu_seqlens, batch.max_length, scaling, reach.causal, reach.window)
    if batch.alone and softcap is None:
        return _attend_alone(query, key, value, scaling, reach, batch.alone)
    regions = batch.layout.regions
    parts = [
        _attend_blocks(query, key, value, region, batch.mask(number, reach), scaling, softcap) for number, region in enumerate(regions)
    ]
    padding = batch.layout.total - regions[-1].end
    if padding:
        parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _attend_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, reach: Reach, length: int
) -> torch.Tensor:
    """A sequence without neighbours needs no mask but that of a window. Its padding, at the end of the row, is cut from the keys."""
    key, value = key[:, :, :length], value[:, :, :length]
    attend_to = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    if reach.window is None or reach.window >= length:
        return attend_to(query, key, value, is_causal=reach.causal).transpose(1, 2)
    total = query.shape[2]
    parts: list[torch.Tensor] = []
    for start in range(0, total, WINDOW_CHUNK):
        end = min(start + WINDOW_CHUNK, total)
        # Padded queries lie behind the last key; they see it, so that no row of the mask is empty.
        first = max(min(start, length) - reach.window + 1, 0)
        last = min(end if reach.causal else end + reach.window - 1, length)
        seen = _seen(torch.arange(start, end).clamp(max=length - 1), torch.arange(first, last), reach)
        mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
        keys, values = key[:, :, first:last], value[:, :, first:last]
        parts.append(attend_to(query[:, :, start:end], keys, values, attn_mask=mask))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    region: Region,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """The blocks of one region: `[count * size, heads, dim]`, nothing copied on the way in or out."""

    def blocks(states: torch.Tensor) -> torch.Tensor:
        rows = states[0].transpose(0, 1)[region.start : region.end]
        return rows.view(region.count, region.size, *rows.shape[1:]).transpose(1, 2)

    out = attention_with_softcap(blocks(query), blocks(key), blocks(value), mask, scaling, softcap)
    return out.transpose(1, 2).flatten(0, 1)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout says who attends to whom; no mask is built."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, no_mask)
