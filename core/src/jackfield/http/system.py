"""The routes that every server has, whatever its plugins: health, readiness, models, version, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler, get
from litestar.response.base import ASGIResponse
from msgspec import Meta, Struct

from jackfield.client import EngineHealth
from jackfield.errors import EngineUnavailable, ModelNotFound
from jackfield.http.metrics import Metrics

__all__ = ["SYSTEM_PATHS", "HealthStatus", "ModelEntry", "ModelList", "Version", "system_handlers"]

# (method, path) that no plugin may take.
SYSTEM_PATHS = (
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/docs/{asset}"),
)


class HealthStatus(Struct, frozen=True, kw_only=True):
    """`ok`, and for each engine how it is."""

    status: str
    engines: dict[str, str]


class Version(Struct, frozen=True, kw_only=True):
    """The version of the core."""

    version: str


class ModelEntry(Struct, frozen=True, kw_only=True):
    """A model, OpenAI's fields first."""

    id: str
    object: str = "model"
    created: Annotated[int, Meta(description="When this server loaded it, Unix seconds.")] = 0
    owned_by: str = "jackfield"
    root: Annotated[str, Meta(description="Its source as configured.")] = ""
    parent: str | None = None
    max_model_len: Annotated[int, Meta(description="Tokens of a prompt at most.")] = 0
    aliases: Annotated[list[str], Meta(description="Other names that requests may use.")] = []
    endpoints: Annotated[list[str], Meta(description="Endpoints that serve it.")] = []
    operations: Annotated[list[str], Meta(description="What its files allow.")] = []
    embedding_size: Annotated[int | None, Meta(description="Numbers of a vector.")] = None
    execution: Annotated[str | None, Meta(description="How batches run: packed, buckets or other; null until it is loaded.")] = None
    dtype: Annotated[str | None, Meta(description="Null until it is loaded.")] = None
    device: Annotated[str | None, Meta(description="Null until it is loaded.")] = None


class ModelList(Struct, frozen=True, kw_only=True):
    """All models of this server."""

    data: list[ModelEntry]
    object: str = "list"


def system_handlers(
    *,
    version: str,
    models: Callable[[], list[ModelEntry]],
    engines: Callable[[], Mapping[str, EngineHealth]],
    is_ready: Callable[[], str],
    metrics: Metrics | None,
) -> list[HTTPRouteHandler]:
    """The handlers. is_ready gives an empty text, or why not; engines and models are asked at each request."""
    handlers = [*_health_handlers(engines, is_ready), *_model_handlers(models)]

    @get("/version", include_in_schema=False)
    async def get_version() -> ASGIResponse:
        return _json(Version(version=version))

    handlers.append(get_version)
    if metrics is not None:

        @get("/metrics", include_in_schema=False)
        async def get_metrics() -> ASGIResponse:
            return ASGIResponse(body=metrics.text(), media_type="text/plain; version=0.0.4", status_code=200)

        handlers.append(get_metrics)
    return handlers


def _json(value: Any) -> ASGIResponse:
    return ASGIResponse(body=msgspec.json.encode(value), media_type="application/json", status_code=200)


def _health_handlers(engines: Callable[[], Mapping[str, EngineHealth]], is_ready: Callable[[], str]) -> list[HTTPRouteHandler]:
    @get("/health", include_in_schema=False)
    async def health() -> ASGIResponse:
        states = dict(engines())
        bad = {name: state for name, state in states.items() if state.state in ("dead", "stuck")}
        if bad:
            name, state = next(iter(bad.items()))
            raise EngineUnavailable(f"The engine {name} is {state.state}: {state.detail or 'no detail'}.")
        return _json(HealthStatus(status="ok", engines={name: state.state for name, state in states.items()}))

    @get("/ready", include_in_schema=False)
    async def ready() -> ASGIResponse:
        reason = is_ready()
        if reason:
            raise EngineUnavailable(f"Not ready: {reason}.")
        return _json(HealthStatus(status="ok", engines={name: state.state for name, state in engines().items()}))

    return [health, ready]


def _model_handlers(models: Callable[[], list[ModelEntry]]) -> list[HTTPRouteHandler]:
    @get("/v1/models", include_in_schema=False)
    async def list_models() -> ASGIResponse:
        return _json(ModelList(data=models()))

    @get("/v1/models/{model_id:path}", include_in_schema=False)
    async def get_model(request: Request[Any, Any, Any]) -> ASGIResponse:
        name = str(request.path_params["model_id"]).lstrip("/")
        known = models()
        for entry in known:
            if name == entry.id or name in entry.aliases:
                return _json(entry)
        raise ModelNotFound(model=name, known=[entry.id for entry in known])

    return [list_models, get_model]
