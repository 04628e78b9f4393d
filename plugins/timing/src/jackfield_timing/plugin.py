"""Wraps `build_response` of every endpoint: by then all else is done and timed."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Annotated, Any

from msgspec import Meta, Struct

from jackfield import Context, stageimpl

__all__ = ["TimingPlugin", "TimingSettings"]


class TimingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of [plugins.timing]."""

    header: Annotated[str, Meta(description="The name of the header.")] = "Server-Timing"


class TimingPlugin:
    """Adds the header. Durations are milliseconds, as https://www.w3.org/TR/server-timing/ has them."""

    settings = TimingSettings

    def __init__(self, settings: TimingSettings) -> None:
        self._header = settings.header

    @stageimpl(wrapper=True)
    def build_response(self, ctx: Context[Any]) -> Generator[None, Any, Any]:
        """After the endpoint's own stage."""
        started = time.monotonic()
        answer = yield
        now = time.monotonic()
        entries = {**ctx.timings_s, "build_response": now - started, "total": now - ctx.started}
        ctx.response_headers[self._header] = ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in entries.items())
        return answer
