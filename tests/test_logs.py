"""The gate in front of the log, on a real handler."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from jackfield.logs import MAX_SOURCES, FloodGate


class Log:
    """A handler with a gate at the root of all loggers, and what it has written."""

    def __init__(self, max_lines: int) -> None:
        self.gate = FloodGate(max_lines)
        self._text = io.StringIO()
        self.handler = logging.StreamHandler(self._text)
        self.handler.addFilter(self.gate)

    def lines(self, word: str) -> int:
        return self._text.getvalue().count(word)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log(max_lines=10)
    logging.getLogger().addHandler(made.handler)
    yield made
    logging.getLogger().removeHandler(made.handler)


def test_a_flood_is_cut_told_once_and_leaves_the_others_alone(log: Log) -> None:
    for _ in range(1000):
        logging.getLogger("loud.part").error("water")
    logging.getLogger("quiet").error("word")
    assert log.lines("word") == 1
    assert log.lines("loud writes more than 10 lines a second") == 1
    assert log.lines("water") == 1000 - log.gate.dropped["loud"]
    assert log.lines("water") % 10 == 0
    assert log.gate.dropped["quiet"] == 0


def test_the_access_log_is_whole(log: Log) -> None:
    access = logging.getLogger("jackfield.access")
    access.setLevel(logging.INFO)
    for _ in range(50):
        access.info("request")
    assert log.lines("request") == 50


def test_names_without_end_fill_no_memory(log: Log) -> None:
    for number in range(1000):
        for _ in range(11):
            logging.getLogger(f"made_up_{number}").error("water")
    assert len(log.gate.dropped) <= MAX_SOURCES + 1
    assert log.gate.dropped["other"] > 0
