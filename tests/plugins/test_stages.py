"""What plugins can do to a request and what they cannot break: wrappers, observers, wrapped engine calls, streams, threads."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from msgspec import Struct, structs

from jackfield import (
    BadRequest,
    Context,
    Delta,
    Endpoint,
    EngineRequest,
    InternalError,
    PluginError,
    PoolingOutputs,
    PoolingParams,
    Prompt,
    Request,
    Route,
    SamplingParams,
    ServingError,
    Stream,
    Submit,
    TextPrompt,
    hookimpl,
    stageimpl,
)
from jackfield.testing import FakeEngine, RunningServer, make_client, make_server


class Text(Request, frozen=True, kw_only=True):
    text: str
    stream: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    numbers: list[float]
    note: str = ""


class Chunk(Struct, frozen=True, kw_only=True):
    text: str


class Echo(Endpoint[Text, Answer]):
    """Answers with its prompt's tokens; `raises` makes a stage raise for the text `bad`. It writes its stages and their threads down."""

    name = "echo"
    id_prefix = "echo"
    operations = ("embed",)
    routes = (Route(method="POST", paths=("/echo",), request=Text, response=Answer),)

    def __init__(self, raises: dict[str, Exception] | None = None, journal: list[str] | None = None) -> None:
        self.raises = raises or {}
        self.journal = [] if journal is None else journal
        self.threads: dict[str, int] = {}

    def note(self, stage: str, ctx: Context[Text]) -> None:
        self.journal.append(f"{stage} owner")
        self.threads[stage] = threading.get_ident()
        if ctx.request.text == "bad" and stage in self.raises:
            raise self.raises[stage]

    def preprocess(self, ctx: Context[Text]) -> list[Prompt]:
        self.note("preprocess", ctx)
        return [TextPrompt(text=ctx.request.text, param="text")]

    def pooling_params(self, ctx: Context[Text]) -> PoolingParams:
        self.note("pooling_params", ctx)
        return PoolingParams()

    def build_response(self, ctx: Context[Text]) -> Answer:
        self.note("build_response", ctx)
        return Answer(tokens=ctx.prompts[0].token_ids, numbers=ctx.outputs["embed"][0].tolist())


class Talk(Echo):
    """The same as a stream: a chunk for each of the engine's tokens but `</s>`, whose id is 1, and the one that ends it."""

    name = "talk"
    operations = ("generate",)
    routes = (Route(method="POST", paths=("/talk",), request=Text, response=Answer, streams=True, chunk=Chunk),)

    def sampling_params(self, ctx: Context[Text]) -> SamplingParams:
        self.note("sampling_params", ctx)
        return SamplingParams(max_tokens=100, skip_special_tokens=False)

    def build_chunk(self, ctx: Context[Text], delta: Delta) -> Chunk | None:
        self.note("build_chunk", ctx)
        return None if delta.token_ids == (1,) or delta.finish_reason else Chunk(text=delta.text)


class Around:
    """Wraps every stage and writes down when; `results` replace what a stage gives."""

    def __init__(self, name: str, journal: list[str], **results: Any) -> None:
        self.__name__ = name
        self.journal = journal
        self.results = results
        for stage in ("preprocess", "pooling_params", "sampling_params", "build_response", "build_chunk"):
            setattr(self, stage, self.wrapper(stage))

    def wrapper(self, stage: str) -> Callable[[], Generator[None, Any, Any]]:
        @stageimpl(wrapper=True)
        def around() -> Generator[None, Any, Any]:
            self.journal.append(f"{stage} {self.__name__} before")
            result = yield
            self.journal.append(f"{stage} {self.__name__} after")
            return self.results.get(stage, result)

        return around


class Observer:
    """Collects how requests ended; `raises` is raised after that."""

    def __init__(self, name: str = "observer", raises: Exception | None = None) -> None:
        self.__name__ = name
        self.raises = raises
        self.ends: list[tuple[str, BaseException | None]] = []

    @stageimpl
    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> None:
        self.ends.append((ctx.request.text, error))
        if self.raises is not None:
            raise self.raises


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come, 10 s at most."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come within 10 s")


def post(client: httpx.Client, text: str, status: int = 200) -> Any:
    answer = client.post("/echo", json={"text": text})
    assert answer.status_code == status, answer.text
    return answer.json()


