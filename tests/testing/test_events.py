"""`read_events`: what it reads, and what it finds wrong."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from jackfield.testing import FakeEngine, make_server, read_events
from jackfield_completions import CompletionsEndpoint

HEADERS = {"content-type": "text/event-stream; charset=utf-8"}
DONE = b"data: [DONE]\n\n"


class Parts(httpx.SyncByteStream):
    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_however_it_is_cut(size: int) -> None:
    """Also within a letter; and a line separator within a text ends no line."""
    whole = 'data: {"a":"\u2028\x85 é"}\n\ndata: [1]\n\n'.encode() + DONE
    parts = Parts(*(whole[start : start + size] for start in range(0, len(whole), size)))
    assert list(read_events(httpx.Response(200, headers=HEADERS, stream=parts))) == [{"a": "\u2028\x85 é"}, [1]]
    assert list(read_events(httpx.Response(200, headers=HEADERS, content=whole)))[1] == [1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "without its last line"),
        (b"data: 1\n\n", "without its last line"),
        (b"data: 1\n\ndata: [DONE]\n", "without its last line"),
        (DONE + b"data: 1\n\n" + DONE, "comes after"),
        (DONE + DONE, "comes after"),
        (DONE + b"x", "without its last line"),
        (b"event: x\n\n" + DONE, "begins with"),
        (b"data: 1\ndata: 2\n\n" + DONE, "of one line"),
        (b"data: {\n\n" + DONE, "no JSON"),
        (b"data: NaN\n\n" + DONE, "no JSON"),
    ],
)
def test_what_is_wrong_is_told(content: bytes, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        list(read_events(httpx.Response(200, headers=HEADERS, content=content)))


@pytest.mark.parametrize(("status", "kind"), [(200, "application/json"), (404, "text/event-stream")])
def test_what_is_no_stream(status: int, kind: str) -> None:
    with pytest.raises(AssertionError, match=f"no stream, but {status}"):
        next(read_events(httpx.Response(status, headers={"content-type": kind}, stream=Parts(b"{}"))))


def test_events_come_before_the_stream_has_ended() -> None:
    """And the engine, held after so many tokens, goes on where it was."""
    engine = FakeEngine()
    engine.hold(after=3)
    body = {"prompt": "abcd", "temperature": 0, "stream": True}
    with make_server(CompletionsEndpoint(), engine=engine) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            events = read_events(answer)
            assert [next(events)["choices"][0]["text"] for _ in range(2)] == ["a", "b"]
            engine.go()
            assert "".join(event["choices"][0]["text"] for event in events) == "cd"
        assert engine.aborted == []
        engine.hold(after=3)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            events = read_events(answer)
            next(events)
            engine.die()
            assert list(events)[-1]["error"]["code"] == 503


def test_a_stop_text_is_no_leaving() -> None:
    """The engine is told that a choice has ended, and its stream closed; nobody has given up."""
    engine = FakeEngine()
    with make_server(CompletionsEndpoint(), engine=engine) as server, server.client() as client:
        body = {"prompt": "abcdef", "temperature": 0, "stop": "c", "stream": True}
        events = list(read_events(client.post("/v1/completions", json=body)))
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert engine.aborted == []
