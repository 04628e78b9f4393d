"""Builds the ASGI application from bound routes: one Litestar, constructed once, inside the shell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from litestar import Litestar
from msgspec import Struct

from jackfield.client import EngineHealth
from jackfield.endpoint import mounted
from jackfield.errors import PluginError
from jackfield.http.docs import docs_handlers
from jackfield.http.errors import exception_handler
from jackfield.http.handlers import route_handlers
from jackfield.http.metrics import Metrics
from jackfield.http.openapi import build_openapi
from jackfield.http.shell import Shell
from jackfield.http.system import SYSTEM_PATHS, ModelEntry, system_handlers
from jackfield.pipeline import BoundRoute, Pipeline
from jackfield.settings import ServerSettings

__all__ = ["HttpParts", "build_http", "check_routes"]

_PARAMETER = re.compile(r"\{[^}]*\}")
_PREFIX = re.compile(r"(/[^/{}?#\s]+)+")


class HttpParts(Struct, frozen=True, kw_only=True):
    """What the HTTP side is built from; the callables are asked at each request."""

    settings: ServerSettings
    api_keys: list[str]
    version: str
    pipeline: Pipeline
    routes: list[BoundRoute]
    metrics: Metrics
    models: Callable[[], list[ModelEntry]]
    engines: Callable[[], Mapping[str, EngineHealth]]
    is_ready: Callable[[], str]
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]]


def build_http(parts: HttpParts) -> Shell:
    """The application. Raises: PluginError when two routes clash."""
    settings = parts.settings
    described = [(bound.endpoint.name, bound.settings.prefix, bound.route) for bound in parts.routes]
    check_routes((name, prefix, route.method, path) for name, prefix, route in described for path in route.paths)
    document = build_openapi(
        version=parts.version, routes=described, keyed=bool(parts.api_keys), root_path=settings.root_path, metrics=settings.metrics
    )
    handlers = [route_handlers(parts.pipeline, bound, bound.settings.prefix, settings.max_body_bytes) for bound in parts.routes]
    handlers += system_handlers(
        version=parts.version,
        models=parts.models,
        engines=parts.engines,
        is_ready=parts.is_ready,
        metrics=parts.metrics if settings.metrics else None,
    )
    if settings.docs:
        handlers += docs_handlers(document, root_path=settings.root_path)
    litestar = Litestar(
        route_handlers=handlers,
        exception_handlers={Exception: exception_handler(settings.max_body_bytes)},
        request_max_body_size=settings.max_body_bytes,
        lifespan=[parts.lifespan],
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
    return Shell(
        litestar,  # type: ignore[arg-type]
        api_keys=parts.api_keys,
        root_path=settings.root_path,
        metrics=parts.metrics,
        cors=settings.cors,
        log_requests=settings.access_log,
    )


def check_routes(routes: Iterable[tuple[str, str, str, str]]) -> None:
    """routes: endpoint, prefix, method, path. Raises: PluginError naming method, path and both owners of a clash."""
    owners: dict[tuple[str, str], str] = {}
    for endpoint, prefix, method, path in routes:
        if prefix and not _PREFIX.fullmatch(prefix):
            raise PluginError(f'[endpoints.{endpoint}] prefix = {prefix!r} must look like "/tei": begin with a slash, not end with one')
        place = mounted(prefix, path)
        key = (method, _template(place))
        owner = "the server itself" if _is_system(place) else owners.get(key)
        if owner is not None:
            raise PluginError(
                f"{method} {place} of endpoint {endpoint!r} is taken already, by {owner}. Mount one of them elsewhere: "
                f'prefix = "/..." in [endpoints.{endpoint}]'
            )
        owners[key] = f"endpoint {endpoint!r}"


def _is_system(path: str) -> bool:
    """Whether a path is one of the server's own, whatever the method, or lies below one that takes a name."""
    for _, own in SYSTEM_PATHS:
        fixed, parameter, _ = own.partition("{")
        if path == own or (parameter and path.startswith(fixed)):
            return True
    return False


def _template(path: str) -> str:
    """`/a/{x}` and `/a/{y}` are one route to the router."""
    return _PARAMETER.sub("{}", path)
