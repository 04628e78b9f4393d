"""Starting `jackfield serve` as a user does, and ending it by its id."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT_S = 120


class Served:
    """A running `jackfield serve`: its URL, its process and what it wrote so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        assert self._ready.wait(START_TIMEOUT_S), self.log()
        assert self.url, self.log()

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)  # type: ignore[arg-type]

    def log(self) -> str:
        return "\n".join(self.lines)

    def wrote(self, text: str, timeout_s: float = 10) -> bool:
        """Whether it has written this, or does so soon: an answer may be here before the log's line is read."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in self.log()

    def end(self, timeout_s: float = 60) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = re.search(r"ready at (http://\S+)", line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()


@contextmanager
def served(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    wait: bool = True,
    python: str | Path = sys.executable,
    cwd: Path | None = None,
) -> Iterator[Served]:
    """Run `jackfield serve ARGUMENTS --port 0` until the block ends. python: whose installation of it. cwd: the folder to run it in."""
    process = subprocess.Popen(
        [str(python), "-m", "jackfield.cli", "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )
    server = Served(process)
    try:
        if wait:
            server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
