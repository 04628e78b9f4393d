"""Where figures go: benchmarks/results/NAME.json, with the machine they come from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jackfield.engine.cpu import cpu_flags, usable_cpus

__all__ = ["RESULTS", "machine", "write"]

RESULTS = Path(__file__).parent / "results"
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict[str, Any]:
    """What a figure cannot be read without."""
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cpus": usable_cpus(),
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }


def write(name: str, result: Mapping[str, Any]) -> None:
    """Keep the raw figures."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
