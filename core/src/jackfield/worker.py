"""Entry of the engine process: `python -m jackfield.worker FD`, its end of a socket pair as the only argument.

Lanes run the steps and send what they give, the first of them on the main thread; one thread reads the socket, one sends heartbeats. The
process ends when the other end of the socket does, so it never outlives the server.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from jackfield.engine.attention import calls_so_far
from jackfield.engine.core import Engine, Event
from jackfield.engine.lanes import Lanes
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
from jackfield.errors import ModelError, ServingError
from jackfield.logs import FloodGate
from jackfield.outputs import Delta

__all__ = ["main"]

log = logging.getLogger("jackfield.worker")

# Of one package; its lines end up in the server's log.
MAX_LOG_LINES_PER_S = 100

_decoder = msgspec.msgpack.Decoder(ToWorker)


class _Closed(Exception):
    """The server's end of the socket is gone."""


class Worker:
    """The engine at its end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._frames = Frames()

    def run(self) -> int:
        """Load, then serve until told to stop; returns the exit code."""
        start = self._wait_for_start()
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(FloodGate(MAX_LOG_LINES_PER_S))
        logging.basicConfig(level=start.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
        engine = Engine(start.settings, backend=start.backend)
        try:
            cards = engine.load(start.specs, lambda progress: self._send(Loading(progress)))
        except ModelError as error:
            self._send(LoadFailed(str(error)))
            return 2
        gc.freeze()  # what the start has made is never garbage: the collector need not look at it in the middle of a step
        lanes = Lanes(engine, self._deliver)
        self._send(Loaded(cards))
        threading.Thread(target=self._receive, args=(lanes,), daemon=True).start()
        threading.Thread(target=self._beat, args=(engine, start.settings.heartbeat_s), daemon=True).start()
        lanes.run()
        return 0

    def _wait_for_start(self) -> Start:
        while True:
            for message in self._read():
                if isinstance(message, Start):
                    return message

    def _receive(self, lanes: Lanes) -> None:
        """Take what arrives until told to stop."""
        try:
            while True:
                for message in self._read():
                    if isinstance(message, Submit):
                        lanes.submit(message.request)
                    elif isinstance(message, Abort):
                        lanes.abort(message.id)
                    elif isinstance(message, EndChoice):
                        lanes.end_choice(message.id, message.index)
                    elif isinstance(message, Stop):
                        lanes.stop()
                        return
        except (_Closed, OSError):
            os._exit(1)  # the server is gone, and the lanes may be deep in a step

    def _deliver(self, events: list[Event]) -> None:
        self._send(*_messages(events))

    def _read(self) -> list[ToWorker]:
        data = self._socket.recv(1 << 20)
        if not data:
            raise _Closed
        return [_decoder.decode(body) for body in self._frames.feed(data)]

    def _send(self, *messages: FromWorker) -> None:
        data = b"".join([frame(message) for message in messages])
        with self._lock:
            self._socket.sendall(data)

    def _beat(self, engine: Engine, seconds: float) -> None:
        try:
            while True:
                stats = engine.stats()
                self._send(Beat(stats, stats.num_steps + calls_so_far()))  # only packed models count calls
                threading.Event().wait(seconds)
        except OSError:
            os._exit(1)  # the server is gone


def _messages(events: list[Event]) -> list[FromWorker]:
    """The pieces of all generated texts as one message, before what ends others."""
    pieces: list[tuple[int, Delta]] = []
    messages: list[FromWorker] = []
    for request_id, outcome in events:
        if isinstance(outcome, Delta):
            pieces.append((request_id, outcome))
        elif isinstance(outcome, ServingError):
            messages.append(Failed.of(request_id, outcome))
        else:
            messages.append(Done.of(request_id, outcome))
    return [Deltas(pieces), *messages] if pieces else messages


def main() -> int:
    """Run on the socket whose descriptor is the first argument."""
    # The terminal's Ctrl-C goes to the whole group; when to end is the server's decision, told through the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    except (_Closed, ConnectionError, BrokenPipeError):
        return 1


if __name__ == "__main__":
    sys.exit(main())
