"""Where sequences lie in a packed row, and that attention over the row is attention over each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from jackfield.engine.attention import PACKED, PackedBatch, Reach, calls_so_far, packed_batch
from jackfield.engine.layout import BLOCK, TRIM, Layout, Region, plan_blocks, plan_end_to_end

thorough = settings(max_examples=100, deadline=None)
with_torch = settings(max_examples=50, deadline=None)
any_lengths = st.lists(st.integers(1, 300) | st.integers(1, 40), min_size=1, max_size=60)
windows = st.none() | st.integers(1, 200)
small_lengths = st.lists(st.integers(1, 150), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spans(layout: Layout) -> list[tuple[int, int]]:
    """Begin and end of each sequence, in order of place."""
    return sorted((start, start + length) for start, length in zip(layout.starts, layout.lengths, strict=True))


def blocks(layout: Layout) -> list[tuple[int, int]]:
    return [
        (region.start + number * region.size, region.start + (number + 1) * region.size)
        for region in layout.regions
        for number in range(region.count)
    ]


@thorough
@given(any_lengths)
def test_sequences_do_not_overlap(lengths: list[int]) -> None:
    layout = plan_blocks(lengths)
    assert layout.lengths == lengths
    placed = spans(layout)
    assert placed[0][0] >= 0
    assert all(end <= start for (_, end), (start, _) in pairwise(placed))
    assert placed[-1][1] <= layout.total


@thorough
@given(any_lengths)
def test_each_sequence_lies_in_one_block(lengths: list[int]) -> None:
    layout = plan_blocks(lengths)
    for start, end in spans(layout):
        assert sum(low <= start and end <= high for low, high in blocks(layout)) == 1


@thorough
@given(any_lengths)
def test_regions_tile_the_row(lengths: list[int]) -> None:
    layout = plan_blocks(lengths)
    assert layout.regions
    position = 0
    for region in layout.regions:
        assert region.start == position
        assert region.count >= 1
        assert region.size >= 1
        position = region.end
    assert position <= layout.total < position + BLOCK
    cut = blocks(layout)
    assert cut[0][0] == 0
    assert all(high == low for (_, high), (low, _) in pairwise(cut))
    sizes = [region.size for region in layout.regions]
    assert sizes == sorted(set(sizes)), "one region a size: one attention call a size"


@thorough
@given(any_lengths)
def test_sizes_of_blocks(lengths: list[int]) -> None:
    """Multiples of 16 in a row of a multiple of 64; a batch that fits into one block takes a multiple of 8."""
    layout = plan_blocks(lengths)
    total = sum(lengths)
    if total <= BLOCK:
        assert [region.count for region in layout.regions] == [1]
        assert layout.total % 8 == 0
        assert total <= layout.total < total + 8
    else:
        assert layout.total % BLOCK == 0
        assert all(region.size % TRIM == 0 for region in layout.regions)
        assert max(region.size for region in layout.regions) <= -(-max(lengths) // BLOCK) * BLOCK


@thorough
@given(any_lengths.filter(lambda lengths: sum(lengths) > BLOCK))
def test_blocks_are_as_full_as_a_multiple_of_16_can_be(lengths: list[int]) -> None:
    layout = plan_blocks(lengths)
    for low, high in blocks(layout):
        fill = sum(end - start for start, end in spans(layout) if low <= start < high)
        assert high - low - TRIM < fill <= high - low


@thorough
@given(any_lengths.filter(lambda lengths: sum(lengths) > BLOCK))
def test_blocks_are_at_least_half_full(lengths: list[int]) -> None:
    assert sum(lengths) / plan_blocks(lengths).total >= 0.5


@thorough
@given(any_lengths)
def test_no_two_blocks_could_be_one(lengths: list[int]) -> None:
    """Of blocks of 64 at most one is half empty, or the sequences of two would have shared one."""
    layout = plan_blocks(lengths)
    fills = [sum(end - start for start, end in spans(layout) if low <= start < high) for low, high in blocks(layout) if high - low <= BLOCK]
    assert sum(fill <= BLOCK // 2 for fill in fills) <= 1


@thorough
@given(any_lengths)
def test_end_to_end(lengths: list[int]) -> None:
    layout = plan_end_to_end(lengths)
    assert (layout.lengths, layout.total, layout.regions) == (lengths, sum(lengths), [])
    assert layout.starts == [sum(lengths[:position]) for position in range(len(lengths))]


@pytest.mark.parametrize(
    ("lengths", "starts", "regions"),
    [
        ([1], [0], [Region(0, 1, 8)]),
        ([16], [0], [Region(0, 1, 16)]),
        ([17], [0], [Region(0, 1, 24)]),
        ([3, 2, 4], [0, 3, 5], [Region(0, 1, 16)]),
        ([3, 61], [0, 3], [Region(0, 1, 64)]),
        ([65], [0], [Region(0, 1, 80)]),
        ([4, 60, 64], [124, 64, 0], [Region(0, 2, 64)]),
        ([10, 64, 100], [164, 0, 64], [Region(0, 1, 64), Region(64, 1, 112)]),
        ([40, 40, 50], [0, 48, 96], [Region(0, 2, 48), Region(96, 1, 64)]),
    ],
    ids=str,
)
def test_layouts(lengths: list[int], starts: list[int], regions: list[Region]) -> None:
    layout = plan_blocks(lengths)
    step = 8 if sum(lengths) <= BLOCK else BLOCK
    assert (layout.starts, layout.regions, layout.total) == (starts, regions, -(-regions[-1].end // step) * step)


class States:
    """Random query, key and value of a packed row, `[1, heads, T, dim]`; what lies between the sequences is random, too."""

    def __init__(self, batch: PackedBatch, heads: int, kv_heads: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        total, dim = batch.layout.total, 8
        self.query = torch.randn(1, heads, total, dim, generator=generator)
        self.key = torch.randn(1, kv_heads, total, dim, generator=generator)
        self.value = torch.randn(1, kv_heads, total, dim, generator=generator)

    def packed(self, batch: PackedBatch, scaling: float | None = None, causal: bool = False, window: int | None = None) -> torch.Tensor:
        """Through the name that a model's configuration gives transformers: `[T, heads, dim]`."""
        attend: Any = AttentionInterface()[PACKED]
        module = torch.nn.Identity()
        module.is_causal = causal  # type: ignore[assignment]
        with packed_batch(batch):
            out, weights = attend(module, self.query, self.key, self.value, None, scaling=scaling, sliding_window=window)
        assert weights is None
        assert out.shape == (1, self.query.shape[2], self.query.shape[1], self.query.shape[3])
        rows: torch.Tensor = out[0]
        return rows

    def alone(self, start: int, end: int, scaling: float | None, causal: bool, window: int | None) -> torch.Tensor:
        """The sequence that lies there, by itself: `[n, heads, dim]`."""
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1)[:, :, start:end] for states in (self.key, self.value))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        seen = (distance >= 0) | (not causal)
        if window is not None:  # transformers' masking_utils: a token sees what is nearer than the window
            seen &= distance.abs() < window
        out = scaled_dot_product_attention(self.query[:, :, start:end], key, value, attn_mask=seen, scale=scaling)
        return out[0].transpose(0, 1)


