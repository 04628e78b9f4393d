"""What a stage gives is looked at after the wrappers, whatever shape its route declares; a wrong one is a bug with a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from msgspec import Struct

from jackfield import Context, Delta, PoolingParams, Route, SamplingParams
from jackfield.testing import RunningServer, make_client, make_server
from tests.plugins.test_stages import Answer, Around, Chunk, Echo, Observer, Talk, Text, events


class One(Struct, frozen=True, kw_only=True, tag=True):
    one: int


class Other(Struct, frozen=True, kw_only=True, tag=True):
    other: int


RIGHT = Answer(tokens=[1], numbers=[0.5])
# The declared type, what the stage gives, and what the log says of it; nothing if it is right.
RESPONSES: list[tuple[Any, Any, str]] = [
    (One | Other, One(one=1), ""),
    (One | Other, Other(other=1), ""),
    (list[Answer], [RIGHT], ""),
    (list[Answer] | Other, [RIGHT], ""),
    (dict[str, int], {"a": 1}, ""),
    (str, "text", ""),
    (One | Other, {"other": 1}, "gave dict; a One or Other is expected"),
    (One | Other, None, "gave NoneType; a One or Other is expected"),
    (One | Other, RIGHT, "gave Answer; a One or Other is expected"),
    (Answer, Other(other=1), "gave Other; a Answer is expected"),
    (list[Answer], RIGHT, "gave Answer; a list is expected"),
    (list[Answer] | Other, RIGHT, "gave Answer; a list or Other is expected"),
    (dict[str, int], [1], "gave list; a dict is expected"),
]


class Gives(Echo):
    """A route for each of the responses."""

    routes: ClassVar[Any] = tuple(
        Route(method="POST", paths=(f"/gives/{number}",), request=Text, response=declared)
        for number, (declared, _, _) in enumerate(RESPONSES)
    )

    def build_response(self, ctx: Context[Text]) -> Any:
        return RESPONSES[self.routes.index(ctx.route)][1]


CHUNKS: list[Any] = [{"text": "a"}, "a", RIGHT, [[Chunk(text="a")]]]
PARAMS: list[Any] = [PoolingParams(), None, {}]


class GivesChunks(Talk):
    """A chunk, or parameters, of the list and place that the text says."""

    def sampling_params(self, ctx: Context[Text]) -> Any:
        kind, _, place = ctx.request.text.partition(" ")
        return PARAMS[int(place)] if kind == "params" else SamplingParams(max_tokens=100)

    def build_chunk(self, ctx: Context[Text], delta: Delta) -> Any:
        return CHUNKS[int(ctx.request.text.partition(" ")[2])]


@pytest.fixture(scope="module")
def observer() -> Observer:
    return Observer()


@pytest.fixture(scope="module")
def server(observer: Observer) -> Iterator[RunningServer]:
    with make_server(Gives(), GivesChunks(), observer) as running:
        yield running


@pytest.mark.parametrize("number", range(len(RESPONSES)), ids=[words or f"{declared} is right" for declared, _, words in RESPONSES])
def test_a_response(server: RunningServer, observer: Observer, number: int, caplog: pytest.LogCaptureFixture) -> None:
    words = RESPONSES[number][2]
    observer.ends.clear()
    with server.client() as client:
        answer = client.post(f"/gives/{number}", json={"text": "ab"})
    ((_, error),) = observer.ends
    if words:
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert "gave" not in answer.text
        assert f"build_response of endpoint 'echo' {words}" in caplog.text
        assert isinstance(error, TypeError)
    else:
        assert answer.status_code == 200, answer.text
        assert error is None


@pytest.mark.parametrize("number", range(len(CHUNKS)), ids=[type(given).__name__ for given in CHUNKS])
def test_a_chunk_of_another_kind_is_a_bug(server: RunningServer, observer: Observer, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first event, so that the answer is an ordinary one."""
    observer.ends.clear()
    with server.client() as client:
        answer = client.post("/talk", json={"text": f"chunk {number}", "stream": True})
    assert answer.status_code == 500
    assert "gave" not in answer.text
    assert f"build_chunk of endpoint 'talk' gave {type(CHUNKS[number]).__name__}; a Chunk, or a list of such, is expected" in caplog.text
    assert [isinstance(error, TypeError) for _, error in observer.ends] == [True]


def test_no_chunk_is_nothing_to_send() -> None:
    with make_client(Talk(), Around("around", [], build_chunk=None)) as client:
        assert events(client, "ab") == []


@pytest.mark.parametrize("number", range(len(PARAMS)), ids=[type(given).__name__ for given in PARAMS])
def test_parameters_of_another_kind_are_a_bug(server: RunningServer, number: int, caplog: pytest.LogCaptureFixture) -> None:
    with server.client() as client:
        assert client.post("/talk", json={"text": f"params {number}", "stream": True}).status_code == 500
    assert f"sampling_params of endpoint 'talk' gave {type(PARAMS[number]).__name__}; a SamplingParams is expected" in caplog.text
