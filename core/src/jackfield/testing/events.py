"""Reads a stream of server-sent events as the core frames it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

__all__ = ["read_events"]

_DONE = b"data: [DONE]"


def read_events(answer: httpx.Response) -> Iterator[Any]:
    """The events of a stream, decoded, as they come; an error in its midst is one of them, `{"error": ...}`.

    answer: of `client.post(...)`, or within `client.stream(...)`, where an event is given before the next is there; an iterator that is
    dropped closes the connection. Read to its end it has been checked whole: each event is one line of `data: ` and JSON, and
    `data: [DONE]` comes last, once.

    Raises: AssertionError for what is no stream, is framed otherwise, or ends without its last line.
    """
    kind = answer.headers.get("content-type", "")
    if answer.status_code != 200 or not kind.startswith("text/event-stream"):
        raise AssertionError(f"no stream, but {answer.status_code} of {kind!r}: {answer.read()[:300]!r}")
    done = False
    rest = b""
    # Not by lines: they would also end at characters such as U+2028, which JSON has within a text.
    for part in answer.iter_bytes():
        *frames, rest = (rest + part).split(b"\n\n")
        for frame in frames:
            if done:
                raise AssertionError(f"something comes after [DONE]: {frame[:300]!r}")
            done = frame == _DONE
            if not done:
                yield _event(frame)
    if rest or not done:
        raise AssertionError(f"the stream ends without its last line, `data: [DONE]`; what is left of it: {rest[:300]!r}")


def _event(frame: bytes) -> Any:
    if not frame.startswith(b"data: ") or b"\n" in frame:
        raise AssertionError(f"no event of one line that begins with `data: `: {frame[:300]!r}")
    try:
        return msgspec.json.decode(frame.removeprefix(b"data: "))
    except msgspec.DecodeError as error:
        raise AssertionError(f"an event that is no JSON ({error}): {frame[:300]!r}") from None
