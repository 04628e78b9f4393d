"""From a bound route to a Litestar handler: read the body, run the pipeline, answer; a client that leaves aborts its work."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar

from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send

from jackfield.admission import Admission, Ticket
from jackfield.endpoint import mounted
from jackfield.errors import BadRequest, BodyTooLarge, ClientGone, InvalidBody, NotSupported
from jackfield.http.errors import answer_for
from jackfield.http.shell import HEADERS_KEY, REQUEST_ID_KEY
from jackfield.pipeline import BoundRoute, Call, Pipeline

__all__ = ["TIMEOUT_HEADER", "route_handlers"]

T = TypeVar("T")

# Seconds that the answer may take, from the moment the request is read.
TIMEOUT_HEADER = "x-request-timeout"
# RFC 9110 5.6.2; a value may hold anything but control characters.
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# A watcher for the client's leaving is armed only after so long: earlier it costs more than it saves.
WATCH_AFTER_S = 0.05


def route_handlers(pipeline: Pipeline, bound: BoundRoute, prefix: str, max_body_bytes: int) -> HTTPRouteHandler:
    """The handler of one route at all of its paths."""
    read_query = bound.route.method == "GET"

    async def handler(request: Request[Any, Any, Any]) -> ASGIApp:
        if bound.route.refusal:
            raise NotSupported(bound.route.refusal)
        headers: Mapping[str, str] = request.scope[HEADERS_KEY]  # type: ignore[literal-required]
        own_id: str = request.scope[REQUEST_ID_KEY]  # type: ignore[literal-required]
        timeout_s = _timeout(headers)
        ticket = pipeline.admit(0 if read_query else _body_length(headers, max_body_bytes))
        try:
            if read_query:
                decode = partial(bound.decoder.query, dict(request.query_params))
            else:
                decode = partial(bound.decoder.body, await _body(request.receive, pipeline.admission, ticket, max_body_bytes))
            call = pipeline.begin(bound, ticket, decode, headers, timeout_s=timeout_s, request_id=own_id)
            streams = bound.route.streams and call.ctx.request.stream
        except BaseException:
            pipeline.leave(ticket)
            raise
        if streams:
            return await _stream(request, pipeline, call)
        body = await _unless_gone(request, pipeline.run(call))
        return _Answer(body, call.ctx.response_headers)

    return HTTPRouteHandler(
        [mounted(prefix, path) for path in bound.route.paths],
        http_method=bound.route.method,
        status_code=200,
        media_type="application/json",
        include_in_schema=False,
    )(handler)


class _Answer:
    """A whole answer. Litestar's own response spends 20 us on headers that are always the same."""

    __slots__ = ("_body", "_headers")

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        """headers: what stages have added."""
        self._body = body
        self._headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *_encoded(headers)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": False})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Raises: ValueError for what would end the header, and begin another or the body."""
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            raise ValueError(f"a stage has set the response header {name!r} to {value!r}, which is no HTTP header")
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


async def _body(receive: Receive, admission: Admission, ticket: Ticket, limit: int) -> bytes:
    """The whole body, counted as it arrives. Raises: ClientGone, BodyTooLarge, Overloaded."""
    parts: list[bytes] = []
    length = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        parts.append(message["body"])
        length += len(parts[-1])
        if length > limit:
            raise BodyTooLarge(limit=limit)
        if length > ticket.num_bytes:
            admission.grow(ticket, length)
        more = message["more_body"]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _body_length(headers: Mapping[str, str], limit: int) -> int:
    """What the head says of the body, 0 if it is sent in chunks. Raises: InvalidBody for one that cannot be read; BodyTooLarge."""
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidBody(f"The content encoding {encoding[:50]!r} is not served; send the body as it is.")
    given = headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise InvalidBody(
            f"The content type must be application/json, not {given[:100]!r}."
            if given
            else "The content type must be application/json; none was sent."
        )
    length = headers.get("content-length", "0")
    if int(length) > limit:  # the HTTP parser lets nothing but digits through
        raise BodyTooLarge(limit=limit)
    return int(length)


def _timeout(headers: Mapping[str, str]) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(f"The header {TIMEOUT_HEADER} takes seconds above 0, not {text[:50]!r}.")
    return seconds


async def _unless_gone(request: Request[Any, Any, Any], work: Awaitable[T]) -> T:
    """Await the work in this task; a client that leaves cancels it, and ClientGone says so."""
    task = asyncio.current_task()
    assert task is not None
    gone = False
    watcher: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    def arm() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(watch())

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, arm)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            task.uncancel()
            raise ClientGone from None
        raise
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()


async def _stream(request: Request[Any, Any, Any], pipeline: Pipeline, call: Call) -> ASGIApp:
    """Server-sent events. The first event is awaited here, so that an early fault is an ordinary error answer."""
    events = pipeline.stream(call)
    first = await _unless_gone(request, anext(events, None))

    async def body() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield b"data: " + first + b"\n\n"
            async for event in events:
                yield b"data: " + event + b"\n\n"
        except Exception as error:
            yield b"data: " + answer_for(error)[1] + b"\n\n"
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        yield b"data: [DONE]\n\n"

    headers = {name.decode(): value.decode("latin-1") for name, value in _encoded(call.ctx.response_headers)}
    stream = Stream(body(), media_type="text/event-stream", headers=headers)
    return stream.to_asgi_response(app=None, request=request)
