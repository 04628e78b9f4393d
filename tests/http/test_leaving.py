"""Clients that leave, and a server that is about to: everyone concerned is told, by the right word, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from jackfield import Context, Delta, EngineRequest, Prompt, Stream, hookimpl
from jackfield.errors import ClientGone
from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_embed import EmbedEndpoint
from tests.http.raw import BODY, check_error, sample
from tests.plugins.test_stages import Echo, Observer, Shout, Talk, Text, leaving, until

JSON = b"Host: test\r\nContent-Type: application/json\r\n"
abruptly = pytest.mark.parametrize("abruptly", [False, True], ids=["closed", "reset"])


def reset_when_closed(connection: socket.socket) -> None:
    """A client that crashes, or whose network does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def counted(client: httpx.Client, path: str) -> dict[str, float]:
    """Requests of a path by their status."""
    found = re.findall(rf'jackfield_requests_total{{method="\w+",path="{path}",status="(\d+)"}} (\S+)', client.get("/metrics").text)
    return {status: float(count) for status, count in found}


def outcomes(client: httpx.Client, endpoint: str) -> dict[str, float]:
    """Requests that an endpoint had, by what became of them."""
    found = re.findall(
        rf'jackfield_endpoint_requests_total{{endpoint="{endpoint}",model="fake",outcome="(\w+)"}} (\S+)', client.get("/metrics").text
    )
    return {outcome: float(count) for outcome, count in found}


def queue(client: httpx.Client) -> list[float]:
    return [sample(client, f'jackfield_queue{{unit="{unit}"}}') for unit in ("requests", "bytes", "tokens")]


