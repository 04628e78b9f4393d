"""Where the sequences of a packed batch lie in its one row. Pure.

On a CPU the row is cut into blocks of 64 tokens, or of the next multiple of 64 for a longer sequence; a block holds several sequences, and
a mask keeps them apart. So attention is one call for each size of block instead of one for each distinct length, and the row's length is
one of few, which matters because oneDNN compiles a kernel for each. Measured on 2,048 tokens of real sentences (69 of them, 2 cores with
AMX, per layer): one call a length 6.7 ms in float32 and 5.3 ms in bfloat16, blocks of 64 2.5 and 1.6 ms, blocks of 128 5.8 and 3.1 ms.
Sentences fill blocks to 95 to 98 %; what is left of one is cut off, and the row ends at a multiple of 64.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from msgspec import Struct

__all__ = ["BLOCK", "Layout", "Region", "plan_blocks", "plan_end_to_end"]

BLOCK = 64
# Blocks are cut to a multiple of this: pairs with one query are all longer than half a block, so that nothing fills what they leave.
# benchmarks/ledger.md, "Blocks of pairs".
TRIM = 16
# A batch that fits into one block takes a smaller one, so that short texts do not pay for 64 tokens; of few sizes, since the kernels that
# oneDNN keeps for each take 2.5 MB of memory, for good. A text of 25 tokens alone in float32: 7.6 ms without padding, 8.4 with.
SMALL_STEP = 8


class Region(Struct, frozen=True):
    """Blocks of one size that lie side by side: `count` blocks of `size` tokens from `start` on."""

    start: int
    count: int
    size: int

    @property
    def end(self) -> int:
        """Where the next region begins."""
        return self.start + self.count * self.size


class Layout(Struct, frozen=True):
    """starts: where each sequence begins, in the given order. total: tokens of the row. regions: empty where there are no blocks; they lie
    side by side from the row's begin on, and what is left of the row is padding."""

    lengths: list[int]
    starts: list[int]
    total: int
    regions: list[Region]


def plan_end_to_end(lengths: list[int]) -> Layout:
    """Sequences one after the other, no gaps: what the variable-length kernel of a GPU takes."""
    starts = [0] * len(lengths)
    total = 0
    for position, length in enumerate(lengths):
        starts[position] = total
        total += length
    return Layout(lengths, starts, total, [])


def plan_blocks(lengths: list[int]) -> Layout:
    """Put the sequences into blocks, best fit, longest first."""
    total = sum(lengths)
    if total <= BLOCK:
        return _one_block(plan_end_to_end(lengths), -(-total // SMALL_STEP) * SMALL_STEP)
    # The sequences of each block; open blocks are sorted by (room left, number).
    blocks: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for position in sorted(range(len(lengths)), key=lambda p: -lengths[p]):
        length = lengths[position]
        found = bisect_left(rooms, (length, -1))
        if found < len(rooms):
            room, number = rooms.pop(found)
            blocks[number].append(position)
        else:
            room = -(-length // BLOCK) * BLOCK
            number = len(blocks)
            blocks.append([position])
        if room > length:
            insort(rooms, (room - length, number))
    return _place(lengths, blocks)


def _one_block(layout: Layout, size: int) -> Layout:
    """The same with one block around everything."""
    return Layout(layout.lengths, layout.starts, size, [Region(0, 1, size)])


def _place(lengths: list[int], blocks: list[list[int]]) -> Layout:
    starts = [0] * len(lengths)
    regions: list[Region] = []
    offset = 0
    sized = [(-(-sum(lengths[position] for position in members) // TRIM) * TRIM, members) for members in blocks]
    for size, members in sorted(sized, key=lambda block: block[0]):
        if regions and regions[-1].size == size:
            last = regions[-1]
            regions[-1] = Region(last.start, last.count + 1, size)
        else:
            regions.append(Region(offset, 1, size))
        inside = offset
        for position in members:
            starts[position] = inside
            inside += lengths[position]
        offset += size
    return Layout(lengths, starts, -(-offset // BLOCK) * BLOCK, regions)
