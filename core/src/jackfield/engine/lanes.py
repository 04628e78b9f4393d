"""Threads that run the steps of one engine side by side.

On few cores two steps of half the threads each beat one step of all threads: threads of one step meet at the end of every product, and
when another process takes a core, all of them stand still. Figures: benchmarks/ledger.md, "Lanes".
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jackfield.client import EngineRequest
from jackfield.engine.core import Engine, Event

__all__ = ["Lanes"]


class Lanes:
    """Runs steps of an engine while there is work: lane 0 on the thread that calls `run`, each other lane on a thread of its own.

    deliver: given the events of each step, on the lane's thread.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._changed = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run steps until `stop`. Raises: whatever a step or `deliver` raised on any lane, once the others have ended."""
        threads = [threading.Thread(target=self._run, args=(lane,), name=f"lane {lane}") for lane in range(1, self._engine.lanes)]
        for thread in threads:
            thread.start()
        self._run(0)
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End each lane after its step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its event comes through `deliver`."""
        self._engine.submit(request)
        with self._changed:
            self._changed.notify_all()  # which lane it is for, each of them finds out

    def abort(self, request_id: int) -> None:
        """Forget a request: no event follows, unless it is on its way already."""
        self._engine.abort(request_id)

    def end_choice(self, request_id: int, index: int) -> None:
        """Forget a choice of a request that goes on."""
        self._engine.end_choice(request_id, index)

    def _run(self, lane: int) -> None:
        try:
            while self._wait(lane):
                events = self._engine.step(lane)
                with self._changed:
                    self._changed.notify_all()  # what waited for a step of all threads may go on
                if events:
                    self._deliver(events)
        except BaseException as error:
            self._failure = self._failure or error
            self.stop()

    def _wait(self, lane: int) -> bool:
        """Wait for work; False when it is time to end."""
        with self._changed:
            while not self._stopping and not self._engine.has_work(lane):
                self._changed.wait()
            return not self._stopping
