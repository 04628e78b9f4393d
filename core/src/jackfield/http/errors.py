"""The one place where an exception becomes an answer."""

from __future__ import annotations

import logging
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException

from jackfield.encoding import encode_error
from jackfield.errors import BodyTooLarge, MethodNotAllowed, NotFound, ServingError

__all__ = ["ErrorAnswer", "answer_for", "exception_handler"]

log = logging.getLogger("jackfield.http")

# status, body, headers
ErrorAnswer = tuple[int, bytes, dict[str, str]]

_PHRASES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
}


def answer_for(error: BaseException) -> ErrorAnswer:
    """Status, body and headers for any exception; what is outside the tree is a bug: 500, a generic text, and a traceback in the log."""
    if isinstance(error, ServingError):
        if error.status == 500:  # 503 and 504 are states, told by /health and the metrics; each probe would repeat them here
            log.error("%s: %s", type(error).__name__, error.message)
        body = encode_error(status=error.status, type=error.type, message=error.message, param=error.param)
        return error.status, body, error.headers
    log.error("an exception that is no jackfield error reached the HTTP layer", exc_info=error)
    return (
        500,
        encode_error(status=500, type="InternalServerError", message="Internal server error; the log has the details.", param=None),
        {},
    )


def exception_handler(max_body_bytes: int) -> Any:
    """Litestar's handler for everything: its own exceptions (unknown path, method, body size) are put into the tree first."""

    def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        status, body, headers = answer_for(_translated(request, error, max_body_bytes))
        return Response(body, status_code=status, media_type="application/json", headers=headers)

    return handle


def _translated(request: Request[Any, Any, Any], error: Exception, max_body_bytes: int) -> Exception:
    if not isinstance(error, HTTPException):
        return error
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return NotFound(f"There is no route for {where}.")
    if error.status_code == 405:
        allow = (error.headers or {}).get("allow", "")
        return MethodNotAllowed(
            f"{where}: the method is not allowed here{f', only {allow}' if allow else ''}.", headers={"allow": allow} if allow else {}
        )
    if error.status_code == 413:
        return BodyTooLarge(limit=max_body_bytes)
    if error.status_code < 500:
        return _Framework(error.status_code, str(error.detail))
    return error


class _Framework(ServingError):
    """A client error that only the framework raises (a bad Host header, say); its status is the framework's."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail or "Bad request.")
        self.status = status  # type: ignore[misc]
        self.type = _PHRASES.get(status, "BadRequestError")  # type: ignore[misc]
