"""What a check of the contract works with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from jackfield.endpoint import Endpoint, Route, mounted
from jackfield.outputs import Vector, Vectors
from jackfield.schema import ErrorBody
from jackfield.testing.engine import FakeEngine
from jackfield.testing.probe import StageProbe

__all__ = ["Bench", "check_error", "operations_of", "paths_of", "read_vectors", "until"]


@dataclass
class Bench:
    """A client of a server with the endpoint, its route, where the route lies, the engine, and the plugin that watches the stages."""

    client: httpx.Client
    endpoint: Endpoint[Any, Any]
    route: Route
    paths: list[str]
    engine: FakeEngine
    probe: StageProbe

    @property
    def path(self) -> str:
        """The first of them."""
        return self.paths[0]

    @property
    def example(self) -> dict[str, Any]:
        """A body that is right."""
        assert self.route.example is not None or self.route.method == "GET", "the route has no example"
        return self.route.example or {}

    def send(self, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        """The example, or another body."""
        given = self.example if body is None else body
        if self.route.method == "GET":
            return self.client.get(self.path, params=given, **options)
        return self.client.request(self.route.method, self.path, json=given, **options)


def paths_of(endpoint: Endpoint[Any, Any], route: Route) -> list[str]:
    """Where a route lies if the endpoint's table says nothing of a prefix."""
    return [mounted(endpoint.settings().prefix, path) for path in route.paths]


def operations_of(endpoint: Endpoint[Any, Any], route: Route) -> tuple[str, ...]:
    """What a route asks of an engine; empty for nothing."""
    return endpoint.operations if route.operations is None else route.operations


def check_error(answer: httpx.Response, status: int) -> ErrorBody:
    """The answer's error, in the one shape."""
    assert answer.status_code == status, f"{answer.status_code} where {status} is right: {answer.text[:300]}"
    assert answer.headers["content-type"].startswith("application/json")
    body = msgspec.json.decode(answer.content, type=ErrorBody, strict=True)
    assert body.error.code == status
    assert body.error.message
    return body


def read_vectors(kind: type, value: Any) -> Any:
    """msgspec's hook for the vectors of an answer."""
    if kind in (Vector, Vectors):
        return kind(value)
    raise NotImplementedError


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come. Raises: AssertionError after 10 s."""
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come within 10 s")
