"""The engine in a thread of this process, for scripts and tests: no isolation, no restart, and a third slower than its own process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable

from jackfield.client import EngineHealth, EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.engine.core import Engine
from jackfield.errors import EngineUnavailable, NotSupported, ServingError
from jackfield.outputs import Delta, PoolingOutputs
from jackfield.settings import EngineSettings

__all__ = ["EngineThread"]

Work = Callable[[Engine], None]


class EngineThread:
    """An EngineClient whose engine runs in a thread."""

    def __init__(self, specs: list[ModelSpec], settings: EngineSettings) -> None:
        self._specs = specs
        self._settings = settings
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._waiting: dict[int, asyncio.Future[PoolingOutputs]] = {}
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, progress: Callable[[Progress], None] | None = None) -> dict[str, ModelCard]:
        """Load the models, then start the step loop. Raises: ModelError."""
        self._loop = asyncio.get_running_loop()
        engine = Engine(self._settings)
        cards = await asyncio.to_thread(engine.load, self._specs, progress or (lambda step: None))
        self._engine = engine
        self._thread = threading.Thread(target=self._run, args=(engine,), name="engine", daemon=True)
        self._thread.start()
        return cards

    async def stop(self) -> None:
        """End the loop after its step."""
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._fail_all("The engine was stopped.")

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """Queue a request and wait for its one event; cancelling the wait aborts it."""
        if self.health().state != "ready":
            raise EngineUnavailable("The engine is stopped.")
        future: asyncio.Future[PoolingOutputs] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._inbox.put(lambda engine: engine.submit(request))
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(request.id, None)
            self._inbox.put(lambda engine: engine.abort(request.id))
            raise

    def stream(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """The torch engine does not generate yet."""
        raise NotSupported("This engine does not generate text.")

    def health(self) -> EngineHealth:
        """Ready while the thread lives."""
        alive = self._thread is not None and self._thread.is_alive()
        return EngineHealth(state="ready" if alive else "stopped")

    def stats(self) -> EngineStats:
        """Now."""
        return self._engine.stats() if self._engine is not None else EngineStats()

    def _run(self, engine: Engine) -> None:
        assert self._loop is not None
        while True:
            try:
                work = self._inbox.get(block=not engine.has_work)
            except queue.Empty:
                events = engine.step()
                if events:
                    self._loop.call_soon_threadsafe(self._deliver, events)
                continue
            if work is None:
                return
            work(engine)

    def _deliver(self, events: list[tuple[int, PoolingOutputs | ServingError]]) -> None:
        for request_id, outcome in events:
            future = self._waiting.pop(request_id, None)
            if future is None or future.done():
                continue
            if isinstance(outcome, ServingError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail_all(self, message: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EngineUnavailable(message))
