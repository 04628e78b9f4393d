"""Which prompts of a step are run together, padded to one length."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["CALL_TOKENS", "LENGTH_STEP", "Batch", "padded_batches"]

# Lengths are rounded up to a multiple of this: OpenVINO makes its kernels anew for each shape that it has not met, and keeps them.
LENGTH_STEP = 8
# What another call costs, counted in tokens: so much padding is taken to save one. With 16 and 128 in place of 8 and 32
# a server was no faster (0.79 of torch's texts a second with either, bfloat16).
CALL_TOKENS = 32


class Batch(Struct, frozen=True):
    """Prompts `[start:end]` of a step, each padded to `length` tokens."""

    start: int
    end: int
    length: int


def padded_batches(lengths: list[int], max_length: int) -> list[Batch]:
    """The cuts that make the fewest tokens, calls counted in tokens as well.

    lengths: in tokens, ascending. max_length: no batch is longer, since a model has no positions beyond. Only cuts between prompts of
    unequal (rounded) length are tried: there are at most as many of those as multiples of LENGTH_STEP.
    """
    rounded = [min(-(-length // LENGTH_STEP) * LENGTH_STEP, max(max_length, length)) for length in lengths]
    ends = [place for place in range(1, len(rounded)) if rounded[place] != rounded[place - 1]] + [len(rounded)]
    # For each end, the fewest tokens up to it, and where its last batch begins.
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for end in ends:
        best[end] = min((cost + (end - start) * rounded[end - 1] + CALL_TOKENS, start) for start, (cost, _) in best.items())
    batches: list[Batch] = []
    end = len(rounded)
    while end:
        start = best[end][1]
        batches.append(Batch(start, end, rounded[end - 1]))
        end = start
    return batches[::-1]
