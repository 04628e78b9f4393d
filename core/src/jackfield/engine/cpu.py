"""What this process may use of the machine, from its affinity and cgroup, never from the host's count."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path

__all__ = ["cpu_flags", "has_fast_bfloat16", "usable_cpus"]


def usable_cpus() -> int:
    """Processors that this process may run on: its affinity mask, cut by the cgroup's CPU quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, math.ceil(quota)) if quota else count)


def _cgroup_quota() -> float | None:
    """CPUs' worth of the cgroup's quota (v2, then v1), or None without one."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        return quota / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError):
        return None


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Instruction set flags of the first processor as Linux names them; empty where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def has_fast_bfloat16() -> bool:
    """Whether bfloat16 products beat float32 here: avx512_bf16 or AMX. On AVX2 alone they are 10 times slower."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})
