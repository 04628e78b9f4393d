"""The server as processes: what they load, how they end."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.servers import Served


def test_only_the_engine_process_loads_torch(quickstart: Served) -> None:
    http = psutil.Process(quickstart.process.pid)
    engine = next(child for child in http.children() if "jackfield.worker" in child.cmdline())
    assert "libtorch" not in Path(f"/proc/{http.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{engine.pid}/maps").read_text()
