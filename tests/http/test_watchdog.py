"""A stage that blocks the event loop is named, while it blocks and when it is over; a quick one and a threaded one are not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import Struct

from jackfield import (
    Context,
    Endpoint,
    EngineRequest,
    PoolingOutputs,
    PoolingParams,
    Request,
    Route,
    TextPrompt,
    hookimpl,
)
from jackfield.hookspecs import Submit
from jackfield.testing import RunningServer, make_server

LIMIT_MS = 60
BOUND_S = 20.0


class Answer(Struct):
    """Nothing but that it came."""

    size: int


class Slow(Endpoint[Request, Answer]):
    """One that takes its time in the stage that it is told."""

    name = "slow"
    id_prefix = "slow"
    operations = ("embed",)
    routes = (Route(method="POST", paths=("/slow",), request=Request, response=Answer),)

    def __init__(self, stage: str, seconds: float) -> None:
        self.stage = stage
        self.seconds = seconds
        self.hold = threading.Event()

    def _wait(self, stage: str) -> None:
        if stage == self.stage:
            self.hold.wait(self.seconds)

    def preprocess(self, ctx: Context[Request]) -> list[TextPrompt]:
        self._wait("preprocess")
        return [TextPrompt(text="a")]

    def pooling_params(self, ctx: Context[Request]) -> PoolingParams:
        self._wait("pooling_params")
        return PoolingParams()

    def build_response(self, ctx: Context[Request]) -> Answer:
        self._wait("build_response")
        return Answer(len(ctx.outputs.values["embed"][0]))


@contextmanager
def serving(*plugins: object, table: dict[str, Any] | None = None) -> Iterator[RunningServer]:
    with make_server(*plugins, server={"block_warning_ms": LIMIT_MS}, endpoints={"slow": table or {}}) as server:
        yield server


def blocked(server: RunningServer) -> list[str]:
    with server.client() as client:
        return [line for line in client.get("/metrics").text.splitlines() if line.startswith("jackfield_blocking_stages_total{")]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "jackfield.watchdog"]


@pytest.mark.parametrize("stage", ["preprocess", "pooling_params", "build_response"])
def test_a_stage_that_blocked_is_named_and_counted(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(Slow(stage, LIMIT_MS * 5 / 1000)) as server:
        with server.client() as client:
            for _ in range(2):
                assert client.post("/slow", json={}).status_code == 200
        assert blocked(server) == [f'jackfield_blocking_stages_total{{endpoint="slow",stage="{stage}"}} 2.0']
    lines = warnings(caplog)
    assert len(lines) == 1, "one line a minute for each stage"
    assert f"stage {stage} of endpoint 'slow'" in lines[0]
    assert "threaded = true in [endpoints.slow]" in lines[0]


def test_a_stage_that_never_ends_is_named_while_it_blocks(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Slow("preprocess", BOUND_S)
    with serving(endpoint) as server, server.client() as client:
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/slow", json={}).status_code))
        asking.start()
        until = time.monotonic() + BOUND_S
        while not warnings(caplog) and time.monotonic() < until:
            time.sleep(0.01)
        assert not answers
        endpoint.hold.set()
        asking.join(BOUND_S)
        assert answers == [200]
    assert "has been blocking the event loop" in warnings(caplog)[0]
    assert "_wait" in warnings(caplog)[0], "where it stands"


def test_a_threaded_endpoint_blocks_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Slow("preprocess", LIMIT_MS * 5 / 1000), table={"threaded": True}) as server:
        with server.client() as client:
            assert client.post("/slow", json={}).status_code == 200
        assert blocked(server) == []
    assert warnings(caplog) == []


class Blocker:
    """A plugin whose wrapper forgets that it runs on the loop."""

    @hookimpl
    def jackfield_wrap_submit(self, endpoint: Endpoint[Any, Any], submit: Submit) -> Submit:
        async def blocking_submit(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            time.sleep(LIMIT_MS * 10 / 1000)  # noqa: ASYNC251  (the fault that is to be seen)
            return await submit(ctx, request)

        return blocking_submit


def test_what_is_no_stage_is_shown_by_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serving(Slow("", 0), Blocker()) as server, server.client() as client:
        until = time.monotonic() + BOUND_S
        while not warnings(caplog) and time.monotonic() < until:
            assert client.post("/slow", json={}).status_code == 200
    assert "outside of every stage" in warnings(caplog)[0]
    assert "test_watchdog.py" in warnings(caplog)[0]
    assert "blocking_submit" in warnings(caplog)[0]
