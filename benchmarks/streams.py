"""Chat streams, half of them left by their client in the middle: no memory, no block of the cache and no choice may stay behind.

A cache of 128 MiB: on a processor its pages are taken as they are first written, and the warm-up must have met them all before growth
means anything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat import SMOLLM2
from benchmarks.results import machine, write
from benchmarks.servers import Server, pss_bytes, serving
from benchmarks.workload import SEED, chat_messages
from jackfield.engine.cpu import usable_cpus

__all__ = ["main"]

CONFIG = """
[models.smollm2]
source = "{source}"
dtype = "{dtype}"
[endpoints.chat]
[engine]
kv_cache_mib = 128
"""
TOKENS = 16
# A client leaves after so many events at most, the first of which has the role alone.
MAX_EVENTS = 8
IDLE_TIMEOUT_S = 30.0


@dataclass
class Counts:
    """Streams that were read to their end, that were left, and that failed."""

    whole: int = 0
    left: int = 0
    errors: int = 0


async def stream(client: httpx.AsyncClient, messages: list[dict[str, str]], leave_after: int, counts: Counts) -> None:
    """One stream. leave_after: events after which its client closes the connection; 0: never."""
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json={"messages": messages, **options}) as answer:
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
            if leave_after and len(lines) == leave_after:
                break
    failed = answer.status_code != 200 or any(line.startswith('data: {"error"') for line in lines)
    if failed or (not leave_after and (lines[-1] != "data: [DONE]" or '"finish_reason":"length"' not in lines[-2])):
        counts.errors += 1
    elif lines[-1] != "data: [DONE]":
        counts.left += 1
    else:
        counts.whole += 1


async def run_streams(url: str, work: Iterator[tuple[list[dict[str, str]], int]], at_once: int) -> Counts:
    """So many at once, each with the next work when it is done, until there is none."""
    counts = Counts()

    async def one_by_one(client: httpx.AsyncClient) -> None:
        for messages, leave_after in work:
            try:
                await stream(client, messages, leave_after, counts)
            except httpx.HTTPError:
                counts.errors += 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(one_by_one(client) for _ in range(at_once)))
    return counts


def gauges(server: Server) -> dict[str, float]:
    """Used blocks of the cache, and choices that are generated now, as the engine reported last."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    wanted = {"blocks": r'jackfield_cache_blocks\{.*state="used".*\}', "running": r"jackfield_generation_running\{.*\}"}
    found = {name: re.search(rf"^{pattern} (\S+)$", text, re.MULTILINE) for name, pattern in wanted.items()}
    return {name: float(value[1]) if value else float("nan") for name, value in found.items()}


def settled(server: Server) -> dict[str, float]:
    """The gauges once both are 0, or what they still are after IDLE_TIMEOUT_S. Reports come once a heartbeat; one is awaited."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        time.sleep(2)
        found = gauges(server)
        if not any(found.values()) or time.monotonic() > deadline:
            return found


def measure(server: Server, streams: int, warm_up: int, parts: int, at_once: int) -> list[dict[str, Any]]:
    """Warm up, then run the parts; figures of each, the warm-up first."""
    chance = random.Random(SEED)
    half = itertools.cycle([True, False])
    work = ((messages, chance.randint(1, MAX_EVENTS) if next(half) else 0) for messages in itertools.cycle(chat_messages()))
    figures: list[dict[str, Any]] = []
    for count in [warm_up, *[streams // parts] * parts]:
        started = time.monotonic()
        counts = asyncio.run(run_streams(server.url, itertools.islice(work, count), at_once))
        seconds = time.monotonic() - started
        found = settled(server)
        sizes = [pss_bytes([process]) / 1e6 for process in server.processes()]
        figures.append({**asdict(counts), "streams_per_s": count / seconds, **found, "pss_mb": sizes})
        print(
            f"{'warm-up' if len(figures) == 1 else 'part':8}{counts.whole:6} whole {counts.left:6} left {counts.errors:4} errors "
            f"{count / seconds:6.1f} streams/s {found['blocks']:5.0f} blocks {found['running']:4.0f} running {sum(sizes):8.1f} MB",
            flush=True,
        )
    return figures


def main() -> None:
    """Run and write benchmarks/results/streams.json. Ends with an error if anything failed or stayed behind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "server.toml"
        config.write_text(CONFIG.format(source=SMOLLM2, dtype=arguments.dtype))
        with serving(str(config)) as server:
            figures = measure(server, arguments.streams, arguments.warm_up, arguments.parts, arguments.at_once)
    totals = [sum(figure["pss_mb"]) for figure in figures]
    summary = {
        "after the warm-up MB": round(totals[0], 1),
        "to MB": round(totals[-1], 1),
        "most MB": round(max(totals), 1),
        "whole": sum(figure["whole"] for figure in figures),
        "left": sum(figure["left"] for figure in figures),
        "errors": sum(figure["errors"] for figure in figures),
        "blocks at the end": figures[-1]["blocks"],
        "running at the end": figures[-1]["running"],
    }
    print(json.dumps(summary))
    if not arguments.dry:
        what = f"PSS of all processes, SmolLM2-135M-Instruct, {arguments.dtype}, {TOKENS} tokens a stream, {arguments.at_once} at once"
        write("streams", {"what": what, **machine(), "summary": summary, "parts": figures})
    left_behind = [name for name in ("errors", "blocks at the end", "running at the end") if summary[name] != 0]
    if left_behind:
        raise SystemExit(f"not 0: {', '.join(left_behind)}")


if __name__ == "__main__":
    main()
