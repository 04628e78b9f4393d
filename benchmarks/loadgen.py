"""Closed-loop load over keep-alive HTTP/1.1 connections, to 127.0.0.1 only; bounded in time and count."""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

__all__ = ["Load", "run_load"]

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True)
class Load:
    """What came of it: texts a second, latencies in milliseconds, requests that were not answered with 200."""

    requests: int
    errors: int
    texts_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


def run_load(url: str, requests: list[tuple[int, bytes]], connections: int, *, seconds: float, count: int = MAX_REQUESTS) -> Load:
    """Send requests in turn over `connections` connections, each waiting for its answer, until the time or the count is over."""
    parts = urlsplit(url)
    if parts.hostname != "127.0.0.1":
        raise ValueError(f"load goes to 127.0.0.1 only, not {parts.hostname}")
    return uvloop.run(_run(parts.hostname, parts.port or 80, parts.path, requests, connections, seconds, count))


async def _run(host: str, port: int, path: str, requests: list[tuple[int, bytes]], connections: int, seconds: float, count: int) -> Load:
    messages = [
        (
            texts,
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
            + body,
        )
        for texts, body in requests
    ]
    turn = itertools.islice(itertools.cycle(messages), count)
    latencies: list[float] = []
    done = texts_done = errors = 0
    started = time.perf_counter()
    deadline = started + seconds

    async def connection() -> None:
        nonlocal done, texts_done, errors
        reader, writer = await asyncio.open_connection(host, port, limit=2**26)
        for texts, message in turn:
            before = time.perf_counter()
            if before >= deadline:
                break
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            assert length is not None
            await reader.readexactly(int(length.group(1)))
            latencies.append(time.perf_counter() - before)
            done += 1
            if b" 200 " in head[:20]:
                texts_done += texts
            else:
                errors += 1
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))
    wall = time.perf_counter() - started
    quantiles = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else [latencies[0]] * 99
    return Load(done, errors, texts_done / wall, quantiles[49] * 1e3, quantiles[94] * 1e3, quantiles[98] * 1e3)
