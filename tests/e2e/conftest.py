"""Real servers: `jackfield serve` in a process of its own, on a free port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Served, served


@pytest.fixture(scope="session")
def embedder() -> Iterator[Served]:
    """A server of embeddings alone, which is there in seconds; that of the README's first command is in test_quickstart.py."""
    with served("config/embeddings.toml") as server:
        yield server
