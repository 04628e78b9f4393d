"""What is decided before there is a request: heads that are too long or no HTTP at all, HEAD, encodings, bodies on their way."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec
import pytest

from jackfield.schema import ErrorBody
from jackfield.testing import RunningServer, make_server
from jackfield_embed import EmbedEndpoint
from tests.http.raw import BODY, JSON, RIGHT, Raw, check_error, sample
from tests.plugins.test_stages import until


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(EmbedEndpoint(), server={"max_queue_bytes": 4000}) as running:
        yield running


@contextmanager
def connection(server: RunningServer) -> Iterator[socket.socket]:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 0), timeout=20) as made:
        yield made


def answer_to(server: RunningServer, *parts: bytes) -> tuple[bytes, ErrorBody]:
    """Status line and error of what is sent by hand; the server closes."""
    with connection(server) as sock:
        for part in parts:
            sock.sendall(part)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    return head.partition(b"\r\n")[0], msgspec.json.decode(body, type=ErrorBody)


def test_what_is_no_http_is_answered_in_the_one_shape(server: RunningServer) -> None:
    status, answer = answer_to(server, b"this is no HTTP\r\n\r\n")
    assert status == b"HTTP/1.1 400 Bad Request"
    assert (answer.error.code, answer.error.type) == (400, "BadRequestError")


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nX-Long: ", b"GET /"], ids=["header", "path"])
def test_a_head_without_end_is_refused(server: RunningServer, head: bytes) -> None:
    # Not a byte more than it takes: what a server has not read when it closes resets the connection, and the answer may be lost.
    status, answer = answer_to(server, head, b"a" * (65537 - len(head)))
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert "65536 bytes" in answer.error.message


def test_the_limit_of_heads_is_none_of_bodies(server: RunningServer) -> None:
    """Several requests over one connection, the body of one larger than a head may be."""
    with server.client() as client:
        for _ in range(3):
            assert client.get("/health", headers={"x-long": "a" * 30_000}).status_code == 200
            assert client.post("/v1/embeddings", json={"input": "a" * 100_000, "truncate_prompt_tokens": -1}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/openapi.json", "/metrics", "/docs"])
def test_head_answers_as_get_without_the_body(server: RunningServer, path: str) -> None:
    got, head = Raw(server.url, "GET", path), Raw(server.url, "HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_a_compressed_body_is_refused_by_name(server: RunningServer) -> None:
    answer = Raw(server.url, "POST", "/v1/embeddings", JSON, b"Content-Encoding: gzip", body=gzip.compress(RIGHT))
    assert "'gzip' is not served" in check_error(answer, 400)


def test_bodies_on_their_way_count(server: RunningServer) -> None:
    text = b'{"input": "' + b"a" * 2989 + b'"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with connection(server) as slow, server.client() as client:
        slow.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text[:10])
        until(lambda: sample(client, 'jackfield_queue{unit="bytes"}') == len(text))
        answer = client.post("/v1/embeddings", json={"input": "b" * 1500})
        assert "4000" in check_error(answer, 429)
        assert int(answer.headers["retry-after"]) >= 1
        assert client.post("/v1/embeddings", json=BODY).status_code == 200, "what still fits"
        slow.sendall(text[10:])
        assert slow.recv(65536).startswith(b"HTTP/1.1 ")
        until(lambda: sample(client, 'jackfield_queue{unit="requests"}') == 0)
        assert sample(client, 'jackfield_queue{unit="bytes"}') == 0


def test_bodies_in_chunks_count_as_they_arrive(server: RunningServer) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"input": "'
        for _ in range(8):
            yield b"a" * 1000
        yield b'", "truncate_prompt_tokens": -1}'

    headers = {"content-type": "application/json"}
    with server.client() as client:
        assert client.post("/v1/embeddings", content=parts(), headers=headers).status_code == 200, "alone it may pass the queue's limit"
        with connection(server) as slow:
            slow.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: sample(client, 'jackfield_queue{unit="bytes"}') == 100)
            check_error(client.post("/v1/embeddings", content=parts(), headers=headers), 429)
        until(lambda: sample(client, 'jackfield_queue{unit="requests"}') == 0)
        assert sample(client, 'jackfield_queue{unit="bytes"}') == 0
