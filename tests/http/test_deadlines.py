"""A request's deadline holds wherever the request is: in a stream, and in a stage of an endpoint that never meets the engine."""

from __future__ import annotations

import threading
from typing import Any

from msgspec import Struct

from jackfield import Context, Delta, Endpoint, Request, Route, SamplingParams, TextPrompt
from jackfield.testing import make_server
from tests.http.raw import check_error

SOON = {"x-request-timeout": "0.1"}
BOUND_S = 20.0


class Ask(Request, frozen=True, kw_only=True):
    """May ask for a stream."""

    stream: bool = False


class Answer(Struct):
    """One word."""

    word: str = "late"


class Talk(Endpoint[Ask, Answer]):
    """A stream of the engine's deltas."""

    name = "talk"
    id_prefix = "talk"
    operations = ("generate",)
    routes = (Route(method="POST", paths=("/talk",), request=Ask, response=Answer, chunk=Answer, streams=True),)

    def preprocess(self, ctx: Context[Ask]) -> list[TextPrompt]:
        return [TextPrompt(text="hello")]

    def sampling_params(self, ctx: Context[Ask]) -> SamplingParams:
        return SamplingParams(max_tokens=5)

    def build_chunk(self, ctx: Context[Ask], delta: Delta) -> Answer:
        return Answer(delta.text)

    def build_response(self, ctx: Context[Ask]) -> Answer:
        return Answer()


class Slow(Endpoint[Ask, Answer]):
    """Without an engine, slow in its own thread."""

    name = "slow"
    id_prefix = "slow"
    routes = (Route(method="POST", paths=("/slow",), request=Ask, response=Answer),)

    def __init__(self) -> None:
        self.hold = threading.Event()

    def build_response(self, ctx: Context[Ask]) -> Answer:
        self.hold.wait(BOUND_S)
        return Answer()


def test_a_stream_that_does_not_begin_in_time_is_an_ordinary_error() -> None:
    with make_server(Talk()) as server, server.client() as client:
        assert server.engine is not None
        server.engine.hold()
        check_error(client.post("/talk", json={"stream": True}, headers=SOON), 504)
        assert server.engine.aborted == [request.id for request in server.engine.requests]
        server.engine.go()
        assert client.post("/talk", json={"stream": True}, headers={"x-request-timeout": "20"}).text.endswith("data: [DONE]\n\n")


def test_a_stage_that_takes_too_long() -> None:
    slow: Any = Slow()
    with make_server(slow, endpoints={"slow": {"threaded": True}}) as server, server.client() as client:
        check_error(client.post("/slow", json={}, headers=SOON), 504)
        slow.hold.set()
        assert client.post("/slow", json={}, headers={"x-request-timeout": "20"}).json() == {"word": "late"}
