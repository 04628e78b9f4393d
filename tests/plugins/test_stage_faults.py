"""Stages that raise what Python or asyncio takes for something else, and stages in threads: the request fails, the server lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jackfield import Context, Delta, EngineRequest, PoolingOutputs, Prompt, Stream, Submit, hookimpl, stageimpl
from jackfield.testing import make_client, make_server
from tests.http.raw import sample
from tests.plugins.test_stages import Echo, Observer, Talk, Text, events, ids_of, post, until

GENERIC = "Internal server error; the log has the details."
# (path, stage) of every stage that a request has.
STAGES = [
    *(("/echo", stage) for stage in ("preprocess", "pooling_params", "build_response")),
    *(("/talk", stage) for stage in ("preprocess", "sampling_params", "build_chunk")),
]
NO_ERRORS = [StopIteration("a value"), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt()]
threaded = pytest.mark.parametrize("threaded", [False, True], ids=["on the loop", "threaded"])


class OddEcho(Echo):
    """Raises the error in the stage that the text names."""

    error: Any = None

    def note(self, stage: str, ctx: Context[Text]) -> None:
        super().note(stage, ctx)
        if ctx.request.text == stage:
            raise self.error


class OddTalk(Talk, OddEcho):
    """The same as a stream."""


def refused(client: httpx.Client, path: str, text: str) -> None:
    """A 500 in the one shape, soon: a future that hangs would be noticed here."""
    answer = client.post(path, json={"text": text, "stream": path == "/talk"}, timeout=10)
    assert answer.status_code == 500, answer.text
    assert answer.json() == {"error": {"message": GENERIC, "type": "InternalServerError", "param": None, "code": 500}}


def served(client: httpx.Client, path: str) -> None:
    if path == "/echo":
        assert post(client, "good")["tokens"] == ids_of("good")
    else:
        assert len(events(client, "good")) == len("good") + 1


@threaded
@pytest.mark.parametrize("error", NO_ERRORS, ids=lambda error: type(error).__name__)
def test_a_stage_that_raises_what_is_no_error(error: Any, threaded: bool, caplog: pytest.LogCaptureFixture) -> None:
    observer, echo, talk = Observer(), OddEcho(), OddTalk()
    echo.error = talk.error = error
    tables = {name: {"threaded": threaded} for name in ("echo", "talk")}
    with make_client(echo, talk, observer, endpoints=tables) as client:
        for path, stage in STAGES:
            caplog.clear()
            refused(client, path, stage)
            assert type(error).__name__ in caplog.text
            assert "Traceback" in caplog.text
            served(client, path)
        assert sample(client, 'jackfield_queue{unit="requests"}') == 0
    assert [text for text, _ in observer.ends] == [text for _, stage in STAGES for text in (stage, "good")]
    assert all(isinstance(error, Exception) for text, error in observer.ends if text != "good")
    assert not any(error for text, error in observer.ends if text == "good")


class Breaker:
    """A wrapper that ends the process, it thinks; before the stage or after it."""

    def __init__(self, *, early: bool) -> None:
        self.early = early

    @stageimpl(wrapper=True)
    def preprocess(self, ctx: Context[Text]) -> Generator[None, Any, Any]:
        if self.early and ctx.request.text == "bad":
            raise SystemExit(3)
        prompts = yield
        if ctx.request.text == "bad":
            raise SystemExit(3)
        return prompts


@threaded
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_wrapper_that_exits(early: bool, threaded: bool) -> None:
    observer = Observer()
    with make_client(Echo(), Breaker(early=early), observer, endpoints={"echo": {"threaded": threaded}}) as client:
        refused(client, "/echo", "bad")
        served(client, "/echo")
    assert [text for text, _ in observer.ends] == ["bad", "good"]


class OnLoop:
    """Writes down the event loop's thread."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    @hookimpl
    def jackfield_wrap_stream(self, stream: Stream) -> Stream:
        async def traced(ctx: Context[Any], request: EngineRequest) -> AsyncIterator[Delta]:
            async for delta in stream(ctx, request):
                self.threads.add(threading.get_ident())
                yield delta

        return traced


