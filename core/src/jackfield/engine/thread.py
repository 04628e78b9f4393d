"""The engine in threads of this process, for scripts and tests: no isolation, no restart, and a third slower than its own process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable

from jackfield.client import EngineHealth, EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.engine.core import Engine, Event
from jackfield.engine.lanes import Lanes
from jackfield.errors import EngineUnavailable, NotSupported, ServingError
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
        self._waiting: dict[int, asyncio.Future[PoolingOutputs]] = {}
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
        self._fail_all("The engine was stopped.")

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """Queue a request and wait for its one event; cancelling the wait aborts it."""
        if self.health().state != "ready" or self._lanes is None:
            raise EngineUnavailable("The engine is stopped.")
        future: asyncio.Future[PoolingOutputs] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._lanes.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(request.id, None)
            self._lanes.abort(request.id)
            raise

    def stream(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """The torch engine does not generate yet."""
        raise NotSupported("This engine does not generate text.")

    def end_choice(self, request_id: int, index: int) -> None:
        """Nothing to end."""

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
            self._loop.call_soon_threadsafe(self._fail_all, "The engine has failed.")

    def _deliver(self, events: list[Event]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._settle, events)

    def _settle(self, events: list[Event]) -> None:
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
