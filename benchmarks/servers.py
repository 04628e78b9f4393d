"""A server of ours in a process of its own, for the time of a measurement, and what it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

__all__ = ["Server", "pss_bytes", "serving"]


@dataclass
class Server:
    """A running server: its URL, how long it took to be ready, and its processes."""

    url: str
    ready_s: float
    process: psutil.Process
    log: list[str] = field(default_factory=list)

    def processes(self) -> list[psutil.Process]:
        """The HTTP process and the engine's."""
        return [self.process, *self.process.children(recursive=True)]


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """Run `jackfield serve ARGUMENTS` on a free port."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "jackfield.cli", "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
    )
    lines: list[str] = []
    try:
        assert child.stderr is not None
        for line in child.stderr:
            lines.append(line)
            found = re.search(r"ready at (http://\S+)", line)
            if found:
                yield Server(found.group(1), time.monotonic() - started, psutil.Process(child.pid), lines)
                return
        raise RuntimeError(f"the server did not start: {''.join(lines)}")
    finally:
        child.terminate()
        child.wait(60)


def pss_bytes(processes: list[psutil.Process]) -> int:
    """Memory of processes, shared pages counted once."""
    return sum(process.memory_full_info().pss for process in processes)
