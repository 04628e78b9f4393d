"""The HTTP side alone: CPU a request of our server over FakeEngine, beside a bare Litestar route with the same body and answer.

CPU seconds of the server's process are compared, not requests a second, since the load generator shares the processors. One prompt a
request, as token ids (the web layer alone) and as text (tokenization on top, which a bare route has not). All servers in turn; medians.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import urllib.request
from typing import Any

from tokenizers import Tokenizer

from benchmarks.loadgen import run_load
from benchmarks.results import machine, write
from benchmarks.workload import bodies, model_folder, sentences

__all__ = ["main"]

SERVERS = ("ours", "bare", "bytes")
STAGES = ("preprocess", "tokenize", "engine", "build_response")


def workloads() -> dict[str, list[tuple[int, bytes]]]:
    """The same prompts in two forms."""
    tokenizer = Tokenizer.from_file(f"{model_folder()}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(sentences()[:2000])]
    return {"ids": [(1, json.dumps({"model": "fake", "input": prompt}).encode()) for prompt in ids], "text": bodies("embed1", "fake")}


class Server:
    """A server in its own process."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.web_server", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{self._line().strip()}"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        assert self.process.stdin is not None
        self.process.stdin.write("cpu\n")
        self.process.stdin.flush()
        return float(self._line())

    def cpu_us(self, work: list[tuple[int, bytes]], connections: int, count: int) -> float:
        """Microseconds of CPU a request."""
        before = self.cpu_s()
        load = run_load(f"{self.url}/v1/embeddings", work, connections, seconds=60, count=count)
        if load.errors:
            raise RuntimeError(f"{load.errors} of {load.requests} requests failed")
        return round((self.cpu_s() - before) / load.requests * 1e6, 1)

    def stages_us(self, work: list[tuple[int, bytes]], count: int) -> dict[str, float]:
        """Mean microseconds a request spends in each stage, alone in the server."""
        before = self._stage_sums()
        self.cpu_us(work, 1, count)
        after = self._stage_sums()
        return {stage: round((after[stage] - before[stage]) / count * 1e6, 1) for stage in STAGES}

    def _stage_sums(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(r'jackfield_stage_seconds_sum\{endpoint="embed",stage="(\w+)"\} (\S+)', text)
        return dict.fromkeys(STAGES, 0.0) | {stage: float(value) for stage, value in found}

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def round_of(works: dict[str, list[tuple[int, bytes]]], slices: int, connections: int, count: int) -> dict[str, Any]:
    """One round: every server and form in turn, then where the time of ours goes."""
    servers = {kind: Server(kind) for kind in SERVERS}
    figures: dict[str, Any] = {f"{kind} {form}": [] for kind in SERVERS for form in works}
    for server in servers.values():
        for work in works.values():
            server.cpu_us(work, connections, count)  # warm
    for _ in range(slices):
        for kind, server in servers.items():
            for form, work in works.items():
                figures[f"{kind} {form}"].append(server.cpu_us(work, connections, count))
    figures["stages"] = servers["ours"].stages_us(works["text"], count)
    for server in servers.values():
        server.end()
    return figures


def main() -> None:
    """Run and write benchmarks/results/web.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    works = workloads()
    rounds = [round_of(works, arguments.slices, arguments.connections, arguments.count) for _ in range(arguments.rounds)]
    summary: dict[str, float] = {}
    for name in (f"{kind} {form}" for kind in SERVERS for form in works):
        summary[f"{name}, us"] = statistics.median([value for figures in rounds for value in figures[name]])
    for form in works:
        pairs = [pair for figures in rounds for pair in zip(figures[f"ours {form}"], figures[f"bare {form}"], strict=True)]
        summary[f"ours over bare, {form}"] = round(statistics.median([ours / bare for ours, bare in pairs]), 2)
    for stage in STAGES:
        summary[f"stage {stage}, us"] = statistics.median([figures["stages"][stage] for figures in rounds])
    for name, value in summary.items():
        print(f"{name:28} {value}")
    if not arguments.dry:
        what = "CPU microseconds a request of the HTTP side, one prompt in, 384 numbers out, FakeEngine"
        write("web", {"what": what, **machine(), "connections": arguments.connections, "summary": summary, "rounds": rounds})


if __name__ == "__main__":
    main()
