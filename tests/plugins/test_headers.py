"""What stages see of a request's headers, and what they may add to an answer's."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator

import pytest

from jackfield import Context, stageimpl
from jackfield.testing import make_client, make_server
from tests.http.raw import JSON, Raw, check_error
from tests.plugins.test_stages import Answer, Echo, Talk, Text


class Mirror:
    """Answers with the headers that the test asks for, in the answer's note and headers."""

    def __init__(self, add: dict[str, str] | None = None) -> None:
        self.add = add or {}
        self.seen: list[dict[str, str]] = []

    @stageimpl(wrapper=True)
    def build_response(self, ctx: Context[Text]) -> Generator[None, Answer, Answer]:
        answer = yield
        self.seen.append(dict(ctx.headers))
        ctx.response_headers |= self.add
        note = f"{ctx.headers['X-Tenant']} {ctx.headers.get('x-TENANT')} {'X-Other' in ctx.headers} {ctx.headers.get('né', 'none')}"
        return Answer(tokens=answer.tokens, numbers=answer.numbers, note=note)


def test_headers_by_any_case_and_of_a_repeated_one_the_first() -> None:
    mirror = Mirror()
    with make_server(Echo(), mirror) as server:
        lines = [JSON, b"X-TENANT: caf\xe9", b"x-tenant: second"]
        answer = Raw(server.url, "POST", "/echo", *lines, body=b'{"text": "ab"}')
    assert answer.status == 200
    assert json.loads(answer.body)["note"] == "café café False none"
    (seen,) = mirror.seen
    assert seen["x-tenant"] == "café"
    assert seen["content-length"] == "14"


def test_headers_of_an_answer() -> None:
    with make_client(Echo(), Mirror({"X-Cost": "0.1 €".replace("€", "c\xe9nts"), "x-Empty": ""})) as client:
        answer = client.post("/echo", json={"text": "ab"}, headers={"x-tenant": "a"})
    assert answer.headers["x-cost"] == "0.1 c\xe9nts"
    assert answer.headers["x-empty"] == ""


@pytest.mark.parametrize(
    "add", [{"x-cost": "1\r\nset-cookie: a=b"}, {"x-cost\r\nset-cookie": "1"}, {"x cost": "1"}, {"": "1"}, {"x": "\0"}], ids=repr
)
def test_what_is_no_header_is_a_bug_and_splits_no_answer(add: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), make_client(Echo(), Mirror(add)) as client:
        answer = client.post("/echo", json={"text": "ab"}, headers={"x-tenant": "a"})
        check_error(answer, 500)
        assert "set-cookie" not in answer.headers
        assert "which is no HTTP header" in caplog.text


class Early:
    """Adds a header to streams."""

    @stageimpl(wrapper=True)
    def preprocess(self, ctx: Context[Text]) -> Generator[None, object, object]:
        prompts = yield
        ctx.response_headers["X-Model"] = ctx.request.text
        return prompts


def test_headers_of_a_stream() -> None:
    with make_client(Talk(), Early()) as client:
        fine = client.post("/talk", json={"text": "ab", "stream": True})
        split = client.post("/talk", json={"text": "a\r\nx: y", "stream": True})
    assert fine.headers["x-model"] == "ab"
    assert fine.headers["content-type"].startswith("text/event-stream")
    check_error(split, 500)