class Wrapping:
    """Writes down the thread in which it runs around a chunk."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    @stageimpl(wrapper=True)
    def build_chunk(self) -> Generator[None, Any, Any]:
        self.threads.add(threading.get_ident())
        return (yield)


@threaded
def test_every_stage_of_a_stream_runs_beside_the_event_loop(threaded: bool) -> None:
    """Chunks too, and what wraps them."""
    talk, loop, wrapping = Talk(), OnLoop(), Wrapping()
    with make_client(talk, loop, wrapping, endpoints={"talk": {"threaded": threaded}}) as client:
        assert len(events(client, "abc")) == 4
    assert set(talk.threads) == {"preprocess", "sampling_params", "build_chunk"}
    assert len(loop.threads) == 1
    assert wrapping.threads
    for thread in (*talk.threads.values(), *wrapping.threads):
        assert (thread in loop.threads) is not threaded


class Patient:
    """A stage that stands still until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.may_go = threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.may_go.wait(20)


class PatientEcho(Echo):
    def __init__(self, patient: Patient) -> None:
        super().__init__()
        self.patient = patient

    def preprocess(self, ctx: Context[Text]) -> list[Prompt]:
        self.patient.wait()
        return super().preprocess(ctx)


class PatientTalk(Talk):
    def __init__(self, patient: Patient) -> None:
        super().__init__()
        self.patient = patient

    def build_chunk(self, ctx: Context[Text], delta: Delta) -> Any:
        self.patient.wait()
        return super().build_chunk(ctx, delta)


@pytest.mark.parametrize("kind", [PatientEcho, PatientTalk], ids=["preprocess", "build_chunk"])
def test_a_threaded_stage_that_blocks_holds_up_nobody(kind: type[PatientEcho | PatientTalk]) -> None:
    """While it stands still, probes and other endpoints answer; then its own request does."""
    patient = Patient()
    slow = kind(patient)
    other = Talk() if isinstance(slow, PatientEcho) else Echo()
    tables = {slow.name: {"threaded": True}}
    with make_server(slow, other, endpoints=tables) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        path = f"/{slow.name}"
        waiting = pool.submit(client.post, path, json={"text": "ab", "stream": slow.name == "talk"})
        assert patient.entered.wait(10)
        assert client.get("/health", timeout=10).status_code == 200
        served(client, f"/{other.name}")
        assert not waiting.done()
        patient.may_go.set()
        assert waiting.result(10).status_code == 200
        until(lambda: server.app.asgi.num_in_flight == 0)


class OddObserver:
    """An observer whose fault is no ordinary error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @stageimpl
    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> None:
        raise self.error


class OddWrapper:
    """The same around the engine call."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def jackfield_wrap_submit(self, submit: Submit) -> Submit:
        async def odd(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            raise self.error

        return odd


odd_errors = pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=["SystemExit", "CancelledError"])


@odd_errors
def test_an_observer_that_raises_what_is_no_error_spoils_nothing(error: BaseException) -> None:
    after = Observer("zzz")
    with make_client(Echo(), OddObserver(error), after) as client:
        served(client, "/echo")
    assert after.ends == [("good", None)]


@odd_errors
def test_a_wrapper_of_the_engine_call_that_raises_what_is_no_error(error: BaseException) -> None:
    observer = Observer()
    with make_client(Echo(), OddWrapper(error), observer) as client:
        refused(client, "/echo", "any")
        assert sample(client, 'jackfield_requests_total{method="POST",path="/echo",status="500"}') == 1
        assert sample(client, 'jackfield_queue{unit="requests"}') == 0
    assert [type(end) for _, end in observer.ends] == [RuntimeError]
