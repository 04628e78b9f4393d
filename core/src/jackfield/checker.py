"""Grammars of clients are tried in a process that may be ended: see `trial.py`. One at a time, each within a few seconds."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from jackfield.grammar import Job, checking
from jackfield.params import GRAMMAR_FUEL, Grammar

__all__ = ["GrammarChecker"]

# A schema of 500 KB takes 0.3 s on an idle core.
TIMEOUT_S = 5.0
MAX_KNOWN = 256
_PROGRAM = Path(__file__).with_name("trial.py")
_LINE_BYTES = 8 * 1024 * 1024


class GrammarChecker:
    """One a server. Its process starts with the first grammar, and again after one that had to be ended."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[bytes, tuple[bool, str]] = OrderedDict()

    async def check(self, grammar: Grammar) -> Grammar:
        """It with its source, if it can be honoured, else what is to hold instead.

        Raises: BadRequest naming its field, or that of a part, and what is wrong.
        """
        steps = checking(grammar)
        try:
            job = next(steps)
            while True:
                job = steps.send(await self._do(job))
        except StopIteration as end:
            checked: Grammar = end.value
            return checked

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _do(self, job: Job) -> tuple[bool, str]:
        """What came of a job, from the process or from before."""
        key = blake2b(msgspec.json.encode(job)).digest()
        known = self._known.get(key)
        if known is None:
            async with self._lock:
                known = self._known[key] = self._known.get(key) or await self._ask(job)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    async def _ask(self, job: Job) -> tuple[bool, str]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(_PROGRAM), str(GRAMMAR_FUEL)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE_BYTES,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(msgspec.json.encode(job) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except (TimeoutError, ConnectionError, asyncio.CancelledError) as error:
            await self.close()  # whoever comes next begins with a new one
            if isinstance(error, asyncio.CancelledError):
                raise
            line = b""
        if not line:
            await self.close()
            return False, f"it is too complex to be tried within {self._timeout_s:g} s, or at all."
        return msgspec.json.decode(line, type=tuple[bool, str])
