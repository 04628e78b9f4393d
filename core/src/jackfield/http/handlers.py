"""From a bound route to a Litestar handler: read the body, run the pipeline, answer; a client that leaves aborts its work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar

from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from litestar.response.base import ASGIResponse

from jackfield.admission import Admission, Ticket
from jackfield.errors import BadRequest, BodyTooLarge, ClientGone, InvalidBody
from jackfield.http.errors import answer_for
from jackfield.http.shell import REQUEST_ID_KEY
from jackfield.pipeline import BoundRoute, Call, Pipeline

__all__ = ["TIMEOUT_HEADER", "route_handlers"]

T = TypeVar("T")

# Seconds that the answer may take, from the moment the request is read.
TIMEOUT_HEADER = "x-request-timeout"
# A watcher for the client's leaving is armed only after so long: earlier it costs more than it saves.
WATCH_AFTER_S = 0.05


def route_handlers(pipeline: Pipeline, bound: BoundRoute, prefix: str, max_body_bytes: int) -> HTTPRouteHandler:
    """The handler of one route at all of its paths."""
    read_query = bound.route.method == "GET"

    async def handler(request: Request[Any, Any, Any]) -> ASGIResponse:
        headers: Mapping[str, str] = request.headers
        timeout_s = _timeout(headers)
        own_id: str = request.scope.get(REQUEST_ID_KEY, "")  # type: ignore[assignment]
        ticket = pipeline.admit(0 if read_query else _body_length(headers, max_body_bytes))
        try:
            if read_query:
                decode = partial(bound.decoder.query, dict(request.query_params))
            else:
                decode = partial(bound.decoder.body, await _body(request, pipeline.admission, ticket))
            call = pipeline.begin(bound, ticket, decode, headers, timeout_s=timeout_s, request_id=own_id)
            streams = bound.route.streams and call.ctx.request.stream
        except BaseException:
            pipeline.leave(ticket)
            raise
        if streams:
            return await _stream(request, pipeline, call)
        body = await _unless_gone(request, pipeline.run(call))
        return ASGIResponse(body=body, status_code=200, media_type="application/json", headers=call.ctx.response_headers)

    return HTTPRouteHandler(
        [f"{prefix}{path}" for path in bound.route.paths],
        http_method=bound.route.method,
        status_code=200,
        media_type="application/json",
        include_in_schema=False,
    )(handler)


async def _body(request: Request[Any, Any, Any], admission: Admission, ticket: Ticket) -> bytes:
    """The whole body, counted as it arrives. Raises: ClientGone where Litestar would speak of a fault of the server; Overloaded."""
    parts: list[bytes] = []
    length = 0
    try:
        async for part in request.stream():
            parts.append(part)
            length += len(part)
            if length > ticket.num_bytes:
                admission.grow(ticket, length)
    except InternalServerException:
        raise ClientGone from None
    return b"".join(parts)


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


async def _stream(request: Request[Any, Any, Any], pipeline: Pipeline, call: Call) -> ASGIResponse:
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

    stream = Stream(body(), media_type="text/event-stream", headers=call.ctx.response_headers)
    return stream.to_asgi_response(app=None, request=request)