def events(client: httpx.Client, text: str) -> list[Any]:
    """The events of a stream, decoded; its framing is checked, and the closing [DONE] left out."""
    answer = client.post("/talk", json={"text": text, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines
    *datas, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    return [json.loads(data) for data in datas]


def ids_of(text: str) -> list[int]:
    """What the test kit's tokenizer makes of ASCII letters."""
    return [0, *(ord(letter) - 30 for letter in text), 1]


def onion(stage: str) -> list[str]:
    return [f"{stage} {who}" for who in ("alpha before", "beta before", "owner", "beta after", "alpha after")]


def test_wrappers_are_sorted_by_name_and_the_first_is_outermost() -> None:
    """Around every endpoint, and around the stages of a stream as around others."""
    journal: list[str] = []
    with make_client(Around("beta", journal), Echo(journal=journal), Talk(journal=journal), Around("alpha", journal)) as client:
        post(client, "ab")
        assert journal == [*onion("preprocess"), *onion("pooling_params"), *onion("build_response")]
        journal.clear()
        events(client, "ab")
        assert journal == [*onion("preprocess"), *onion("sampling_params"), *(onion("build_chunk") * 5)]


class Polite:
    """Adds to the prompt and to the answer, and keeps something from one stage to the next."""

    @stageimpl(wrapper=True)
    def preprocess(self, ctx: Context[Text]) -> Generator[None, list[TextPrompt], list[TextPrompt]]:
        prompts = yield
        ctx.state["polite"] = len(prompts)
        return [TextPrompt(text=f"{prompt.text}xy", param=prompt.param) for prompt in prompts]

    @stageimpl(wrapper=True)
    def build_response(self, ctx: Context[Text]) -> Generator[None, Answer, Answer]:
        answer = yield
        ctx.response_headers["x-polite"] = "yes"
        return Answer(tokens=answer.tokens, numbers=answer.numbers, note=f"{ctx.state['polite']} made polite")


def test_a_wrapper_changes_prompts_and_response() -> None:
    with make_client(Echo(), Polite()) as client:
        answer = client.post("/echo", json={"text": "ab"})
    assert answer.json()["tokens"] == ids_of("abxy")
    assert answer.json()["note"] == "1 made polite"
    assert answer.headers["x-polite"] == "yes"


@pytest.mark.parametrize(
    ("stage", "result", "words"),
    [
        ("preprocess", "ab", "gave str; a list of prompts is expected"),
        ("preprocess", ["ab"], "gave str; TextPrompt, TokensPrompt or ChatPrompt objects is expected"),
        ("pooling_params", None, "gave NoneType; a PoolingParams is expected"),
        ("pooling_params", SamplingParams(), "gave SamplingParams; a PoolingParams is expected"),
        ("build_response", {"tokens": []}, "gave dict; a Answer is expected"),
    ],
)
def test_a_wrapper_gives_a_wrong_type(caplog: pytest.LogCaptureFixture, stage: str, result: Any, words: str) -> None:
    with make_client(Echo(), Around("around", [], **{stage: result})) as client:
        body = post(client, "ab", 500)
    assert body["error"]["type"] == "InternalServerError"
    assert "gave" not in body["error"]["message"]
    assert f"{stage} of endpoint 'echo' (wrapped by 'around') {words}" in caplog.text


@pytest.mark.parametrize("stage", ["preprocess", "pooling_params", "build_response"])
def test_a_stage_with_a_bug(caplog: pytest.LogCaptureFixture, stage: str) -> None:
    with make_client(Echo({stage: ValueError("secret detail")})) as client:
        assert "secret detail" not in json.dumps(post(client, "bad", 500))
        assert "Traceback" in caplog.text
        assert "ValueError: secret detail" in caplog.text
        assert post(client, "good")["tokens"] == ids_of("good")


@pytest.mark.parametrize("stage", ["preprocess", "pooling_params", "build_response"])
def test_a_stage_that_refuses(caplog: pytest.LogCaptureFixture, stage: str) -> None:
    with make_client(Echo({stage: BadRequest("Text `bad` is refused.", param="text")})) as client:
        error = post(client, "bad", 400)["error"]
        assert error == {"message": "Text `bad` is refused.", "type": "BadRequestError", "param": "text", "code": 400}
        assert post(client, "good")["tokens"] == ids_of("good")
    assert "Traceback" not in caplog.text


class Guard:
    """Refuses a text before the owner is asked, and answers for the owner when that raises."""

    @stageimpl(wrapper=True)
    def preprocess(self, ctx: Context[Text]) -> Generator[None, Any, Any]:
        if ctx.request.text == "refused":
            raise BadRequest("not this one")
        try:
            return (yield)
        except ValueError:
            return [TextPrompt(text="rescued")]


def test_a_wrapper_refuses_and_rescues() -> None:
    echo = Echo({"preprocess": ValueError("x")})
    with make_client(echo, Guard()) as client:
        assert post(client, "refused", 400)["error"]["message"] == "not this one"
        assert echo.journal == []
        assert post(client, "bad")["tokens"] == ids_of("rescued")


def fault(request: EngineRequest) -> ServingError | None:
    """An engine that cannot compute texts of five letters."""
    return InternalError("five is too many") if len(request.token_ids[0]) == 4 * 7 else None


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("stage", "error", "status"),
    [("preprocess", BadRequest("no"), 400), ("pooling_params", ValueError("a bug"), 500), ("build_response", KeyError("a bug"), 500)],
)
def test_observers_are_told_once_how_a_request_ended(stage: str, error: Exception, status: int, threaded: bool) -> None:
    observer, engine = Observer(), FakeEngine(fault=fault)
    with make_client(Echo({stage: error}), observer, engine=engine, endpoints={"echo": {"threaded": threaded}}) as client:
        for text, expected in (("good", 200), ("bad", status), ("fives", 500), ("good", 200)):
            post(client, text, expected)
    assert [text for text, _ in observer.ends] == ["good", "bad", "fives", "good"]
    none, raised, faulty, last = (error for _, error in observer.ends)
    assert none is last is None
    assert raised is error
    assert repr(faulty) == "InternalError('five is too many')"


@contextmanager
def leaving(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that has sent its request and leaves at the end of the block."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + raw)
        yield connection


def test_observers_are_told_of_a_client_that_left() -> None:
    observer, engine = Observer(), FakeEngine()
    engine.hold()
    with make_server(Echo(), observer, engine=engine) as server:
        with leaving(server, "/echo", {"text": "gone"}):
            until(lambda: len(engine.requests) == 1)
        until(lambda: bool(observer.ends))
        engine.go()
        with server.client() as client:
            post(client, "here")
    (gone, error), here = observer.ends
    assert (gone, here) == ("gone", ("here", None))
    assert error is not None
    assert engine.aborted == [engine.requests[0].id]


def test_an_observer_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    first, middle, last = Observer("aaa", RuntimeError("first")), Observer("mmm"), Observer("zzz", RuntimeError("last"))
    with make_client(first, last, Echo(), middle) as client:
        post(client, "ab")
    assert first.ends == middle.ends == last.ends == [("ab", None)]
    for name, text in (("aaa", "first"), ("zzz", "last")):
        assert f"request_finished of plugin '{name}' raised" in caplog.text
        assert f"RuntimeError: {text}" in caplog.text


class Wrapped:
    """Writes down when the engine is called, and on which thread; one of the name `idle` leaves the call as it is."""

    def __init__(self, name: str, journal: list[str]) -> None:
        self.__name__ = name
        self.journal = journal
        self.threads: set[int] = set()

    @hookimpl
    def jackfield_wrap_submit(self, endpoint: Endpoint[Any, Any], submit: Submit) -> Submit | None:
        if self.__name__ == "idle":
            return None

        async def traced(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            self.threads.add(threading.get_ident())
            self.journal.append(f"{self.__name__} before {len(ctx.prompts)} {len(request.token_ids)}")
            outputs = await submit(ctx, request)
            self.journal.append(f"{self.__name__} after")
            return outputs

        return traced


class Cache:
    """Answers what it has seen without the engine."""

    @hookimpl
    def jackfield_wrap_submit(self, submit: Submit) -> Submit:
        answers: dict[tuple[bytes, ...], PoolingOutputs] = {}

        async def cached(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            key = tuple(request.token_ids)
            if key not in answers:
                answers[key] = await submit(ctx, request)
            return answers[key]

        return cached


def test_engine_calls_are_wrapped_in_the_order_of_names() -> None:
    journal: list[str] = []
    with make_client(Wrapped("beta", journal), Echo(), Wrapped("idle", journal), Wrapped("alpha", journal)) as client:
        post(client, "ab")
    assert journal == ["alpha before 1 1", "beta before 1 1", "beta after", "alpha after"]


def test_a_cache_answers_without_the_engine() -> None:
    """A plugin named before it sees each request, one named after it only what the cache has not."""
    before: list[str] = []
    after: list[str] = []
    engine = FakeEngine()
    with make_client(Echo(), Wrapped("Before", before), Cache(), Wrapped("Deep", after), engine=engine) as client:
        first, second = post(client, "ab"), post(client, "ab")
        assert first == second
        assert len(engine.requests) == 1
        assert post(client, "cd") != first
    assert len(engine.requests) == 2
    assert (len(before), len(after)) == (2 * 3, 2 * 2)


class Wrong:
    def __init__(self, hook: str) -> None:
        setattr(self, hook, hookimpl(lambda: 5))


@pytest.mark.parametrize("hook", ["jackfield_wrap_submit", "jackfield_wrap_stream"])
def test_a_wrap_that_is_not_callable(hook: str) -> None:
    with pytest.raises(PluginError, match=f"plugin 'Wrong': {hook} returned int; an async callable"), make_client(Echo(), Wrong(hook)):
        pass


LATE = {"fault": InternalError("the engine broke"), "bug": ValueError("secret detail")}


class Shout:
    """Marks each delta. After the first it raises, or never goes on, for some texts."""

    def __init__(self, name: str = "Shout") -> None:
        self.__name__ = name
        self.closed: list[str] = []

    @hookimpl
    def jackfield_wrap_stream(self, endpoint: Endpoint[Any, Any], stream: Stream) -> Stream:
        async def shouted(ctx: Context[Any], request: EngineRequest) -> AsyncIterator[Delta]:
            try:
                async for delta in stream(ctx, request):
                    yield structs.replace(delta, text=f"{self.__name__}({delta.text})")
                    if ctx.request.text in LATE:
                        raise LATE[ctx.request.text]
                    if ctx.request.text == "stall":
                        await asyncio.Event().wait()
            finally:
                self.closed.append(ctx.request.text)

        return shouted


def test_a_stream_is_framed_as_server_sent_events() -> None:
    observer = Observer()
    with make_client(Talk(), observer) as client:
        answer = client.post("/talk", json={"text": "ab", "stream": True}, headers={"x-request-id": "given"})
    assert answer.headers["x-request-id"] == "given"
    assert answer.content == b'data: {"text":"<s>"}\n\ndata: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: [DONE]\n\n'
    assert observer.ends == [("ab", None)]


def test_streams_are_wrapped_in_the_order_of_names() -> None:
    with make_client(Shout("b"), Talk(), Shout("a")) as client:
        assert events(client, "a") == [{"text": "a(b(<s>))"}, {"text": "a(b(a))"}]


@pytest.mark.parametrize(
    ("raises", "status", "message"),
    [
        ({"preprocess": BadRequest("not this")}, 400, "not this"),
        ({"sampling_params": ValueError("secret")}, 500, "Internal server error"),
        ({"build_chunk": BadRequest("no chunk")}, 400, "no chunk"),
        ({}, 500, "five is too many"),
    ],
    ids=["stage", "bug", "first chunk", "engine"],
)
def test_an_error_before_the_first_chunk_is_an_ordinary_answer(raises: dict[str, Exception], status: int, message: str) -> None:
    observer = Observer()
    with make_client(Talk(raises), observer, engine=FakeEngine(fault=fault)) as client:
        text = "bad" if raises else "fives"
        answer = client.post("/talk", json={"text": text, "stream": True})
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("application/json")
    assert message in answer.json()["error"]["message"]
    ((_, error),) = observer.ends
    assert error is not None


@pytest.mark.parametrize(("text", "message"), [("fault", "the engine broke"), ("bug", "Internal server error; the log has the details.")])
def test_an_error_after_the_first_chunk_is_an_event(caplog: pytest.LogCaptureFixture, text: str, message: str) -> None:
    observer = Observer()
    with make_client(Talk(), Shout(), observer) as client:
        first, failed = events(client, text)
        assert first == {"text": "Shout(<s>)"}
        assert failed == {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
        assert ("ValueError: secret detail" if text == "bug" else message) in caplog.text
        assert events(client, "a") == [{"text": "Shout(<s>)"}, {"text": "Shout(a)"}]
    assert observer.ends == [(text, LATE[text]), ("a", None)]


def test_a_client_that_leaves_a_stream_closes_it() -> None:
    observer, shout = Observer(), Shout()
    with make_server(Talk(), observer, shout) as server:
        with leaving(server, "/talk", {"text": "stall", "stream": True}) as connection:
            received = b""
            while b"Shout(<s>)" not in received:
                part = connection.recv(4096)
                assert part, received
                received += part
            assert observer.ends == []
        until(lambda: bool(observer.ends))
        with server.client() as client:
            events(client, "a")
    assert shout.closed == ["stall", "a"]
    (gone, error), here = observer.ends
    assert (gone, here) == ("stall", ("a", None))
    assert error is not None


@pytest.mark.parametrize("threaded", [False, True])
def test_threaded_stages_run_beside_the_event_loop(threaded: bool) -> None:
    echo, loop = Echo(), Wrapped("loop", [])
    with make_client(echo, loop, endpoints={"echo": {"threaded": threaded}}) as client:
        post(client, "ab")
    assert set(echo.threads) == {"preprocess", "pooling_params", "build_response"}
    assert len(loop.threads) == 1
    assert all((thread in loop.threads) is not threaded for thread in echo.threads.values())
