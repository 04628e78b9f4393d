"""The outermost ASGI layer: what holds for every request, whatever answers it, 404 and 405 included.

Request id, API key, draining, cross-origin headers, metrics and the access log. Pure ASGI, since a framework's middleware runs after its
routing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

from jackfield.errors import Draining, ServingError, Unauthorized
from jackfield.http.errors import answer_for
from jackfield.http.metrics import Metrics
from jackfield.settings import CorsSettings

__all__ = ["HEADERS_KEY", "REQUEST_ID_KEY", "ASGIApp", "Headers", "Shell"]

log = logging.getLogger("jackfield.http")
access_log = logging.getLogger("jackfield.access")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Where the scope holds the request's id, for the ids of answers, and its headers.
REQUEST_ID_KEY = "jackfield_request_id"
HEADERS_KEY = "jackfield_headers"
OPEN_PATHS = frozenset({"/health", "/ready"})
DOCS_PATH = "/docs"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_REQUEST_ID = 128
_ID_BYTES = re.compile(rb"[^A-Za-z0-9._:\-]")


class Shell:
    """Wraps the application.

    api_keys: none leaves every route open. draining: set by the server when it is told to end; new requests are then refused, and
    `/health` and `/ready` still answer.
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: list[str], root_path: str, metrics: Metrics, cors: CorsSettings, log_requests: bool
    ) -> None:
        self.app = app
        self.draining = False
        self.num_in_flight = 0
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._root_path = root_path.rstrip("/")
        self._metrics = metrics
        self._cors = Cors(cors) if cors.allow_origins else None
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        if self._root_path:
            self._strip_root(scope)
        fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        scope[HEADERS_KEY] = Headers(fields)
        request_id = _request_id(fields.get(b"x-request-id"))
        scope[REQUEST_ID_KEY] = request_id.decode()
        extra = [(b"x-request-id", request_id)]
        if self._cors is not None:
            extra += self._cors.headers(fields.get(b"origin"))
        status = 0

        async def send_with_extra(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        self.num_in_flight += 1
        try:
            if self._cors is not None and self._cors.is_preflight(scope, fields):
                await _answer(send_with_extra, 204, b"", self._cors.preflight_headers())
                return
            self._guard(scope["path"], fields.get(b"authorization"))
            # What GET answers HEAD answers too; the server leaves the body out.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(inner, receive, send_with_extra)
        except ServingError as error:
            await self._fail(send_with_extra, error, status)
        except Exception as error:
            await self._fail(send_with_extra, error, status)
        except asyncio.CancelledError:
            if not self.draining or status:
                raise
            await self._fail(send_with_extra, Draining(), status)  # the drain time is over
        finally:
            self.num_in_flight -= 1
            seconds = time.perf_counter() - started
            # The template, never the path: a label's values must be bounded.
            path = scope.get("path_template") or "unmatched"
            self._metrics.request(scope["method"] if scope["method"] in METHODS else "other", path, status, seconds)
            if self._log_requests:
                access_log.info("%s %s %d %.1f ms %s", scope["method"], scope["path"], status, seconds * 1e3, request_id.decode())

    def _strip_root(self, scope: Scope) -> None:
        """A proxy that passes its prefix on: routes are matched without it."""
        path: str = scope["path"]
        scope["root_path"] = ""  # else Litestar strips it once more, wherever it stands
        if path == self._root_path or path.startswith(f"{self._root_path}/"):
            scope["path"] = path[len(self._root_path) :] or "/"
            scope["raw_path"] = scope["raw_path"][len(self._root_path.encode()) :] or b"/"

    def _guard(self, path: str, authorization: bytes | None) -> None:
        if (path.rstrip("/") or "/") in OPEN_PATHS:
            return
        if self.draining:
            raise Draining
        if self._keys and not self._has_key(authorization):
            # A browser cannot send a bearer key with a page, but asks its user for a password.
            scheme = 'Basic realm="jackfield: any name, the API key as password"' if path.startswith(DOCS_PATH) else "Bearer"
            raise Unauthorized("A valid API key is needed: send it as `Authorization: Bearer KEY`.", headers={"www-authenticate": scheme})

    def _has_key(self, authorization: bytes | None) -> bool:
        """Digests of equal length are compared, all of them, so that time tells nothing about a key."""
        scheme, _, given = (authorization or b"").partition(b" ")
        if scheme.lower() == b"basic":
            given = _password(given)
        digest = hashlib.sha256(given).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return scheme.lower() in (b"bearer", b"basic") and any(matches)

    async def _fail(self, send: Send, error: Exception, status: int) -> None:
        if status:  # the answer has begun: nothing can be added, only the connection closed
            log.error("an error after the answer had begun", exc_info=error)
            raise error
        code, body, headers = answer_for(error)
        await _answer(send, code, body, [(name.encode(), value.encode()) for name, value in headers.items()])


class Headers(Mapping[str, str]):
    """A request's headers, by name in any case; of a repeated one the first. Decoded when asked for: few are."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower().encode("latin-1", "replace")].decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Cors:
    """Cross-origin headers from the configuration."""

    def __init__(self, settings: CorsSettings) -> None:
        self._any = "*" in settings.allow_origins
        self._origins = {origin.encode() for origin in settings.allow_origins}
        self._preflight = [
            (b"access-control-allow-methods", ", ".join(settings.allow_methods).encode()),
            (b"access-control-allow-headers", ", ".join(settings.allow_headers).encode()),
            (b"access-control-max-age", str(settings.max_age_s).encode()),
        ]

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """For an answer to a page of that origin. Where answers differ by origin, caches are told, whether this one is allowed or not."""
        exposed = (b"access-control-expose-headers", b"x-request-id, retry-after")
        if self._any:
            return [(b"access-control-allow-origin", b"*"), exposed] if origin is not None else []
        if origin not in self._origins:
            return [(b"vary", b"origin")]
        assert origin is not None
        return [(b"access-control-allow-origin", origin), exposed, (b"vary", b"origin")]

    def is_preflight(self, scope: Scope, fields: dict[bytes, bytes]) -> bool:
        """A browser's question before the request."""
        return scope["method"] == "OPTIONS" and b"origin" in fields and b"access-control-request-method" in fields

    def preflight_headers(self) -> list[tuple[bytes, bytes]]:
        """What is allowed."""
        return self._preflight


def _request_id(given: bytes | None) -> bytes:
    """The client's id, cleaned and cut (it is copied into answers and logs), else a random one."""
    cleaned = _ID_BYTES.sub(b"", given[: 4 * MAX_REQUEST_ID])[:MAX_REQUEST_ID] if given else b""
    return cleaned or os.urandom(8).hex().encode()


def _password(credentials: bytes) -> bytes:
    """Of HTTP's basic scheme (RFC 7617): `name:password` in base64; what is none gives no key at all."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    fixed = [(b"content-length", str(len(body)).encode())]
    if body:
        fixed.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
