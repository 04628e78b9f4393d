"""The engine in threads of this process, for scripts and tests: no isolation, no restart, and a third slower than its own process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jackfield.client import EngineHealth, EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.engine.core import Engine, Event
from jackfield.engine.lanes import Lanes
from jackfield.engine.waiting import Waiting
from jackfield.errors import EngineUnavailable
from jackfield.outputs import Delta, PoolingOutputs
from jackfield.settings import EngineSettings

__all__ = ["EngineThread"]

log = logging.getLogger("jackfield.engine")

# Engines of one process load one after the other: while transformers makes a model, those that other threads make may get no weights.
_loading = threading.Lock()


class EngineThread:
    """An EngineClient whose engine runs here. backend: where the factory of another forward pass is; empty: torch."""

    reads_model_files = True

    def __init__(self, specs: list[ModelSpec], settings: EngineSettings, *, backend: str = "") -> None:
        self._specs = specs
        self._settings = settings
        self._backend = backend
        self._waiting = Waiting(self._abort)
        self._engine: Engine | None = None
        self._lanes: Lanes | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, progress: Callable[[Progress], None] | None = None) -> dict[str, ModelCard]:
        """Load the models, then begin to run steps. Raises: ModelError."""
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[dict[str, ModelCard]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loaded, progress or (lambda step: None)), name="engine", daemon=True)
        self._thread.start()
        return await loaded

    async def stop(self) -> None:
        """End after the steps in hand."""
        if self._lanes is not None and self._thread is not None:
            self._lanes.stop()
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._waiting.fail_all("The engine was stopped.")

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """Queue a request and wait for its one event; cancelling the wait aborts it."""
        lanes = self._ready()
        return await self._waiting.answer(request.id, lambda: lanes.submit(request))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Queue a request and give its deltas as they come; closing aborts it."""
        lanes = self._ready()
        if self._engine is not None and getattr(request.params, "grammar", None) is not None:
            await asyncio.to_thread(self._engine.compile, request)
        async with aclosing(self._waiting.pieces(request, lambda: lanes.submit(request))) as deltas:
            async for delta in deltas:
                yield delta

    def end_choice(self, request_id: int, index: int) -> None:
        """Let the engine drop the choice."""
        if self._lanes is not None:
            self._lanes.end_choice(request_id, index)

    def health(self) -> EngineHealth:
        """Ready while the thread lives."""
        alive = self._lanes is not None and self._thread is not None and self._thread.is_alive()
        return EngineHealth(state="ready" if alive else "stopped")

    def stats(self) -> EngineStats:
        """Now."""
        return self._engine.stats() if self._engine is not None else EngineStats()

    def _run(self, loaded: asyncio.Future[dict[str, ModelCard]], progress: Callable[[Progress], None]) -> None:
        assert self._loop is not None
        try:
            self._engine = Engine(self._settings, backend=self._backend)
            with _loading:
                cards = self._engine.load(self._specs, progress)
        except Exception as error:  # whoever waits for the start raises it
            self._loop.call_soon_threadsafe(loaded.set_exception, error)
            return
        self._lanes = Lanes(self._engine, self._deliver)
        self._loop.call_soon_threadsafe(loaded.set_result, cards)
        try:
            self._lanes.run()
        except Exception:
            log.critical("the engine has failed", exc_info=True)
            self._loop.call_soon_threadsafe(self._waiting.fail_all, "The engine has failed.")

    def _deliver(self, events: list[Event]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._settle, events)

    def _settle(self, events: list[Event]) -> None:
        for request_id, outcome in events:
            self._waiting.settle(request_id, outcome)

    def _abort(self, request_id: int) -> None:
        if self._lanes is not None:
            self._lanes.abort(request_id)

    def _ready(self) -> Lanes:
        """Raises: EngineUnavailable."""
        if self.health().state != "ready" or self._lanes is None:
            raise EngineUnavailable("The engine is stopped.")
        return self._lanes
