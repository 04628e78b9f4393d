"""Attention of a step that generates: each token sees its own sequence's past, which lies in the blocks of a cache.

Registered under a name of its own in transformers' attention and mask registries; the step is set for the duration of a forward pass, as
`attention.py` does, and without one this is its attention of packed prompts. Decoding sequences (one token each) are attended to in groups
of like length, a call each; prompts one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from jackfield.engine.attention import count_call, no_mask, packed_attention
from jackfield.engine.generation.cache import KVCache
from jackfield.engine.softcap import attention_with_softcap
from jackfield.engine.varlen import Paging, paged_attention

__all__ = ["PAGED", "Chunk", "PagedBatch", "attend_rows", "current_batch", "paged_batch"]

PAGED = "jackfield_paged"
# A group of decoding sequences holds lengths up to this many times its shortest: what is padded is less than a call more would cost.
GROUP_RATIO = 1.5
MIN_GROUP_TOKENS = 64


class Chunk:
    """Tokens of one sequence in a step: those at the places from `start` on, of which all before are in the cache.

    blocks: of the sequence, enough for the chunk too.
    """

    __slots__ = ("blocks", "length", "start")

    def __init__(self, blocks: list[int], start: int, length: int) -> None:
        self.blocks = blocks
        self.start = start
        self.length = length

    @property
    def end(self) -> int:
        """Tokens that are in the cache afterwards."""
        return self.start + self.length


class _Group:
    """Decoding sequences `[first:first + count]` of the row, of like length. masks: by window."""

    __slots__ = ("count", "end", "ends", "first", "table", "views")

    def __init__(self, first: int, chunks: list[Chunk], block_size: int) -> None:
        self.first = first
        self.count = len(chunks)
        self.end = first + self.count
        self.ends = torch.tensor([chunk.end for chunk in chunks])
        width = -(-chunks[-1].end // block_size)
        # Whoever is shorter reads a block of his own again, and the mask hides it.
        self.table = torch.tensor([(chunk.blocks + [chunk.blocks[0]] * width)[:width] for chunk in chunks])
        self.views: dict[int | None, tuple[torch.Tensor, int, torch.Tensor | None]] = {}


class PagedBatch:
    """One forward pass over chunks: the decoding ones (of one token) first, by length, then the others.

    order: where the chunks that were given lie in that order. last: the row of each of theirs last token, in the order given.
    """

    def __init__(self, cache: KVCache, chunks: list[Chunk]) -> None:
        self.cache = cache
        decoding = sorted((i for i, chunk in enumerate(chunks) if chunk.length == 1), key=lambda i: chunks[i].end)
        self.order = [*decoding, *(i for i, chunk in enumerate(chunks) if chunk.length > 1)]
        self.chunks = [chunks[i] for i in self.order]
        ends = list(accumulate(chunk.length for chunk in self.chunks))
        self.num_tokens = ends[-1]
        self.last = [0] * len(chunks)
        for place, end in zip(self.order, ends, strict=True):
            self.last[place] = end - 1
        size = cache.block_size
        self.slots = torch.tensor(
            [c.blocks[place // size] * size + place % size for c in self.chunks for place in range(c.start, c.end)], dtype=torch.long
        )
        self.groups = [_Group(first, self.chunks[first:end], size) for first, end in _groups([c.end for c in self.chunks[: len(decoding)]])]
        self.prompts = [(end - chunk.length, chunk) for end, chunk in zip(ends, self.chunks, strict=True) if chunk.length > 1]
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self.slots = self.slots.to(cache.device)

    @cached_property
    def paging(self) -> Paging:
        """The same for the kernel of a GPU."""
        widest = max(-(-chunk.end // self.cache.block_size) for chunk in self.chunks)
        lengths, ends = [chunk.length for chunk in self.chunks], [chunk.end for chunk in self.chunks]
        given = (
            list(accumulate(lengths, initial=0)),
            ends,
            [(chunk.blocks + [chunk.blocks[0]] * widest)[:widest] for chunk in self.chunks],
        )
        starts, used, table = (torch.tensor(values, dtype=torch.int32, device=self.cache.device) for values in given)
        return Paging(starts, used, table, max(lengths), max(ends))

    def positions(self) -> list[int]:
        """Of each token of the row."""
        return [place for chunk in self.chunks for place in range(chunk.start, chunk.end)]

    def group_view(self, group: _Group, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, int, torch.Tensor | None]:
        """The blocks that a group reads, how many tokens of them count, and the mask `[count, 1, 1, tokens]` to be added."""
        found = group.views.get(window)
        if found is None:
            size = self.cache.block_size
            longest = int(group.ends[-1])
            first = 0
            if window is not None and longest > window:
                first = max(int(group.ends[0]) - window, 0) // size
            tokens = longest - first * size
            places = torch.arange(first * size, longest)
            seen = places[None] < group.ends[:, None]
            if window is not None:
                seen &= places[None] >= group.ends[:, None] - window
            mask = None if bool(seen.all()) else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None]
            found = group.views[window] = (group.table[:, first:], tokens, mask)
        return found

    def prompt_view(self, number: int, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, int, int, torch.Tensor | None]:
        """Of a chunk: its blocks, the first and the end of the tokens of them that count, and the mask; None for plain causal ones."""
        _, chunk = self.prompts[number]
        size = self.cache.block_size
        first = max(chunk.start - window + 1, 0) // size if window is not None else 0
        table = torch.tensor([chunk.blocks[first : -(-chunk.end // size)]])
        key = (number, window)
        if key not in self._masks:
            queries, places = torch.arange(chunk.start, chunk.end), torch.arange(first * size, chunk.end)
            seen = places[None] <= queries[:, None]
            if window is not None:
                seen &= places[None] > queries[:, None] - window
            plain = chunk.start == 0 and (window is None or window >= chunk.end)
            self._masks[key] = None if plain else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return table, first * size, chunk.end, self._masks[key]


def _groups(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of lengths, shortest first, that are near enough to be padded to the longest of them."""
    groups: list[tuple[int, int]] = []
    first = 0
    for place, length in enumerate(lengths):
        if length > max(lengths[first] * GROUP_RATIO, MIN_GROUP_TOKENS):
            groups.append((first, place))
            first = place
    if lengths:
        groups.append((first, len(lengths)))
    return groups


