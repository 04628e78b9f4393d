"""The OpenAPI document, made once from the bound routes: components by msgspec, so that nothing of `Meta` is lost on the way."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import msgspec

from jackfield.endpoint import Route, mounted
from jackfield.errors import PluginError
from jackfield.http.system import HealthStatus, ModelEntry, ModelList, Version
from jackfield.outputs import Vector, Vectors
from jackfield.schema import ErrorBody

__all__ = ["build_openapi"]

_REF = "#/components/schemas/{name}"
_STATUSES = {
    "400": "The request is at fault; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "No such model at this endpoint.",
    "413": "The body is over the server's limit.",
    "429": "The queue is full; Retry-After says when to come back.",
    "500": "A fault of the server.",
    "503": "The engine is loading, dead or stuck, or the server is shutting down.",
    "504": "The request's deadline passed.",
}
_ID_HEADER = {"name": "X-Request-Id", "in": "header", "schema": {"type": "string"}, "description": "Becomes part of the answer's id."}
_TIMEOUT_HEADER = {
    "name": "X-Request-Timeout",
    "in": "header",
    "schema": {"type": "number", "exclusiveMinimum": 0},
    "description": "Seconds that the answer may take; 504 when they have passed.",
}
_SYSTEM: tuple[tuple[str, str, str, Any], ...] = (
    ("/health", "health", "Whether the engines live.", HealthStatus),
    ("/ready", "ready", "Whether requests are served: models loaded, not shutting down.", HealthStatus),
    ("/version", "version", "The version of the server.", Version),
    ("/v1/models", "listModels", "All models, with what they can do.", ModelList),
    ("/v1/models/{model_id}", "getModel", "One model, by id or alias.", ModelEntry),
    ("/metrics", "metrics", "Metrics in Prometheus' text format.", None),
)


def build_openapi(*, version: str, routes: Iterable[tuple[str, str, Route]], keyed: bool, root_path: str, metrics: bool) -> bytes:
    """The document as JSON bytes.

    routes: endpoint name, path prefix, route. keyed: an API key is needed. root_path: a proxy's prefix. metrics: there is /metrics.

    Raises: PluginError for a type that has no schema.
    """
    described = list(routes)
    types = [kind for _, _, route in described for kind in (route.request, route.response, route.chunk) if kind is not None]
    types += [kind for *_, kind in _SYSTEM if kind is not None]
    for endpoint, _, route in described:
        _check_types(endpoint, route)
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF, schema_hook=_schema_hook)
    schema_of = dict(zip(map(id, [*types, ErrorBody]), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, prefix, route in described:
        for position, path in enumerate(route.paths):
            operation = _operation(endpoint, prefix, route, schema_of, position)
            paths.setdefault(mounted(prefix, path), {})[route.method.lower()] = operation
    for path, name, summary, kind in _SYSTEM if metrics else _SYSTEM[:-1]:
        paths.setdefault(path, {})["get"] = _system_operation(path, name, summary, schema_of[id(kind)] if kind is not None else None)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jackfield", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return msgspec.json.encode(document)


def _check_types(endpoint: str, route: Route) -> None:
    """Whether the route's types can be described, alone. Raises: PluginError."""
    for name, kind in (("request", route.request), ("response", route.response), ("chunk", route.chunk)):
        try:
            msgspec.json.schema_components([kind], schema_hook=_schema_hook)
        except (TypeError, NotImplementedError) as error:
            raise PluginError(f"endpoint {endpoint!r}: the {name} type of {route.paths[0]} cannot be described: {error}") from error


def _operation(endpoint: str, prefix: str, route: Route, schema_of: dict[int, Any], position: int) -> dict[str, Any]:
    first = route.paths[0].strip("/").replace("/", "_") or "root"
    operation: dict[str, Any] = {
        "operationId": f"{endpoint}_{first}" + (f"_{position + 1}" if position else ""),
        "tags": [endpoint],
        "summary": route.summary,
        "parameters": [_ID_HEADER, _TIMEOUT_HEADER],
        "responses": _errors("501") if route.refusal else {"200": _answer(route, schema_of), **_errors(*_STATUSES)},
    }
    description = route.refusal or route.description or (f"The same as `{mounted(prefix, route.paths[0])}`." if position else "")
    if description:
        operation["description"] = inspect.cleandoc(description)
    if route.method == "GET":
        operation["parameters"] += _query_parameters(route.request)
    else:
        media: dict[str, Any] = {"schema": schema_of[id(route.request)]}
        if route.example is not None:
            media["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {"application/json": media}}
    return operation


def _answer(route: Route, schema_of: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema_of[id(route.response)]}}
    if route.streams:
        content["text/event-stream"] = {"schema": schema_of[id(route.chunk)] if route.chunk is not None else {"type": "string"}}
    return {"description": "The answer.", "content": content}


def _errors(*codes: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name="ErrorBody")}
    content = {"application/json": {"schema": schema}}
    return {code: {"description": _STATUSES.get(code, "Known, and not served here."), "content": content} for code in codes}


def _query_parameters(kind: Any) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(kind)
    target: dict[str, Any] = schema
    if "$ref" in schema:
        target = schema["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
    required = set(target.get("required", ()))
    return [
        {"name": name, "in": "query", "required": name in required, "schema": value, "description": value.get("description", "")}
        for name, value in target.get("properties", {}).items()
    ]


def _system_operation(path: str, name: str, summary: str, schema: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}} if schema is not None else {"text/plain": {"schema": {"type": "string"}}}
    operation: dict[str, Any] = {
        "operationId": name,
        "tags": ["server"],
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    if "{" in path:
        operation["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
        operation["responses"]["404"] = _errors("404")["404"]
    if path in ("/health", "/ready"):
        operation["security"] = []
        operation["responses"]["503"] = _errors("503")["503"]
    return operation


def _schema_hook(kind: type) -> dict[str, Any]:
    row = {"oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "contentEncoding": "base64"}]}
    if kind is Vector:
        return row
    if kind is Vectors:
        return {"type": "array", "items": row}
    raise NotImplementedError(f"no schema for {kind}")
