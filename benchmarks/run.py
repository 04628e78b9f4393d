"""All benchmarks of the README, one after the other: `make bench`. About an hour on 2 cores."""

from __future__ import annotations

import subprocess
import sys

from jackfield.engine.cpu import has_fast_bfloat16

__all__ = ["main"]


def main() -> None:
    """Run each in a process of its own; the first that fails ends the run."""
    dtypes = ["float32", "bfloat16"] if has_fast_bfloat16() else ["float32"]
    pooling = [[f"benchmarks.{name}", dtype] for name in ("embed", "heads") for dtype in dtypes]
    chat = [[f"benchmarks.{name}", dtype] for name in ("chat", "structured") for dtype in dtypes]
    engines = [["benchmarks.openvino", "--dtype", dtype] for dtype in dtypes]
    for module, *arguments in [
        *pooling,
        *chat,
        *engines,
        ["benchmarks.web"],
        ["benchmarks.models"],
        ["benchmarks.memory"],
        ["benchmarks.streams"],
    ]:
        print(f"\n{module} {' '.join(arguments)}", flush=True)
        subprocess.run([sys.executable, "-m", module, *arguments], check=True)


if __name__ == "__main__":
    main()