_current: ContextVar[PagedBatch] = ContextVar("jackfield_paged_batch")


@contextmanager
def paged_batch(batch: PagedBatch) -> Iterator[PagedBatch]:
    """Make `batch` the step of the forward passes inside the block."""
    token = _current.set(batch)
    try:
        yield batch
    finally:
        _current.reset(token)


def _attend(
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
    """transformers' attention signature: query `[1, heads, T, size]` to `[1, T, heads, size]`."""
    batch = _current.get(None)
    if batch is None:  # a batch of prompts that are to be read only
        return packed_attention(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    rows, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    cached = torch.cat([keys.flatten(1), values.flatten(1)], dim=1)
    return attend_rows(batch, int(module.layer_idx), rows, cached, scaling, sliding_window, softcap)[None], None  # type: ignore[arg-type]


def current_batch() -> PagedBatch | None:
    """The step of this forward pass; None for a batch of prompts that are to be read only."""
    return _current.get(None)


def attend_rows(
    batch: PagedBatch,
    layer: int,
    rows: torch.Tensor,
    cached: torch.Tensor,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens. rows: their queries `[T, heads, size]`. cached: their keys and values, as the cache takes them.

    Returns `[T, heads, value size]`. window: a token sees those nearer than this only. What lies behind the batch's tokens is padding.
    """
    count_call()
    cache = batch.cache
    cache.write(layer, batch.slots, cached if len(cached) == batch.num_tokens else cached[: batch.num_tokens])
    parts = _attend_parts(batch, layer, rows, cached, scaling, window, softcap)
    padding = len(rows) - batch.num_tokens
    if padding:
        parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_parts(
    batch: PagedBatch,
    layer: int,
    rows: torch.Tensor,
    cached: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> list[torch.Tensor]:
    if batch.cache.device.type != "cpu" and softcap is None:
        return [paged_attention(rows[: batch.num_tokens], *batch.cache.pages(layer), batch.paging, scaling, window)]
    parts = [
        _decode(batch, layer, group, rows if group.count == len(rows) else rows[group.first : group.end], scaling, window, softcap)
        for group in batch.groups
    ]
    parts += [
        _prefill(batch, layer, number, rows[first : first + chunk.length], cached[first : first + chunk.length], scaling, window, softcap)
        for number, (first, chunk) in enumerate(batch.prompts)
    ]
    return parts


def _decode(
    batch: PagedBatch,
    layer: int,
    group: _Group,
    rows: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One token of each of a group's sequences, in one call. The heads that share a key are the queries of one."""
    table, tokens, mask = batch.group_view(group, window, rows.dtype)
    keys, values = batch.cache.read(layer, table)
    query = rows.view(rows.shape[0], keys.shape[1], -1, rows.shape[-1])
    out = attention_with_softcap(query, keys[:, :, :tokens], values[:, :, :tokens], mask, scaling, softcap)
    return out.reshape(rows.shape[0], rows.shape[1], -1)


def _prefill(
    batch: PagedBatch,
    layer: int,
    number: int,
    rows: torch.Tensor,
    cached: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """A piece of one prompt."""
    table, begin, end, mask = batch.prompt_view(number, window, rows.dtype)
    query = rows.transpose(0, 1)[None]
    if mask is None:  # it begins its sequence, and needs nothing but itself
        heads, key, value = batch.cache.shapes[layer]
        keys, values = (part[None].transpose(1, 2) for part in _heads(cached, heads, key, value))
    else:
        keys, values = (states[:, :, : end - begin] for states in batch.cache.read(layer, table))
    if softcap is None:
        shared = query.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=shared)
    else:
        if mask is None:
            mask = torch.full((len(rows), len(rows)), float("-inf"), dtype=rows.dtype, device=rows.device).triu_(1)
        out = attention_with_softcap(query, keys, values, mask, scaling, softcap)
    return out[0].transpose(0, 1)


def _heads(cached: torch.Tensor, heads: int, key: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = cached.split_with_sizes((heads * key, heads * value), dim=-1)
    return keys.view(*keys.shape[:-1], heads, key), values.view(*values.shape[:-1], heads, value)


AttentionInterface.register(PAGED, _attend)
AttentionMaskInterface.register(PAGED, no_mask)
