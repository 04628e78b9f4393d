"""The contract catches what it says: an endpoint that is right but for one thing fails one check, and the pytest plugin tells it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec import Struct

from jackfield import Context, Endpoint, PoolingParams, Prompt, Request, Route, TextPrompt
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
