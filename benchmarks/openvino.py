"""Embeddings served on OpenVINO, beside the same server on torch: two servers in turn, rounds, medians, raw figures kept.

`--set` goes to both servers, as in `jackfield serve`: `--set engine.lanes=1`, `--set models.minilm.options.ENABLE_CPU_PINNING=true`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.loadgen import Load, run_load
from benchmarks.results import machine, write
from benchmarks.servers import Server, pss_bytes, serving
from benchmarks.workload import bodies
from jackfield.engine.cpu import usable_cpus

__all__ = ["main"]

ENGINES = ("torch", "openvino")
# By row, the requests and the number of connections; the last row is a bounded count of requests, one after the other.
ROWS = {"embed32 at 4": ("embed32", 4), "embed1 at 32": ("embed1", 32), "embed1 at 1": ("embed1", 1)}
ONE = 150


def load(server: Server, row: str, seconds: float) -> Load:
    """A slice of one row."""
    kind, connections = ROWS[row]
    url, requests = f"{server.url}/v1/embeddings", bodies(kind, "minilm")
    if connections == 1:
        return run_load(url, requests[:ONE], 1, seconds=60, count=ONE)
    return run_load(url, requests, connections, seconds=seconds)


def round_of(dtype: str, slices: int, seconds: float, settings: list[str]) -> dict[str, Any]:
    """One round: both servers in turn, a few seconds each, since the machine's own speed drifts; the other one idles."""
    arguments = [f"models.minilm.dtype={dtype}", *settings]
    sets = [part for argument in arguments for part in ("--set", argument)]
    with (
        serving("config/embeddings.toml", *sets, "--set", "models.minilm.engine=torch") as torch,
        serving("config/embeddings.toml", *sets, "--set", "models.minilm.engine=openvino") as openvino,
    ):
        servers = dict(zip(ENGINES, (torch, openvino), strict=True))
        figures: dict[str, Any] = {name: {row: [] for row in ROWS} for name in ENGINES}
        for name, server in servers.items():
            figures[name]["ready_s"] = server.ready_s
            run_load(f"{server.url}/v1/embeddings", bodies("embed32", "minilm"), 4, seconds=3)
        for number in range(slices):
            for row in ROWS:
                for name in ENGINES if number % 2 else reversed(ENGINES):
                    figures[name][row].append(asdict(load(servers[name], row, seconds)))
        for name, server in servers.items():
            figures[name]["pss_mb"] = pss_bytes(server.processes()) / 1e6
    return figures


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all slices of all rounds; a ratio is of the two slices that were measured one after the other."""

    def values(name: str, row: str, figure: str) -> list[float]:
        return [slice_[figure] for figures in rounds for slice_ in figures[name][row]]

    result: dict[str, float] = {}
    for row, (_, connections) in ROWS.items():
        figure, unit = ("p50_ms", "p50 ms") if connections == 1 else ("texts_per_s", "texts/s")
        ours = {name: values(name, row, figure) for name in ENGINES}
        for name in ENGINES:
            result[f"{row}, {name}, {unit}"] = statistics.median(ours[name])
        result[f"{row}, openvino / torch"] = statistics.median(b / a for a, b in zip(ours["torch"], ours["openvino"], strict=True))
    for name in ENGINES:
        result[f"ready s, {name}"] = statistics.median(figures[name]["ready_s"] for figures in rounds)
        result[f"PSS MB, {name}"] = statistics.median(figures[name]["pss_mb"] for figures in rounds)
    result["errors"] = sum(error for name in ENGINES for row in ROWS for error in values(name, row, "errors"))
    return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    """Run and write benchmarks/results/openvino-DTYPE.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration of both servers")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(round_of(arguments.dtype, arguments.slices, arguments.seconds, arguments.set))
        print(f"round {number + 1}: {json.dumps(summary(rounds[-1:]))}", flush=True)
    for name, value in summary(rounds).items():
        print(f"{name:36} {value}")
    if not arguments.dry:
        what = f"all-MiniLM-L6-v2, {arguments.dtype}, on torch and on OpenVINO"
        result = {"what": what, **machine(), "set": arguments.set, "summary": summary(rounds), "rounds": rounds}
        write(f"openvino-{arguments.dtype}", result)


if __name__ == "__main__":
    main()
