"""Counts the requests of every endpoint by the client's key, and tells the counts under a route of its own.

[endpoints.counter]
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec import Struct

from jackfield import Context, Endpoint, EndpointRegistry, Request, Route, hookimpl, stageimpl

__all__ = ["CounterPlugin"]

PLUGIN_API = 1


class Counts(Struct, frozen=True, kw_only=True):
    """Requests and prompt tokens by endpoint, since the server started."""

    requests: dict[str, int]
    failed: dict[str, int]
    tokens: dict[str, int]


class CounterEndpoint(Endpoint[Request, Counts]):
    """`GET /counts`. It asks nothing of an engine, so it has no operation and no prompts."""

    name = "counter"
    id_prefix = "counter"
    routes = (Route(method="GET", paths=("/counts",), request=Request, response=Counts, summary="Requests so far."),)

    def __init__(self, plugin: CounterPlugin) -> None:
        self._plugin = plugin

    def build_response(self, ctx: Context[Request]) -> Counts:
        """The answer."""
        return self._plugin.counts()


class CounterPlugin:
    """One object: it brings the endpoint, and observes all endpoints."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def counts(self) -> Counts:
        """As of now."""
        return Counts(requests=dict(self._requests), failed=dict(self._failed), tokens=dict(self._tokens))

    @hookimpl
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        """Add the endpoint."""
        registry.add(CounterEndpoint(self))

    @stageimpl
    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> None:
        """After every request of every endpoint."""
        name = ctx.endpoint.name
        self._requests[name] += 1
        self._failed[name] += error is not None
        self._tokens[name] += ctx.num_prompt_tokens if error is None else 0
