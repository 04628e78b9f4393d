"""How prompts are put together and padded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jackfield_openvino.batches import CALL_TOKENS, LENGTH_STEP, Batch, padded_batches


def cost(batches: list[Batch]) -> int:
    return sum((batch.end - batch.start) * batch.length + CALL_TOKENS for batch in batches)


def test_near_lengths_share_a_batch() -> None:
    assert padded_batches([3, 5, 8, 9], 512) == [Batch(0, 4, 16)]
    assert padded_batches([4] * 20 + [200], 512) == [Batch(0, 20, 8), Batch(20, 21, 200)]
    assert padded_batches([1], 512) == [Batch(0, 1, 8)]


def test_no_batch_is_longer_than_the_model() -> None:
    assert padded_batches([509, 510], 510) == [Batch(0, 2, 510)]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8).map(sorted))
def test_the_cheapest_cuts(lengths: list[int]) -> None:
    """Each prompt in one batch that holds it, and no other way of cutting is cheaper."""
    batches = padded_batches(lengths, 512)
    assert [place for batch in batches for place in range(batch.start, batch.end)] == list(range(len(lengths)))
    assert all(max(lengths[batch.start : batch.end]) <= batch.length < lengths[batch.end - 1] + LENGTH_STEP for batch in batches)
    for cuts in range(2 ** (len(lengths) - 1)):
        ends = [place for place in range(1, len(lengths)) if cuts >> (place - 1) & 1] + [len(lengths)]
        starts = [0, *ends[:-1]]
        other = [Batch(a, b, -(-lengths[b - 1] // LENGTH_STEP) * LENGTH_STEP) for a, b in zip(starts, ends, strict=True)]
        assert cost(batches) <= cost(other)