def check_complaints(caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves is no fault of the server: the log is silent, but for what may be said of a slow machine."""
    complaints = [record for record in caplog.records if record.levelno >= logging.WARNING and record.name != "jackfield.watchdog"]
    assert complaints == []
    assert "Traceback" not in caplog.text


@abruptly
@pytest.mark.parametrize(("path", "endpoint"), [("/echo", "echo"), ("/talk", "talk")])
def test_a_client_that_leaves_is_counted_and_told_of(path: str, endpoint: str, abruptly: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Before its answer has begun, that of a stream too: 499, ClientGone, and the engine is told."""
    observer, engine = Observer(), FakeEngine()
    engine.hold()
    with make_server(Echo(), Talk(), observer, engine=engine) as server, server.client() as client:
        with leaving(server, path, {"text": "gone", "stream": True}) as connection:
            if abruptly:
                reset_when_closed(connection)
            until(lambda: len(engine.requests) == 1)
        until(lambda: bool(observer.ends))
        ((text, error),) = observer.ends
        assert text == "gone"
        assert type(error) is ClientGone
        assert engine.aborted == [engine.requests[0].id]
        until(lambda: counted(client, path) == {"499": 1})
        assert outcomes(client, endpoint) == {"ClientGone": 1}
        assert queue(client) == [0, 0, 0]
    check_complaints(caplog)


def test_a_client_that_leaves_in_the_midst_of_a_stream() -> None:
    """Its status was sent, so it stays; the endpoint's observers and metrics know better."""
    observer = Observer()
    with make_server(Talk(), observer, Shout()) as server, server.client() as client:
        with leaving(server, "/talk", {"text": "stall", "stream": True}) as connection:
            received = b""
            while b"Shout(<s>)" not in received:
                part = connection.recv(4096)
                assert part, received
                received += part
        until(lambda: bool(observer.ends))
        assert type(observer.ends[0][1]) is ClientGone
        until(lambda: outcomes(client, "talk") == {"ClientGone": 1})
        assert queue(client) == [0, 0, 0]


class Flood:
    """A stream of more than any socket holds."""

    def __init__(self) -> None:
        self.num_sent = 0

    @hookimpl
    def jackfield_wrap_stream(self, stream: Stream) -> Stream:
        async def flooding(ctx: Context[Any], request: EngineRequest) -> AsyncIterator[Delta]:
            while True:
                self.num_sent += 1
                await asyncio.sleep(0)  # as an engine does between two deltas
                yield Delta(index=0, text="x" * 1_000_000, token_ids=(2,))

        return flooding


def test_a_client_that_leaves_without_having_read() -> None:
    """The stream stands still at a full socket, not at the engine, when its client goes."""
    observer, flood = Observer(), Flood()
    with make_server(Talk(), observer, flood) as server, server.client() as client:
        with leaving(server, "/talk", {"text": "gone", "stream": True}):
            until(lambda: flood.num_sent >= 3)
        until(lambda: bool(observer.ends))
        assert type(observer.ends[0][1]) is ClientGone
        until(lambda: outcomes(client, "talk") == {"ClientGone": 1})
        assert queue(client) == [0, 0, 0]
        sent = flood.num_sent
        assert client.get("/version").status_code == 200
        assert flood.num_sent == sent


class Slow(Echo):
    """Thinks until it is allowed to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.thinks = threading.Event()
        self.may_go = threading.Event()

    def preprocess(self, ctx: Context[Text]) -> list[Prompt]:
        self.thinks.set()
        assert self.may_go.wait(20)
        return super().preprocess(ctx)


def test_a_client_that_leaves_during_a_stage_never_meets_the_engine() -> None:
    slow, observer, engine = Slow(), Observer(), FakeEngine()
    with make_server(slow, observer, engine=engine, endpoints={"echo": {"threaded": True}}) as server, server.client() as client:
        with leaving(server, "/echo", {"text": "gone"}):
            assert slow.thinks.wait(10)
        until(lambda: bool(observer.ends))
        slow.may_go.set()
        assert type(observer.ends[0][1]) is ClientGone
        until(lambda: counted(client, "/echo") == {"499": 1})
        assert client.post("/echo", json={"text": "here"}).status_code == 200
        assert len(engine.requests) == 1
        assert queue(client) == [0, 0, 0]


@contextmanager
def sending(server: RunningServer, part: bytes) -> Iterator[socket.socket]:
    """A client that has sent no more than `part` of a request to the embeddings, and leaves."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 0), timeout=10) as connection:
        connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\n" + JSON + part)
        yield connection


@abruptly
@pytest.mark.parametrize(
    "part",
    [
        b"Content-Length: 100\r\n\r\n",
        b'Content-Length: 100\r\n\r\n{"input": "hel',
        b"Content-Length: 9000000\r\n\r\n" + b"x" * 1_000_000,
        b'Transfer-Encoding: chunked\r\n\r\n9\r\n{"input":\r\n',
    ],
    ids=["nothing sent", "a part sent", "much sent", "chunks"],
)
def test_a_client_that_leaves_while_it_sends(part: bytes, abruptly: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted as gone, not as a fault of ours, and the log is silent."""
    with make_server(EmbedEndpoint()) as server, server.client() as client:
        with sending(server, part) as connection:
            until(lambda: server.app.asgi.num_in_flight == 1)
            if abruptly:
                reset_when_closed(connection)
        until(lambda: counted(client, "/v1/embeddings") == {"499": 1})
        assert client.post("/v1/embeddings", json=BODY).status_code == 200
        assert counted(client, "/v1/embeddings") == {"499": 1, "200": 1}
        assert server.engine is not None
        assert len(server.engine.requests) == 1
        assert queue(client) == [0, 0, 0]
    check_complaints(caplog)


def test_a_draining_server_refuses_what_is_new_and_finishes_what_runs() -> None:
    with make_server(EmbedEndpoint()) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        engine = server.engine
        assert engine is not None
        engine.hold()
        running = pool.submit(client.post, "/v1/embeddings", json=BODY)
        until(lambda: len(engine.requests) == 1)
        server.app.asgi.draining = True
        asked = [("POST", "/v1/embeddings"), ("PUT", "/v1/embeddings"), ("POST", "/v2/embed"), ("GET", "/v1/models"), ("GET", "/nope")]
        for method, path in asked:
            refused = client.request(method, path, json=BODY)
            assert "shutting down" in check_error(refused, 503)
            assert refused.json()["error"]["type"] == "ServiceUnavailableError"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        assert "shutting down" in check_error(client.get("/ready"), 503)
        assert client.get("/health").status_code == 200
        assert len(engine.requests) == 1
        assert not running.done()
        engine.go()
        assert running.result(10).status_code == 200
        server.app.asgi.draining = False
        assert sample(client, 'jackfield_requests_total{method="POST",path="unmatched",status="503"}') == 2
