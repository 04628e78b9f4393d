"""Overload, limits and clients that leave: nobody is left without an answer, and nothing is left in the server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_embed import EmbedEndpoint

BODY = {"input": "hello"}
NUM_CLIENTS = 2000
MAX_QUEUE = 64


def message(body: dict[str, Any]) -> bytes:
    """A request as it goes over the socket; the connection ends with its answer."""
    content = json.dumps(body).encode()
    lines = ["POST /v1/embeddings HTTP/1.1", "Host: test", "Connection: close", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def parsed(raw: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and content of an answer."""
    head, _, content = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert len(content) == int(headers["content-length"]), "the answer is cut"
    return int(first.split()[1]), headers, json.loads(content)


async def burst(url: str, on_answer: Callable[[], None] = lambda: None) -> list[tuple[int, dict[str, str], Any]]:
    """All clients connect, then all send, then all read: as concurrent as sockets can be."""
    address = httpx.URL(url)
    gate = asyncio.Semaphore(200)  # connections being made at once; the backlog of the listening socket is finite
    sent = message(BODY)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with gate:
            return await asyncio.open_connection(address.host, address.port)

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, dict[str, str], Any]:
        try:
            raw = await reader.read()
        finally:
            writer.close()
        on_answer()
        return parsed(raw)

    connections = await asyncio.gather(*(connect() for _ in range(NUM_CLIENTS)))
    for _, writer in connections:
        writer.write(sent)
    return await asyncio.gather(*(read(*connection) for connection in connections))


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for what must come. Raises: AssertionError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come within {timeout_s} s"
        time.sleep(0.002)


def sample(client: httpx.Client, series: str) -> float:
    """A series of /metrics by its exact name and labels; 0 when there is none."""
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series), 0.0)


def queue(client: httpx.Client) -> tuple[float, float, float]:
    requests, size, tokens = (sample(client, f'jackfield_queue{{unit="{unit}"}}') for unit in ("requests", "bytes", "tokens"))
    return requests, size, tokens


def engine_of(server: RunningServer) -> FakeEngine:
    assert server.engine is not None
    return server.engine


def check_refusal(answer: httpx.Response, reason: str) -> None:
    """A 429 in the one shape that says when to come back and names its limit."""
    assert answer.status_code == 429, answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    error = answer.json()["error"]
    assert error["code"] == 429
    assert reason in error["message"]


def check_burst(client: httpx.Client, answers: list[tuple[int, dict[str, str], Any]], dimensions: int) -> Counter[int]:
    """Each answer is a vector or a refusal, the metrics tell the same numbers, and the server is as before."""
    for status, headers, content in answers:
        if status == 200:
            assert len(content["data"][0]["embedding"]) == dimensions
        else:
            assert status == 429, content
            assert content["error"]["code"] == 429
            assert 1 <= int(headers["retry-after"]) <= 60
    counts = Counter(status for status, _, _ in answers)
    assert counts.total() == NUM_CLIENTS
    assert sample(client, 'jackfield_rejections_total{reason="requests"}') == counts[429]
    for status, count in counts.items():
        assert sample(client, f'jackfield_requests_total{{method="POST",path="/v1/embeddings",status="{status}"}}') == count
    assert queue(client) == (0, 0, 0)
    assert client.post("/v1/embeddings", json=BODY).status_code == 200
    return counts


@pytest.fixture
def small() -> Iterator[RunningServer]:
    with make_server(EmbedEndpoint(), engine=FakeEngine(latency_s=0.01), server={"max_queue_requests": MAX_QUEUE}) as running:
        yield running


async def test_a_burst_is_answered_to_the_last(small: RunningServer) -> None:
    answers = await asyncio.wait_for(burst(small.url), 60)
    with small.client() as client:
        counts = check_burst(client, answers, engine_of(small).embedding_size)
    assert counts[200] >= MAX_QUEUE  # the queue was empty: so many have room


