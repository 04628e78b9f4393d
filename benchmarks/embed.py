"""Embeddings served, beside the bare packed forward pass of the same run: rounds of both in turn, medians, raw figures kept."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.loadgen import run_load
from benchmarks.results import machine, write
from benchmarks.servers import pss_bytes, serving
from benchmarks.workload import bodies, model_folder
from jackfield.engine.cpu import usable_cpus

__all__ = ["Limit", "main"]


class Limit:
    """The bare forward pass in a process of its own, idle while the server is measured."""

    def __init__(self, folder: str, dtype: str, work: str) -> None:
        command = [sys.executable, "-m", "benchmarks.limit", folder, dtype, str(usable_cpus()), work]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def ask(self, command: str) -> float:
        """Measure now."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def round_of(dtype: str, slices: int, seconds: float) -> dict[str, Any]:
    """One round: limit and server in turn, a few seconds each, since the machine's own speed drifts; then memory."""
    limit = Limit(model_folder(), dtype, "texts")
    figures: dict[str, Any] = {"limit": [], "embed32_4": [], "embed1_32": [], "limit_one": [], "embed1_1": []}
    with serving("config/embeddings.toml", "--set", f"models.minilm.dtype={dtype}") as server:
        url = f"{server.url}/v1/embeddings"
        figures["ready_s"] = server.ready_s
        run_load(url, bodies("embed32", "minilm"), 4, seconds=3)
        for _ in range(slices):
            figures["limit"].append(limit.ask(f"many {seconds}"))
            figures["embed32_4"].append(asdict(run_load(url, bodies("embed32", "minilm"), 4, seconds=seconds)))
            figures["embed1_32"].append(asdict(run_load(url, bodies("embed1", "minilm"), 32, seconds=seconds)))
            figures["limit_one"].append(limit.ask("one 150"))
            figures["embed1_1"].append(asdict(run_load(url, bodies("embed1", "minilm")[:150], 1, seconds=60, count=150)))
        figures["limit"].append(limit.ask(f"many {seconds}"))
        figures["pss_mb"] = pss_bytes(server.processes()) / 1e6
    limit.end()
    return figures


def ratios(figures: dict[str, Any], name: str) -> list[float]:
    """Texts a second of each slice, of the mean of the limit before and after it."""
    limits = figures["limit"]
    return [load["texts_per_s"] * 2 / (limits[i] + limits[i + 1]) for i, load in enumerate(figures[name])]


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all slices of all rounds."""

    def median(values: Callable[[dict[str, Any]], Iterable[float]]) -> float:
        return round(statistics.median([value for figures in rounds for value in values(figures)]), 3)

    return {
        "limit texts/s": median(lambda f: f["limit"]),
        "embed32 at 4, texts/s": median(lambda f: [s["texts_per_s"] for s in f["embed32_4"]]),
        "embed32 at 4, of the limit": median(lambda f: ratios(f, "embed32_4")),
        "embed1 at 32, texts/s": median(lambda f: [s["texts_per_s"] for s in f["embed1_32"]]),
        "embed1 at 32, of the limit": median(lambda f: ratios(f, "embed1_32")),
        "embed1 at 1, p50 ms": median(lambda f: [s["p50_ms"] for s in f["embed1_1"]]),
        "bare forward of one, p50 ms": median(lambda f: f["limit_one"]),
        "over the bare forward, ms": median(lambda f: [s["p50_ms"] - one for s, one in zip(f["embed1_1"], f["limit_one"], strict=True)]),
        "ready s": median(lambda f: [f["ready_s"]]),
        "PSS MB": median(lambda f: [f["pss_mb"]]),
        "errors": median(lambda f: [sum(s["errors"] for name in ("embed32_4", "embed1_32", "embed1_1") for s in f[name])]),
    }


def main() -> None:
    """Run and write benchmarks/results/embed-DTYPE.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(round_of(arguments.dtype, arguments.slices, arguments.seconds))
        print(f"round {number + 1}: {json.dumps(summary(rounds[-1:]))}", flush=True)
    for name, value in summary(rounds).items():
        print(f"{name:32} {value}")
    if not arguments.dry:
        what = f"all-MiniLM-L6-v2, {arguments.dtype}"
        write(f"embed-{arguments.dtype}", {"what": what, **machine(), "summary": summary(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
