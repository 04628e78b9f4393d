"""What every endpoint keeps, checked over a real socket with the fake engine, without knowing any endpoint.

    @pytest.mark.parametrize("case", contract_cases(), ids=str)
    def test_contract(case):
        case.run()

An endpoint takes part by giving its routes an `example`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from jackfield.endpoint import Endpoint, EndpointRegistry, Route
from jackfield.errors import InternalError
from jackfield.outputs import Vector, Vectors
from jackfield.plugins import installed_plugins, load_plugins
from jackfield.schema import ErrorBody
from jackfield.testing.engine import FakeEngine
from jackfield.testing.server import make_server

__all__ = ["ContractCase", "contract_cases"]


@dataclass
class Bench:
    """What a check works with: a client, the route's first path, and a body that is right."""

    client: httpx.Client
    endpoint: Endpoint[Any, Any]
    route: Route
    path: str
    engine: FakeEngine

    def send(self, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        """The example, or another body."""
        given = self.route.example if body is None else body
        if self.route.method == "GET":
            return self.client.get(self.path, params=given or {}, **options)
        return self.client.request(self.route.method, self.path, json=given, **options)


Check = Callable[[Bench], None]


@dataclass
class ContractCase:
    """One check of one route."""

    plugin: object
    endpoint: Endpoint[Any, Any]
    route: Route
    check: Check
    server: dict[str, Any] = field(default_factory=dict)
    engine: Callable[[], FakeEngine] = FakeEngine

    def __str__(self) -> str:
        return f"{self.endpoint.name}-{self.route.paths[0]}-{self.check.__name__.strip('_')}"

    def run(self) -> None:
        """Start a server, check, stop it. Raises: AssertionError."""
        engine = self.engine()
        engine.operations += tuple(name for name in _operations(self.endpoint, self.route) if name not in engine.operations)
        with make_server(self.plugin, engine=engine, server=self.server) as server, server.client() as client:
            self.check(Bench(client, self.endpoint, self.route, self.route.paths[0], engine))


def contract_cases(*plugins: object) -> list[ContractCase]:
    """The checks for these Endpoint objects and plugins, or for every endpoint that is installed."""
    pairs = [pair for plugin in plugins for pair in _endpoints(plugin)] if plugins else _installed()
    return [case for plugin, endpoint in pairs for route in endpoint.routes for case in _cases(plugin, endpoint, route)]


def _endpoints(plugin: Any) -> list[tuple[object, Endpoint[Any, Any]]]:
    """A plugin's endpoints, each with what a server is given to serve it."""
    if isinstance(plugin, Endpoint):
        return [(plugin, plugin)]
    registry = EndpointRegistry()
    plugin.jackfield_register_endpoints(registry=registry)
    return [(plugin, endpoint) for endpoint in registry.endpoints]


def _installed() -> list[tuple[object, Endpoint[Any, Any]]]:
    points = installed_plugins()
    loaded = load_plugins({}, {}, all_endpoints=True, installed=points)
    failed = [info for info in loaded.infos if info.state == "failed"]
    if failed:
        raise AssertionError(f"installed plugins that fail to load: {failed}")
    return [(loaded.manager.get_plugin(entry.plugin), entry.endpoint) for entry in loaded.endpoints.values()]


def _operations(endpoint: Endpoint[Any, Any], route: Route) -> tuple[str, ...]:
    return endpoint.operations if route.operations is None else route.operations


def _cases(plugin: object, endpoint: Endpoint[Any, Any], route: Route) -> Iterator[ContractCase]:
    def case(check: Check, **options: Any) -> ContractCase:
        return ContractCase(plugin, endpoint, route, check, **options)

    yield case(_example_answers)
    yield case(_unknown_model)
    yield case(_every_path_is_documented_and_measured)
    yield case(_key_is_needed, server={"api_keys": ["secret"]})
    if route.method != "GET":
        yield case(_malformed_bodies)
        yield case(_unknown_fields_are_ignored)
        yield case(_body_limit, server={"max_body_bytes": 2000})
    if _operations(endpoint, route):
        yield case(_overload, server={"max_queue_requests": 2})
        yield case(_deadline)
        yield case(_engine_fault, engine=lambda: FakeEngine(fault=lambda request: InternalError("a fault on demand")))
        yield case(_engine_death)


def _until(condition: Callable[[], bool]) -> None:
    """Wait for what must come. Raises: AssertionError after 10 s."""
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come within 10 s")


def _error(answer: httpx.Response, status: int) -> ErrorBody:
    """The answer's error, in the one shape."""
    assert answer.status_code == status, f"{answer.status_code} where {status} is right: {answer.text[:300]}"
    assert answer.headers["content-type"].startswith("application/json")
    body = msgspec.json.decode(answer.content, type=ErrorBody, strict=True)
    assert body.error.code == status
    assert body.error.message
    return body


def _example_answers(bench: Bench) -> None:
    assert bench.route.example is not None, "the route has no example"
    answer = bench.send()
    assert answer.status_code == 200, answer.text[:300]
    assert answer.headers["x-request-id"]
    content = msgspec.json.decode(answer.content)
    kind = bench.route.response
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        msgspec.convert(content, kind, dec_hook=_vectors)
    if isinstance(content, dict):
        if "id" in content:
            given = bench.send(headers={"x-request-id": "given-id"}).json()["id"]
            assert given == f"{bench.route.id_prefix or bench.endpoint.id_prefix}-given-id"
        if "model" in content:
            assert content["model"] == "fake"
        usage = content.get("usage")
        if usage:
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage.get("completion_tokens", 0)


def _vectors(kind: type, value: Any) -> Any:
    if kind in (Vector, Vectors):
        return kind(value)
    raise NotImplementedError


def _unknown_model(bench: Bench) -> None:
    body = _error(bench.send({**(bench.route.example or {}), "model": "no-such-model"}), 404)
    assert body.error.param == "model"
    assert "no-such-model" in body.error.message


def _malformed_bodies(bench: Bench) -> None:
    headers = {"content-type": "application/json"}
    for raw in (b"", b"{", b"null", b"[]", b'"x"', b"{bad}", b'{"a":NaN}', b"\xff\xfe", b"[" * 100_000):
        _error(bench.client.request(bench.route.method, bench.path, content=raw, headers=headers), 400)
    right = json.dumps(bench.route.example).encode()
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        _error(bench.client.request(bench.route.method, bench.path, content=right, headers={"content-type": kind}), 400)
    for wrong in ({"model": 5}, {"model": ["fake"]}, {"priority": "high"}, {"user": 1.5}):
        body = _error(bench.send({**(bench.route.example or {}), **wrong}), 400)
        assert body.error.param == next(iter(wrong))


def _unknown_fields_are_ignored(bench: Bench) -> None:
    assert bench.send({**(bench.route.example or {}), "no_such_field": {"a": [1]}, "user": None}).status_code == 200


def _body_limit(bench: Bench) -> None:
    _error(bench.send({**(bench.route.example or {}), "padding": "x" * 3000}), 413)


def _key_is_needed(bench: Bench) -> None:
    for path in bench.route.paths:
        method = bench.route.method
        _error(bench.client.request(method, path, json=bench.route.example), 401)
    _error(bench.send(headers={"authorization": "Bearer wrong"}), 401)
    assert bench.send(headers={"authorization": "bearer secret"}).status_code == 200


def _every_path_is_documented_and_measured(bench: Bench) -> None:
    document = bench.client.get("/openapi.json").json()
    bench.send()
    metrics = bench.client.get("/metrics").text
    for path in bench.route.paths:
        assert bench.route.method.lower() in document["paths"][path]
    assert f'path="{bench.path}",status="200"' in metrics


def _overload(bench: Bench) -> None:
    """With the engine held, two requests wait and the third is told when to come back; the two get their answers."""
    bench.engine.hold()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(bench.send) for _ in range(2)]
        _until(lambda: len(bench.engine.requests) == 2)
        refused = bench.send()
        bench.engine.go()
        _error(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in waiting] == [200, 200]
    assert bench.send().status_code == 200


def _deadline(bench: Bench) -> None:
    bench.engine.hold()
    _error(bench.send(headers={"x-request-timeout": "0.05"}), 504)
    assert bench.engine.aborted == [bench.engine.requests[0].id]
    bench.engine.go()
    _error(bench.send(headers={"x-request-timeout": "soon"}), 400)
    assert bench.send(headers={"x-request-timeout": "30"}).status_code == 200


def _engine_fault(bench: Bench) -> None:
    assert "a fault on demand" in _error(bench.send(), 500).error.message
    bench.engine.fault = None
    assert bench.send().status_code == 200


def _engine_death(bench: Bench) -> None:
    bench.engine.die()
    _error(bench.send(), 503)
    _error(bench.client.get("/health"), 503)
    _error(bench.client.get("/ready"), 503)
