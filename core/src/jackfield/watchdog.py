"""Names whoever blocks the event loop: a stage by endpoint and name, anything else by where it stands.

Stages run on the loop's thread, so a slow one delays every request of the server. Each is timed when it ends; a thread of its own sees
those that do not end, and what is no stage (a wrapper around the engine call, a huge body being decoded).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["Watchdog"]

log = logging.getLogger("jackfield.watchdog")

# One line a minute for each culprit: a stage that is always slow must not flood the log.
QUIET_S = 60.0
NUM_FRAMES = 3


class Watchdog:
    """Watches the loop that `start` is called in.

    limit_s: what takes longer is told. blocked: called with endpoint and stage for each stage that did, for the metrics.
    """

    def __init__(self, limit_s: float, blocked: Callable[[str, str], None] = lambda endpoint, stage: None) -> None:
        self.limit_s = limit_s
        self._blocked = blocked
        # What runs on the loop now: endpoint, stage and since when.
        self._current: tuple[str, str, float] | None = None
        # Beginnings and ends of stages.
        self._moves = 0
        self._told: dict[tuple[str, str], float] = {}
        # Functions that are on the stack of an idle loop: its own, and those that run it.
        self._loop_code: set[CodeType] = set()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def run(self, endpoint: str, stage: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a stage on the loop's thread and time it."""
        started = time.monotonic()
        self._current = (endpoint, stage, started)
        self._moves += 1
        try:
            return function(*arguments)
        finally:
            self._current = None
            self._moves += 1
            seconds = time.monotonic() - started
            if seconds > self.limit_s:
                self._blocked(endpoint, stage)
                self._tell_stage(endpoint, stage, f"blocked the event loop for {seconds * 1e3:.0f} ms", "")

    def start(self) -> None:
        """Begin to watch the running loop."""
        loop = asyncio.get_running_loop()
        self._end.clear()
        loop.call_soon(self._learn, threading.get_ident())
        self._thread = threading.Thread(target=self._watch, args=(loop, threading.get_ident()), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread = None

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        ticked = threading.Event()
        while not self._end.wait(self.limit_s):
            ticked.clear()
            try:
                loop.call_soon_threadsafe(ticked.set)
            except RuntimeError:
                return  # the loop is closed
            before, moves = self._calls(thread_id), self._moves
            while not ticked.wait(self.limit_s) and not self._end.is_set():
                now = self._calls(thread_id)
                # One callback that has not returned, and no stage in it meanwhile: many short ones in the queue are nobody's fault.
                stay = [frame for frame in now if any(frame is other for other in before)] if moves == self._moves else []
                self._tell(now, stay)
                before, moves = now, self._moves

    def _learn(self, thread_id: int) -> None:
        """Called by the idle loop itself."""
        self._loop_code.update(frame.f_code for frame in _frames(thread_id))

    def _calls(self, thread_id: int) -> list[FrameType]:
        """What the loop has called, outermost first."""
        return [frame for frame in _frames(thread_id) if frame.f_code not in self._loop_code] if self._loop_code else []

    def _tell(self, calls: list[FrameType], stay: list[FrameType]) -> None:
        """calls: where the loop is; stay: those of them that have not returned for the limit's time."""
        current = self._current
        if current is not None:
            endpoint, stage, started = current
            seconds = time.monotonic() - started
            if seconds > self.limit_s:
                self._tell_stage(endpoint, stage, f"has been blocking the event loop for {seconds * 1e3:.0f} ms", f", at {_where(calls)}")
        elif stay and self._may_tell(("", _where(stay))):
            log.warning("the event loop has been blocked for %.0f ms, outside of every stage, at %s", self.limit_s * 1e3, _where(stay))

    def _tell_stage(self, endpoint: str, stage: str, what: str, where: str) -> None:
        if self._may_tell((endpoint, stage)):
            log.warning(
                "stage %s of endpoint %r %s (limit %.0f ms)%s; threaded = true in [endpoints.%s] moves its stages to a thread",
                stage,
                endpoint,
                what,
                self.limit_s * 1e3,
                where,
                endpoint,
            )

    def _may_tell(self, culprit: tuple[str, str]) -> bool:
        now = time.monotonic()
        if now - self._told.get(culprit, -QUIET_S) < QUIET_S:
            return False
        self._told[culprit] = now
        return True


def _frames(thread_id: int) -> list[FrameType]:
    """The calls that a thread is in, outermost first."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001  (documented, in spite of its name)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _where(frames: list[FrameType]) -> str:
    return " > ".join(f"{Path(f.f_code.co_filename).name}:{f.f_lineno} {f.f_code.co_name}" for f in frames[-NUM_FRAMES:])
