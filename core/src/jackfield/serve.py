"""Running the application: uvicorn with a drain, progress on the terminal, and an exit code that tells."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn
from rich.console import Console

from jackfield.app import App
from jackfield.client import Progress
from jackfield.errors import ConfigError
from jackfield.http.protocol import HTTPProtocol

__all__ = ["serve"]

log = logging.getLogger("jackfield")

# After a second signal: what answers and engines have left to end by themselves.
HURRIED_S = 0.5


def serve(app: App) -> int:
    """Serve until told to end; returns the exit code: 0 after a drain, 2 when the models cannot be loaded.

    Raises: ConfigError when the address cannot be bound.
    """
    settings = app.settings.server
    sock = _bind(settings.host, settings.port)
    console = Console(stderr=True)
    config = uvicorn.Config(
        app.asgi,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        http=HTTPProtocol,
        lifespan="on",
        proxy_headers=False,  # nothing here asks for the client's address
        access_log=False,
        log_config=None,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.drain_timeout_s,  # type: ignore[arg-type]  # it goes to asyncio.wait_for, which takes a float
        server_header=False,
        date_header=False,
    )
    server = _Server(config, app)
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    def progress(step: Progress) -> None:
        if step.model:
            say(f"{step.what}: {step.model} ({step.done + 1} of {step.total})")

    def ready() -> None:
        _keep_for_good()
        names = ", ".join(sorted(app.plugins.endpoints))
        say(f"jackfield is ready at [bold]{url}[/bold] after {time.monotonic() - started:.1f} s (endpoints: {names})")
        if settings.docs:
            say(f"documentation: {url}/docs")

    app.on_progress = progress
    app.on_ready = ready
    app.on_failure = server.give_up
    # No `with`: uvicorn closes the socket, and a second close is harmless but for its noise.
    server.run(sockets=[sock])
    if app.failure is not None:
        raise app.failure
    return 0


def _keep_for_good() -> None:
    """Spare the garbage collector what the start has made: 72,000 objects, 29 ms of silence whenever it looks at all of them."""
    gc.collect()
    gc.freeze()


class _Server(uvicorn.Server):
    """uvicorn, told to refuse new work before it closes its doors, and to end with 0 after SIGTERM."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app
        self._told = 0

    def give_up(self) -> None:
        """The models cannot be loaded."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end at once."""
        self._told += 1
        if self._told > 1:
            self.force_exit = True
            self.should_exit = True
            return
        log.info("%s: finishing %d requests", signal.Signals(sig).name, self._app.asgi.num_in_flight)
        self._app.asgi.draining = True
        delay = self._app.settings.server.drain_delay_s
        if delay:
            asyncio.get_running_loop().call_later(delay, setattr, self, "should_exit", True)
        else:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which after a second signal neither answers what runs nor ends the application."""
        await super().shutdown(sockets)
        if self.force_exit:
            tasks = list(self.server_state.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=HURRIED_S)
            self._app.stop_timeout_s = HURRIED_S
            await self.lifespan.shutdown()

    def capture_signals(self):  # type: ignore[no-untyped-def]
        """As uvicorn's, without raising the signal again afterwards: a drained server has ended well."""
        return _signals(self)


class _signals:  # noqa: N801  (a context manager, named as one)
    def __init__(self, server: _Server) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"[server] cannot listen on {host}:{port}: {error.strerror}. Choose another port: --port, or [server] port"
        ) from None
    sock.set_inheritable(False)
    return sock
