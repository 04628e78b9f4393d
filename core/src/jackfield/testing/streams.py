"""The checks of the contract for routes that stream. As those of `checks.py` each is handed a `Bench`, and knows no endpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from jackfield.errors import InternalError
from jackfield.schema import ErrorBody
from jackfield.testing.bench import Bench, check_error, read_vectors, until
from jackfield.testing.events import read_events

__all__ = [
    "a_client_that_leaves_a_stream_ends_its_work",
    "a_stream_ends_well",
    "a_stream_that_breaks_ends_with_the_error",
    "a_stream_that_never_begins_is_an_error",
]

FAULT = "a fault on demand"


def a_stream_ends_well(bench: Bench) -> None:
    """With a true `stream` the example gets events of the declared type, under the id that was asked for, and the last line after them."""
    answer = _stream(bench, headers={"x-request-id": "given-id"})
    events = list(read_events(answer))
    assert events, "a stream without an event"
    for event in events:
        assert not _is_error(event), f"an error in a stream of which nothing is wrong: {event}"
        _check_type(bench, event)
        if isinstance(event, dict) and "id" in event:
            assert event["id"] == f"{bench.route.id_prefix or bench.endpoint.id_prefix}-given-id"
        if isinstance(event, dict) and "model" in event:
            assert event["model"] == "fake"
    whole = bench.send({**bench.example, "stream": False})
    assert (whole.status_code, whole.headers["content-type"]) == (200, "application/json"), whole.text[:300]


def a_stream_that_never_begins_is_an_error(bench: Bench) -> None:
    """What goes wrong before the first event has its status and the one shape of an error, as without a stream."""
    bench.engine.fault = lambda request: InternalError(FAULT)
    assert FAULT in check_error(_stream(bench), 500).error.message
    bench.engine.fault = None
    assert check_error(_stream(bench, model="no-such-model"), 404).error.param == "model"
    bench.engine.die()
    check_error(_stream(bench), 503)


def a_stream_that_breaks_ends_with_the_error(bench: Bench) -> None:
    """An engine that fails in mid-stream: what was told stays, the error is an event of the one shape, and the last line comes after it."""
    _, answer = _broken(bench)
    *told, error = read_events(answer)
    assert told, "the error is the only event; before the first it should have been an answer with its status"
    assert _is_error(error), f"the engine failed, and the last event is no error: {error}"
    detail = msgspec.convert(error, ErrorBody).error
    assert (detail.code, FAULT in detail.message) == (500, True), detail
    for event in told:
        assert not _is_error(event), f"an error before the end: {event}"
        _check_type(bench, event)
    assert bench.send().status_code == 200, "the next request fails, too"


def a_client_that_leaves_a_stream_ends_its_work(bench: Bench) -> None:
    """A connection that is cut in mid-stream aborts the request in the engine; others do not notice."""
    after, _ = _broken(bench)
    before = len(bench.engine.requests)
    bench.engine.hold(after=after)
    with ThreadPoolExecutor(1) as pool:
        body = {**bench.example, "stream": True}
        place: dict[str, Any] = {"params": _query(body)} if bench.route.method == "GET" else {"json": body}
        with bench.client.stream(bench.route.method, bench.path, **place) as leaving:
            events = read_events(leaving)  # kept: an iterator that is dropped closes the connection
            next(events)
            assert not bench.engine.aborted
        staying = pool.submit(bench.send)
        try:
            until(lambda: len(bench.engine.requests) == before + 2 and bool(bench.engine.aborted))
        finally:
            bench.engine.go()
        assert staying.result().status_code == 200
    assert bench.engine.aborted == [bench.engine.requests[before].id]


def _stream(bench: Bench, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {**bench.example, **more, "stream": True}
    return bench.send(_query(body) if bench.route.method == "GET" else body, headers=headers)


def _query(body: dict[str, Any]) -> dict[str, Any]:
    """As a query has it."""
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in body.items()}


def _is_error(event: Any) -> bool:
    return isinstance(event, dict) and "error" in event


def _check_type(bench: Bench, event: Any) -> None:
    kind = bench.route.chunk
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        msgspec.convert(event, kind, dec_hook=read_vectors)


def _broken(bench: Bench) -> tuple[int, httpx.Response]:
    """A stream in which the engine has failed as soon as something had been sent, and after how many tokens. The engine is well again.

    An endpoint need send nothing for the first tokens, so the place is found by trying.
    """
    bench.engine.fault = lambda request: InternalError(FAULT)
    try:
        for after in range(1, bench.engine.max_length):
            bench.engine.fault_after = after
            answer = _stream(bench)
            if answer.status_code == 200:
                break
            check_error(answer, 500)
    finally:
        bench.engine.fault, bench.engine.fault_after = None, 0
    assert FAULT in answer.text, "nothing is sent before all is generated: the example must be one of which more comes, or streams false"
    return after, answer
