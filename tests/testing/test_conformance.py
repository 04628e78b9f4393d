"""The contract catches what it says: an endpoint that is right but for one thing fails one check, and the pytest plugin tells it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import Struct

from jackfield import (
    Context,
    Delta,
    Endpoint,
    EndpointRegistry,
    EngineRequest,
    PoolingParams,
    Prompt,
    Request,
    Route,
    SamplingParams,
    ServingError,
    Stream,
    TextPrompt,
    hookimpl,
)
from jackfield.testing import contract_cases

pytest_plugins = ["pytester"]

# Plugins of pytest that this environment has besides, which take seconds to import.
WITHOUT = [
    argument for name in ("anyio", "faker", "hypothesispytest", "langsmith_plugin", "schemathesis") for argument in ("-p", f"no:{name}")
]


class Body(Request, frozen=True, kw_only=True):
    texts: list[str]


class Answer(Struct, frozen=True, kw_only=True):
    id: str
    sizes: list[int]


class Right(Endpoint[Body, Answer]):
    name = id_prefix = "right"
    operations = ("embed",)
    routes = (Route(method="POST", paths=("/right",), request=Body, response=Answer, example={"texts": ["a", "b"]}),)

    def preprocess(self, ctx: Context[Body]) -> list[Prompt]:
        return [TextPrompt(text=text, param=f"texts[{place}]") for place, text in enumerate(ctx.request.texts)]

    def pooling_params(self, ctx: Context[Body]) -> PoolingParams:
        return PoolingParams()

    def build_response(self, ctx: Context[Body]) -> Answer:
        return Answer(id=ctx.id, sizes=[len(vector) for vector in ctx.outputs["embed"]])


class Slow(Right):
    def preprocess(self, ctx: Context[Body]) -> list[Prompt]:
        until = time.thread_time() + 0.012
        while time.thread_time() < until:
            pass
        return super().preprocess(ctx)


class Changing(Right):
    def preprocess(self, ctx: Context[Body]) -> list[Prompt]:
        prompts = super().preprocess(ctx)
        ctx.request.texts.append("more")
        return prompts


class OwnId(Right):
    def build_response(self, ctx: Context[Body]) -> Answer:
        return Answer(id="always-the-same", sizes=[])


class Swallowing(Right):
    """Answers whatever is wrong."""

    def preprocess(self, ctx: Context[Body]) -> list[Prompt]:
        raise KeyError("a bug")


class NoExample(Right):
    routes = (Route(method="POST", paths=("/right",), request=Body, response=Answer),)


class Ask(Request, frozen=True, kw_only=True):
    text: str
    stream: bool | None = None


class Piece(Struct, frozen=True, kw_only=True):
    id: str
    text: str


class Telling(Endpoint[Ask, Piece]):
    """One that streams."""

    name = id_prefix = "telling"
    operations = ("generate",)
    routes = (Route(method="POST", paths=("/tell",), request=Ask, response=Piece, chunk=Piece, streams=True, example={"text": "abcdef"}),)

    def preprocess(self, ctx: Context[Ask]) -> list[Prompt]:
        return [TextPrompt(text=ctx.request.text, param="text")]

    def sampling_params(self, ctx: Context[Ask]) -> SamplingParams:
        return SamplingParams(temperature=0)

    def build_response(self, ctx: Context[Ask]) -> Piece:
        return Piece(id=ctx.id, text=ctx.choices[0].text)

    def build_chunk(self, ctx: Context[Ask], delta: Delta) -> Piece | None:
        return Piece(id=ctx.id, text=delta.text) if delta.text else None


class FailingAtTheEnd(Telling):
    def build_chunk(self, ctx: Context[Ask], delta: Delta) -> Piece | None:
        if ctx.is_complete:
            raise KeyError("a bug")
        return super().build_chunk(ctx, delta)


class OwnIds(Telling):
    def build_chunk(self, ctx: Context[Ask], delta: Delta) -> Piece | None:
        return Piece(id="always-the-same", text=delta.text)


class AllAtOnce(Telling):
    def build_chunk(self, ctx: Context[Ask], delta: Delta) -> Piece | None:
        return Piece(id=ctx.id, text=ctx.choices[0].text) if ctx.is_complete else None


class Calming:
    """A plugin with that endpoint, which makes a good end of every fault."""

    @hookimpl
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        registry.add(Telling())

    @hookimpl
    def jackfield_wrap_stream(self, endpoint: Endpoint[Any, Any], stream: Stream) -> Stream:
        async def calmed(ctx: Context[Any], request: EngineRequest) -> AsyncIterator[Delta]:
            try:
                async for delta in stream(ctx, request):
                    yield delta
            except ServingError:
                yield Delta(index=0, text="!", finish_reason="stop")

        return calmed


class Tireless(Calming):
    """Lets the engine go on for whoever has left."""

    @hookimpl
    def jackfield_wrap_stream(self, endpoint: Endpoint[Any, Any], stream: Stream) -> Stream:
        running: set[asyncio.Task[None]] = set()

        async def queued(ctx: Context[Any], request: EngineRequest) -> AsyncIterator[Delta]:
            queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

            async def fill() -> None:
                try:
                    async for delta in stream(ctx, request):
                        queue.put_nowait(delta)
                    queue.put_nowait(None)
                except Exception as error:
                    queue.put_nowait(error)

            running.add(asyncio.ensure_future(fill()))
            while (told := await queue.get()) is not None:
                if isinstance(told, Exception):
                    raise told
                yield told

        return queued


def failing(endpoint: Endpoint[Any, Any]) -> set[str]:
    """Names of the checks that fail."""
    failed: set[str] = set()
    for case in contract_cases(endpoint):
        try:
            case.run()
        except AssertionError:
            failed.add(case.check.__name__)
    return failed


def test_a_right_endpoint_passes() -> None:
    assert failing(Right()) == set()


@pytest.mark.parametrize(
    ("endpoint", "checks"),
    [
        (Slow, {"stages_are_quick_and_leave_the_request_alone"}),
        (Changing, {"stages_are_quick_and_leave_the_request_alone"}),
        (OwnId, {"example_answers"}),
    ],
)
def test_one_fault_fails_one_check(endpoint: type[Right], checks: set[str]) -> None:
    assert failing(endpoint()) == checks


STREAMS = {
    "a_stream_ends_well",
    "a_stream_that_never_begins_is_an_error",
    "a_stream_that_breaks_ends_with_the_error",
    "a_client_that_leaves_a_stream_ends_its_work",
}


def streaming(plugin: object) -> set[str]:
    """Those of the checks of streams that fail."""
    failed: set[str] = set()
    for case in contract_cases(plugin):
        if case.check.__name__ in STREAMS:
            try:
                case.run()
            except AssertionError:
                failed.add(case.check.__name__)
    return failed


def test_a_right_endpoint_that_streams_passes() -> None:
    assert failing(Telling()) == set()
    assert {case.check.__name__ for case in contract_cases(Telling())} >= STREAMS
    assert not {case.check.__name__ for case in contract_cases(Right())} & STREAMS


@pytest.mark.parametrize(
    ("plugin", "checks"),
    [
        (FailingAtTheEnd, {"a_stream_ends_well"}),
        (OwnIds, {"a_stream_ends_well"}),
        (AllAtOnce, {"a_stream_that_breaks_ends_with_the_error", "a_client_that_leaves_a_stream_ends_its_work"}),
        (Tireless, {"a_client_that_leaves_a_stream_ends_its_work"}),
        (Calming, STREAMS - {"a_stream_ends_well"}),
    ],
)
def test_faults_of_streams(plugin: type[object], checks: set[str]) -> None:
    assert streaming(plugin()) == checks


@pytest.mark.parametrize("endpoint", [Swallowing, NoExample])
def test_a_broken_endpoint_fails_most(endpoint: type[Right]) -> None:
    assert failing(endpoint()) >= {"example_answers", "schema_round_trip", "overload", "deadline"}


def test_the_option(pytester: pytest.Pytester) -> None:
    """Over an installed endpoint, after the tests that there are."""
    pytester.makepyfile("def test_own(): pass")
    result = pytester.runpytest_subprocess("--jackfield-conformance=tokenize", "-p", "no:cacheprovider", *WITHOUT)
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] > 20
    result.stdout.fnmatch_lines(["*median CPU time of stages*", "tokenize /tokenize: *"])


def test_without_the_option_nothing_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_own(): pass")
    assert pytester.runpytest_subprocess(*WITHOUT).parseoutcomes() == {"passed": 1}


def test_a_name_that_is_not_there(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--jackfield-conformance=nosuch", *WITHOUT)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'nosuch' is no installed endpoint; installed plugins: *embed*"])