async def test_with_the_engine_at_a_stand_the_queue_fills_to_its_limit(small: RunningServer) -> None:
    engine = engine_of(small)
    engine.hold()
    num_answers = 0

    def on_answer() -> None:
        nonlocal num_answers
        num_answers += 1
        if num_answers == NUM_CLIENTS - MAX_QUEUE:
            engine.go()

    answers = await asyncio.wait_for(burst(small.url, on_answer), 60)
    with small.client() as client:
        counts = check_burst(client, answers, engine.embedding_size)
    assert counts == {200: MAX_QUEUE, 429: NUM_CLIENTS - MAX_QUEUE}


@pytest.mark.parametrize("abruptly", [False, True], ids=["closed", "reset"])
def test_a_client_that_leaves_takes_its_work_along(abruptly: bool) -> None:
    with make_server(EmbedEndpoint()) as server, server.client() as client:
        engine = engine_of(server)
        engine.hold()
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 0)) as sock:
            if abruptly:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with RST
            sock.sendall(message(BODY))
            until(lambda: len(engine.requests) == 1, 10)
            assert queue(client)[0] == 1
        until(lambda: engine.aborted == [engine.requests[0].id], 2)
        until(lambda: queue(client) == (0, 0, 0), 2)
        assert sample(client, 'jackfield_requests_total{method="POST",path="/v1/embeddings",status="499"}') == 1
        engine.go()
        assert client.post("/v1/embeddings", json=BODY).status_code == 200


def test_a_client_that_leaves_while_sending_takes_no_place() -> None:
    with make_server(EmbedEndpoint()) as server, server.client() as client:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 0)) as sock:
            sock.sendall(message(BODY)[:-3])
        assert client.post("/v1/embeddings", json=BODY).status_code == 200
        assert len(engine_of(server).requests) == 1
        assert queue(client) == (0, 0, 0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_queue_tokens": 20}, "tokens"), ({"max_queue_bytes": 60}, "bytes"), ({"max_queue_requests": 1}, "requests")],
)
def test_each_limit_refuses_by_its_name(limits: dict[str, int], reason: str) -> None:
    """One request of 12 tokens and some 40 bytes is in; a second is too much by each of the limits."""
    body = {"input": "0123456789"}
    with make_server(EmbedEndpoint(), server=limits) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        engine = engine_of(server)
        engine.hold()
        first = pool.submit(client.post, "/v1/embeddings", json={**body, "encoding_format": "float"})
        until(lambda: len(engine.requests) == 1, 10)
        check_refusal(client.post("/v1/embeddings", json={**body, "encoding_format": "float"}), reason)
        assert {name: sample(client, f'jackfield_rejections_total{{reason="{name}"}}') for name in ("requests", "bytes", "tokens")} == {
            **dict.fromkeys(("requests", "bytes", "tokens"), 0),
            reason: 1,
        }
        assert sample(client, 'jackfield_requests_total{method="POST",path="/v1/embeddings",status="429"}') == 1
        assert queue(client)[0] == 1
        assert len(engine.requests) == 1
        engine.go()
        assert first.result(10).status_code == 200
        assert queue(client) == (0, 0, 0)
        assert client.post("/v1/embeddings", json=body).status_code == 200


def test_prompts_over_the_limit_are_refused_for_good() -> None:
    with make_server(EmbedEndpoint(), server={"max_prompts": 3}) as server, server.client() as client:
        for path, field in (("/v1/embeddings", "input"), ("/v2/embed", "texts")):
            assert client.post(path, json={field: ["a"] * 3}).status_code == 200
            refused = client.post(path, json={field: ["a"] * 4})
            assert refused.status_code == 400
            assert "4 prompts" in refused.json()["error"]["message"]
            assert "retry-after" not in refused.headers
        assert len(engine_of(server).requests) == 2
        assert queue(client) == (0, 0, 0)
