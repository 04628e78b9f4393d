"""What the C library does with the memory of a load. Only glibc is told; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["large_blocks_apart", "trim"]

# Numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MEGABYTE = 1 << 20
# Where glibc's own bound ends up once a program has freed a block that large, and the bound of trimming, which is twice that.
LARGEST_BOUND = 32 * MEGABYTE


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Within, each block over 1 MB is mapped by itself and goes back to the system when it is freed.

    glibc raises that bound whenever such a block is freed, and then cuts large blocks out of one heap, where the copies of a load leave
    holes: three models in bfloat16 of 45 MB each took 149 MB more than one, and with this 96 MB. Afterwards the bound is what glibc would
    have come to, since a step's tensors are better cut out of the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, MEGABYTE)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_BOUND)
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGEST_BOUND)


def trim() -> None:
    """Give freed memory back to the system where the C library can: 20 MB and more after the copies of a load."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
