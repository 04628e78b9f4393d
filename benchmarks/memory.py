"""Memory over many requests: PSS of all processes, read every so often while the load runs. It must stay flat."""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.loadgen import run_load
from benchmarks.results import machine, write
from benchmarks.servers import pss_bytes, serving
from benchmarks.workload import bodies
from jackfield.engine.cpu import usable_cpus

__all__ = ["main"]

MAX_SECONDS = 3600


def main() -> None:
    """Run and write benchmarks/results/memory.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--parts", type=int, default=20)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    work = bodies("embed1", "minilm")
    figures: list[dict[str, Any]] = []
    with serving("config/embeddings.toml", "--set", f"models.minilm.dtype={arguments.dtype}") as server:
        url = f"{server.url}/v1/embeddings"
        idle = pss_bytes(server.processes()) / 1e6
        for part in range(arguments.parts):
            count = arguments.requests // arguments.parts
            load = run_load(url, work, arguments.connections, seconds=MAX_SECONDS, count=count)
            sizes = [pss_bytes([process]) / 1e6 for process in server.processes()]
            figures.append({"requests": (part + 1) * count, "errors": load.errors, "texts_per_s": load.texts_per_s, "pss_mb": sizes})
            print(
                f"{(part + 1) * count:8} requests  {sum(sizes):7.1f} MB  {load.texts_per_s:6.1f} texts/s  {load.errors} errors", flush=True
            )
    # The first part is not counted: caches fill and allocators find their size in it.
    totals = [sum(figure["pss_mb"]) for figure in figures[1:]]
    middle = (max(totals) + min(totals)) / 2
    spread = (max(totals) - min(totals)) / 2 / middle
    summary = {"idle MB": round(idle, 1), "from MB": round(totals[0], 1), "to MB": round(totals[-1], 1), "spread": round(spread, 4)}
    print(f"idle {idle:.1f} MB; {totals[0]:.1f} to {totals[-1]:.1f} MB, within +-{spread:.1%} of {middle:.1f} MB")
    if not arguments.dry:
        what = f"PSS of all processes, all-MiniLM-L6-v2, {arguments.dtype}, one text a request, {arguments.connections} connections"
        write("memory", {"what": what, **machine(), "summary": summary, "parts": figures})


if __name__ == "__main__":
    main()
