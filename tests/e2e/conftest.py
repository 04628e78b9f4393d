"""Real servers: `jackfield serve` in a process of its own, on a free port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Served, served


@pytest.fixture(scope="session")
def quickstart() -> Iterator[Served]:
    """The server of the README's first command."""
    with served("config/quickstart.toml") as server:
        yield server
