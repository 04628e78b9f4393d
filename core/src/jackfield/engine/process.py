"""The engine in a process of its own, seen from the HTTP process: torch-free.

A heartbeat tells a dead or stuck engine; what is in flight then fails with EngineUnavailable, and a new process is started, after a pause
that doubles, at most `max_restarts` times in a row.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import assert_never, cast

import msgspec

from jackfield.client import EngineHealth, EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.engine.messages import (
    Abort,
    Beat,
    Deltas,
    Done,
    EndChoice,
    Failed,
    Frames,
    FromWorker,
    Loaded,
    LoadFailed,
    Loading,
    Start,
    Stop,
    Submit,
    ToWorker,
    frame,
)
from jackfield.engine.waiting import Waiting
from jackfield.errors import EngineUnavailable, ModelError
from jackfield.outputs import Delta, PoolingOutputs
from jackfield.settings import EngineSettings

__all__ = ["EngineProcess"]

log = logging.getLogger("jackfield.engine")

_decoder = msgspec.msgpack.Decoder(FromWorker)
# A process that has served this long starts its count of restarts anew.
HEALTHY_AFTER_S = 60.0
FIRST_PAUSE_S = 0.5
STOP_TIMEOUT_S = 3.0


class EngineProcess:
    """An EngineClient over a worker process. backend: where the factory of another forward pass is; empty: torch."""

    reads_model_files = True

    def __init__(self, specs: list[ModelSpec], settings: EngineSettings, *, log_level: str = "info", backend: str = "") -> None:
        self._specs = specs
        self._settings = settings
        self._log_level = log_level
        self._backend = backend
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: _Pipe | None = None
        self._waiting = Waiting(self._abort)
        self._loaded: asyncio.Future[dict[str, ModelCard]] | None = None
        self._progress: Callable[[Progress], None] = lambda progress: None
        self._health = EngineHealth(state="stopped")
        self._stats = EngineStats()
        self._last_move = (0, 0.0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # In a row, which max_restarts bounds, and ever, which the metrics show.
        self._restarts = 0
        self._all_restarts = 0
        self._ready_since = 0.0

    async def start(self, progress: Callable[[Progress], None] | None = None) -> dict[str, ModelCard]:
        """Start the worker and wait until its models are loaded. Raises: ModelError."""
        if progress is not None:
            self._progress = progress
        self._stopping = False
        cards = await self._launch()
        self._task(self._watch())
        return cards

    async def stop(self) -> None:
        """Let the worker end after its step; kill it if it does not."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()
        was = self._health.state
        self._health = EngineHealth(state="stopped")
        self._waiting.fail_all("The engine was stopped.")
        if self._pipe is not None:
            # A worker that loads, or is stuck, does not read; there is nothing in it to finish either.
            self._pipe.send(Stop())
            try:
                await asyncio.to_thread(self._end_process, STOP_TIMEOUT_S if was == "ready" else 0.1)
            finally:
                if self._process is not None and self._process.poll() is None:
                    self._process.kill()
                self._pipe.close()

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """Send a request and wait for its one event; cancelling the wait aborts it."""
        self._check_ready()
        return await self._waiting.answer(request.id, partial(self._send_request, request))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Send a request and give its deltas as they come; closing aborts it."""
        self._check_ready()
        async with aclosing(self._waiting.pieces(request, partial(self._send_request, request))) as deltas:
            async for delta in deltas:
                yield delta

    def end_choice(self, request_id: int, index: int) -> None:
        """Let the engine drop the choice."""
        if self._pipe is not None:
            self._pipe.send(EndChoice(request_id, index))

    def health(self) -> EngineHealth:
        """Ready, loading, stuck, dead or stopped."""
        return self._health

    def stats(self) -> EngineStats:
        """As of the last heartbeat."""
        return self._stats

    def _check_ready(self) -> None:
        """Raises: EngineUnavailable."""
        if self._health.state != "ready" or self._pipe is None:
            raise EngineUnavailable(f"The engine is {self._health.state}{': ' if self._health.detail else ''}{self._health.detail}.")

    def _send_request(self, request: EngineRequest) -> None:
        if len(self._waiting) == 1:  # nothing was in the engine, which stood still rightly
            self._last_move = (self._last_move[0], time.monotonic())
        assert self._pipe is not None
        self._pipe.send(Submit(request))

    def _abort(self, request_id: int) -> None:
        if self._pipe is not None:
            self._pipe.send(Abort(request_id))

    # How the process lives.

    async def _launch(self) -> dict[str, ModelCard]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._loaded = loop.create_future()
        self._health = EngineHealth(state="loading", restarts=self._all_restarts)
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603  (a fork and exec of ourselves: 2 ms, once)
                [sys.executable, "-m", "jackfield.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._pipe = pipe = _Pipe(self._receive, self._closed)
        await loop.create_connection(lambda: pipe, sock=ours)
        pipe.send(Start(self._specs, self._settings, self._log_level, self._backend))
        cards = await self._loaded
        self._ready_since = time.monotonic()
        self._last_move = (0, self._ready_since)
        self._health = EngineHealth(state="ready", restarts=self._all_restarts)
        return cards

    def _receive(self, message: FromWorker) -> None:
        match message:
            case Done():
                self._waiting.settle(message.id, message.outputs())
            case Deltas():
                for request_id, delta in message.items:
                    self._waiting.settle(request_id, delta)
            case Failed():
                self._waiting.settle(message.id, message.error())
            case Beat():
                self._stats = message.stats
                if message.moved != self._last_move[0]:
                    self._last_move = (message.moved, time.monotonic())
            case Loading():
                self._progress(message.progress)
            case Loaded():
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(message.cards)
            case LoadFailed():
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_exception(ModelError(message.message))
            case _:
                assert_never(message)

    def _closed(self) -> None:
        """The socket has ended, and the process with it or soon."""
        if self._stopping:
            return
        code = self._end_process(1.0)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(ModelError(f"the engine process ended with exit code {code} while it loaded the models"))
            return
        log.error("the engine process ended with exit code %s; %d requests were in flight", code, len(self._waiting))
        self._health = EngineHealth(state="dead", detail=f"its process ended with exit code {code}", restarts=self._all_restarts)
        self._waiting.fail_all("The engine ended while this request was in it; it is being restarted.")
        self._task(self._restart())

    async def _restart(self) -> None:
        if time.monotonic() - self._ready_since > HEALTHY_AFTER_S:
            self._restarts = 0
        while self._restarts < self._settings.max_restarts:
            await asyncio.sleep(FIRST_PAUSE_S * 2**self._restarts)
            self._restarts += 1
            self._all_restarts += 1
            try:
                await self._launch()
            except ModelError as error:
                log.error("restart %d of the engine failed: %s", self._restarts, error)
                self._health = EngineHealth(state="dead", detail=str(error), restarts=self._all_restarts)
            else:
                log.warning("the engine is ready again after restart %d", self._restarts)
                return
        log.critical("the engine was restarted %d times in a row and is given up", self._restarts)
        self._health = EngineHealth(state="dead", detail=f"given up after {self._restarts} restarts", restarts=self._all_restarts)

    async def _watch(self) -> None:
        """Tell a stuck engine: work in it, and nothing moved for `stall_s`."""
        while True:
            await asyncio.sleep(min(self._settings.heartbeat_s, self._settings.stall_s / 4))
            quiet = time.monotonic() - self._last_move[1]
            if self._health.state == "ready" and self._waiting and quiet > self._settings.stall_s:
                log.error("the engine has work and has not moved for %.0f s; ending it", quiet)
                self._health = EngineHealth(state="stuck", detail=f"no progress for {quiet:.0f} s", restarts=self._all_restarts)
                self._waiting.fail_all("The engine is stuck; it is being restarted.")
                if self._process is not None:
                    self._process.kill()

    def _end_process(self, timeout_s: float) -> int | None:
        process = self._process
        if process is None:
            return None
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _task(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Pipe(asyncio.Protocol):
    """This end of the socket: frames out, decoded messages in."""

    def __init__(self, receive: Callable[[FromWorker], None], closed: Callable[[], None]) -> None:
        self._receive = receive
        self._closed = closed
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its base class

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._receive(_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed()

    def send(self, message: ToWorker) -> None:
        """Send a message, with all others of this turn of the loop; a lost connection swallows it: `closed` has failed what waits."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(frame(message))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(b"".join(out))

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()
