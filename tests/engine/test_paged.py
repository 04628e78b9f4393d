"""Attention over a cache in blocks: as the CPU computes it, as the reference of the GPU's kernel does, and by hand."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.engine.generation.cache import KVCache
from jackfield.engine.generation.paged import Chunk, PagedBatch, attend_rows
from jackfield.engine.varlen import paged_attention, paged_reference

SIZE = 8
sequences = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6)


def filled(kv_heads: int, device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = SIZE) -> KVCache:
    """A cache with something in every place: what a sequence must not read is no zero."""
    width = kv_heads * 2 * size * dtype.itemsize
    cache = KVCache([(kv_heads, size, size)], 16384 * width, dtype, torch.device(device))
    places = torch.arange(cache.num_blocks * cache.block_size, device=device)
    cache.write(0, places, torch.randn(len(places), kv_heads * 2 * size, generator=torch.Generator().manual_seed(9)).to(device, dtype))
    return cache


def chunks_of(given: list[tuple[int, int]], cache: KVCache, seed: int) -> list[Chunk]:
    """start and length of each, in blocks of its own that lie anywhere."""
    free = Random(seed).sample(range(cache.num_blocks), cache.num_blocks)
    made = []
    for start, length in given:
        count = -(-(start + length) // cache.block_size)
        made.append(Chunk(free[:count], start, length))
        del free[:count]
    return made


def by_hand(batch: PagedBatch, rows: torch.Tensor, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    """Token by token, head by head; what is cached was written by then."""
    keys, values = (states.flatten(0, 1) for states in batch.cache.pages(0))
    shared = rows.shape[1] // keys.shape[1]
    out = torch.empty_like(rows)
    begin = 0
    for chunk in batch.chunks:
        for offset in range(chunk.length):
            place = chunk.start + offset
            first = 0 if window is None else max(place - window + 1, 0)
            size = batch.cache.block_size
            slots = torch.tensor([chunk.blocks[at // size] * size + at % size for at in range(first, place + 1)])
            for head in range(rows.shape[1]):
                scores = keys[slots, head // shared] @ rows[begin + offset, head] * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                out[begin + offset, head] = scores.softmax(0) @ values[slots, head // shared]
        begin += chunk.length
    return out


@settings(max_examples=60, deadline=None)
@given(
    sequences, st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.none() | st.integers(1, 60), st.sampled_from([None, 5.0]), st.integers(0, 99)
)
def test_every_way_of_computing_it(
    given_chunks: list[tuple[int, int]], heads: tuple[int, int], window: int | None, softcap: float | None, seed: int
) -> None:
    cache = filled(heads[1])
    batch = PagedBatch(cache, chunks_of(given_chunks, cache, seed))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch.num_tokens, heads[0], SIZE, generator=generator)
    cached = torch.randn(batch.num_tokens, heads[1] * 2 * SIZE, generator=generator)
    out = attend_rows(batch, 0, rows, cached, 0.4, window, softcap)
    torch.testing.assert_close(out, by_hand(batch, rows, 0.4, window, softcap), atol=1e-5, rtol=0)
    if softcap is None:
        theirs = paged_reference(rows, *cache.pages(0), batch.paging, 0.4, window)
        torch.testing.assert_close(out, theirs, atol=1e-5, rtol=0)
        assert torch.equal(paged_attention(rows, *cache.pages(0), batch.paging, 0.4, window), theirs)


def test_the_row_and_the_order_that_was_given() -> None:
    """Decoding sequences come first in the row, by length; `last` finds each again."""
    cache = filled(1)
    chunks = chunks_of([(0, 5), (30, 1), (7, 1), (20, 3)], cache, 0)
    batch = PagedBatch(cache, chunks)
    assert batch.order == [2, 1, 0, 3]
    assert batch.positions() == [7, 30, 0, 1, 2, 3, 4, 20, 21, 22]
    assert batch.last == [6, 1, 0, 9]


def test_what_lies_behind_the_tokens_is_in_nobodys_cache() -> None:
    cache = filled(1)
    batch = PagedBatch(cache, chunks_of([(20, 1)], cache, 0))
    before = [states.clone() for states in cache.pages(0)]
    out = attend_rows(batch, 0, torch.ones(2, 1, SIZE), torch.ones(2, 2 * SIZE), None)
    assert not out[1].any()
    assert sum(int((a != b).any(-1).sum()) for a, b in zip(before, cache.pages(0), strict=True)) == 2  # a key and a value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch's variable-length kernel has no CPU version")
@pytest.mark.parametrize("window", [None, 100], ids=["whole", "window"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["heads", "grouped"])
@pytest.mark.parametrize("given_chunks", [[(700, 1), (3, 1), (1300, 1)], [(0, 300), (512, 200)], [(0, 40), (900, 1), (255, 2)]])
def test_kernel_is_the_reference(given_chunks: list[tuple[int, int]], heads: tuple[int, int], window: int | None) -> None:
    cache = filled(heads[1], "cuda", torch.bfloat16, size=64)
    chunks = chunks_of(given_chunks, cache, 1)
    batch = PagedBatch(cache, chunks)
    assert list(accumulate(chunk.length for chunk in batch.chunks))[-1] == batch.num_tokens
    rows = torch.randn(batch.num_tokens, heads[0], 64, device="cuda", dtype=torch.bfloat16)
    cached = torch.randn(batch.num_tokens, heads[1] * 128, device="cuda", dtype=torch.bfloat16)
    ours = attend_rows(batch, 0, rows, cached, None, window)
    theirs = paged_reference(rows, *cache.pages(0), batch.paging, None, window)
    torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)
