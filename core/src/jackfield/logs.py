"""The log of a server and of its engine's process: a handler that lets no source drown the others."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

__all__ = ["FloodGate"]

log = logging.getLogger("jackfield.log")

# One line a minute for each source: what tells of a flood must be none.
QUIET_S = 60.0
# Whoever switches the access log on wants all of it.
UNBOUNDED = "jackfield.access"


# Sources that are told apart: whoever names a logger after each request is not to fill the memory.
MAX_SOURCES = 100
OTHERS = "other"


def own_source(record: logging.LogRecord) -> str:
    """Loggers of jackfield's own one by one, others by their package."""
    return record.name if record.name.startswith("jackfield.") else record.name.partition(".")[0]


class FloodGate(logging.Filter):
    """Leaves out, and counts, the lines of a source beyond `max_lines` in a second. Put on a handler, it sees every logger's records.

    source: tells whose a record is. hint: for the line that tells of a flood. dropped: lines left out by source, since the start.
    """

    def __init__(self, max_lines: int, *, source: Callable[[logging.LogRecord], str] = own_source, hint: str = "") -> None:
        super().__init__()
        self._hint = hint
        self.source = source
        self.dropped: Counter[str] = Counter()
        self._max_lines = max_lines
        self._second = 0
        self._lines: Counter[str] = Counter()
        self._told: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written. Threads may count a line too few or too many."""
        if record.name in (UNBOUNDED, log.name):
            return True
        second = int(time.monotonic())
        if second != self._second:
            self._second = second
            self._lines.clear()
        source = self.source(record)
        if source not in self._lines and (len(self._lines) >= MAX_SOURCES or len(self._told) >= MAX_SOURCES):
            source = OTHERS
        self._lines[source] += 1
        if self._lines[source] <= self._max_lines:
            return True
        self.dropped[source] += 1
        if time.monotonic() - self._told.get(source, -QUIET_S) >= QUIET_S:
            self._told[source] = time.monotonic()
            log.warning(
                "%s writes more than %d lines a second into the log: what is more is left out%s", source, self._max_lines, self._hint
            )
        return False
