"""The class that a plugin author writes.

An endpoint names its routes, the engine operations it can work with and its settings, and describes, stage by stage, what a request
means. The core decodes, admits, tokenizes, validates, batches, awaits, encodes and reports.

    class EchoEndpoint(Endpoint[EchoRequest, EchoResponse]):
        name = "echo"
        id_prefix = "echo"
        operations = ("embed",)
        routes = (Route(method="POST", paths=("/my/echo",), request=EchoRequest, response=EchoResponse),)

        def preprocess(self, ctx): ...
        def pooling_params(self, ctx): ...
        def build_response(self, ctx): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from msgspec import Struct

from jackfield.context import Context
from jackfield.outputs import Delta
from jackfield.params import PoolingParams, SamplingParams
from jackfield.prompts import Prompt
from jackfield.settings import EndpointSettings

__all__ = ["STAGES", "Endpoint", "EndpointRegistry", "Route", "mounted"]

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

# In the order in which they run.
STAGES = ("preprocess", "pooling_params", "sampling_params", "build_response", "build_chunk", "request_finished")


class Route(Struct, frozen=True, kw_only=True):
    """A method and its paths, the first of them the one that documents show.

    request, response: msgspec types of the bodies (a GET's request comes from its query). id_prefix, operations: None takes the
    endpoint's; operations=() makes a route that never meets the engine. streams: the answer may be a stream of server-sent events when the
    request has a true `stream` field; chunk is then the type of one event. example: a body that works with any model of a fitting kind;
    documents show it, and the contract suite sends it. refusal: for a route that clients know and this endpoint does not serve: why, which
    is the whole answer, with 501. A path "/" is the endpoint's prefix itself.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    paths: tuple[str, ...]
    request: Any
    response: Any
    chunk: Any = None
    id_prefix: str | None = None
    operations: tuple[str, ...] | None = None
    streams: bool = False
    example: dict[str, Any] | None = None
    summary: str = ""
    description: str = ""
    refusal: str = ""


def mounted(prefix: str, path: str) -> str:
    """Where a route's path lies on the server. prefix: of the endpoint's table, or nothing."""
    return f"{prefix}{path}".rstrip("/") or "/"


class Endpoint(Generic[RequestT, ResponseT]):
    """Base of every endpoint. Stages are plain `def`: they describe, quickly, and the core does.

    A stage that needs what takes over a millisecond returns a description of it instead (a ChatPrompt rather than a rendered text), or its
    endpoint sets `threaded = true` in its table. What only some endpoints need has a default here and may be left out.
    """

    name: ClassVar[str] = ""
    id_prefix: ClassVar[str] = ""
    routes: ClassVar[tuple[Route, ...]] = ()
    operations: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[type[EndpointSettings]] = EndpointSettings

    def preprocess(self, ctx: Context[RequestT]) -> Sequence[Prompt]:
        """The request's prompts, in order; none where a route needs none."""
        raise NotImplementedError

    def pooling_params(self, ctx: Context[RequestT]) -> PoolingParams:
        """What to compute; needed by an endpoint with pooling operations."""
        raise NotImplementedError

    def sampling_params(self, ctx: Context[RequestT]) -> SamplingParams:
        """How to generate; needed by an endpoint with the operation `generate`."""
        raise NotImplementedError

    def build_response(self, ctx: Context[RequestT]) -> ResponseT:
        """The answer's body, from `ctx.prompts` and `ctx.outputs` or `ctx.choices`."""
        raise NotImplementedError

    def build_chunk(self, ctx: Context[RequestT], delta: Delta) -> Any:
        """The event of a stream for this delta, several as a list, or None for none. With the last delta `ctx.is_complete` is true."""
        raise NotImplementedError

    def request_finished(self, ctx: Context[RequestT], error: BaseException | None) -> None:
        """The request is over, well or not. An event: what it raises is logged and changes nothing."""


class EndpointRegistry:
    """Handed to `jackfield_register_endpoints`; collects what plugins add."""

    def __init__(self) -> None:
        self._endpoints: list[Endpoint[Any, Any]] = []

    def add(self, endpoint: Endpoint[Any, Any]) -> None:
        """Register an endpoint under its `name`.

        Raises: TypeError if it is not an Endpoint object (a class, say).
        """
        if not isinstance(endpoint, Endpoint):
            raise TypeError(f"registry.add() takes an Endpoint object, not {endpoint!r}")
        self._endpoints.append(endpoint)

    @property
    def endpoints(self) -> tuple[Endpoint[Any, Any], ...]:
        """In the order in which they were added."""
        return tuple(self._endpoints)