def make_batch(lengths: list[int]) -> PackedBatch:
    return PackedBatch(lengths, torch.device("cpu"), torch.float32)


@with_torch
@given(
    small_lengths, st.booleans(), windows, st.sampled_from([(2, 2), (4, 2), (4, 1)]), st.sampled_from([None, 0.2]), st.integers(0, 2**16)
)
def test_packed_attention_is_attention_alone(
    lengths: list[int], causal: bool, window: int | None, heads: tuple[int, int], scaling: float | None, seed: int
) -> None:
    batch = make_batch(lengths)
    states = States(batch, *heads, seed)
    out = states.packed(batch, scaling, causal, window).index_select(0, batch.rows)
    parts = [states.alone(s, s + n, scaling, causal, window) for s, n in zip(batch.layout.starts, lengths, strict=True)]
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-5, rtol=0)


@with_torch
@given(st.integers(500, 1700), st.booleans(), st.sampled_from([1, 2, 64, 500, 513, 2000]))
def test_a_long_sequence_is_computed_in_pieces(length: int, causal: bool, window: int) -> None:
    batch = make_batch([length])
    states = States(batch, 1, 1, length)
    out = states.packed(batch, None, causal, window)[:length]
    torch.testing.assert_close(out, states.alone(0, length, None, causal, window), atol=1e-5, rtol=0)


@with_torch
@given(small_lengths, st.booleans(), windows, st.integers(0, 2**16))
def test_neighbours_do_not_matter(lengths: list[int], causal: bool, window: int | None, seed: int) -> None:
    """Other values in every other sequence and in the padding leave a sequence as it was."""
    batch = make_batch(lengths)
    before, after = States(batch, 2, 2, seed), States(batch, 2, 2, seed + 1)
    kept = seed % len(lengths)
    here = slice(batch.layout.starts[kept], batch.layout.starts[kept] + lengths[kept])
    for name in ("query", "key", "value"):
        getattr(after, name)[:, :, here] = getattr(before, name)[:, :, here]
    assert torch.equal(before.packed(batch, None, causal, window)[here], after.packed(batch, None, causal, window)[here])


@with_torch
@given(small_lengths)
def test_rows_gather_sequence_by_sequence(lengths: list[int]) -> None:
    batch = make_batch(lengths)
    expected = [row for start, length in zip(batch.layout.starts, lengths, strict=True) for row in range(start, start + length)]
    assert batch.rows.tolist() == expected
    assert batch.max_length == max(lengths)


@pytest.mark.parametrize(
    ("lengths", "reach", "masked"),
    [
        ([64, 64, 128], Reach(causal=False), [False, False]),
        ([64, 48, 112], Reach(causal=False), [False, False, False]),
        ([64, 63, 128], Reach(causal=False), [True, False]),
        ([64, 128], Reach(causal=True), [True, True]),
        ([64, 128], Reach(causal=False, window=100), [False, True]),
    ],
    ids=str,
)
def test_which_blocks_need_a_mask(lengths: list[int], reach: Reach, masked: list[bool]) -> None:
    """Where every block is one sequence and sees all of it, the fast path without a mask."""
    batch = make_batch(lengths)
    assert [batch.mask(number, reach) is not None for number in range(len(batch.layout.regions))] == masked


def test_transformers_builds_no_mask() -> None:
    build: Any = AttentionMaskInterface()[PACKED]
    assert build(batch_size=1, q_length=5, kv_length=5) is None


def test_batches_nest_and_end() -> None:
    """The layout is that of the innermost block; outside of any there is none."""
    outer, inner = make_batch([70, 5]), make_batch([3])
    large, small = States(outer, 2, 2, 1), States(inner, 2, 2, 2)
    expected = large.packed(outer, None)
    before = calls_so_far()
    with packed_batch(outer) as current:
        assert current is outer
        small.packed(inner, None)
        attend: Any = AttentionInterface()[PACKED]
        out, _ = attend(torch.nn.Identity(), large.query, large.key, large.value, None)
    assert torch.equal(out[0], expected)
    assert calls_so_far() == before + 2
    with pytest.raises(LookupError):
        attend(torch.nn.Identity(), large.query, large.key, large.value, None)
