"""A real server on a real socket, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn

from jackfield.app import App
from jackfield.config import convert
from jackfield.endpoint import Endpoint, EndpointRegistry
from jackfield.hookspecs import hookimpl
from jackfield.http.protocol import HTTPProtocol
from jackfield.plugins import Plugins, load_plugins
from jackfield.settings import Settings
from jackfield.testing.engine import FakeEngine
from jackfield.tiny import write_tiny

__all__ = ["RunningServer", "make_client", "make_server", "write_model"]

log = logging.getLogger("jackfield.testing")

START_TIMEOUT_S = 60.0


class RunningServer:
    """A server that answers: its application, its engine (None if the models are real) and its address."""

    def __init__(self, app: App, engine: FakeEngine | None, url: str) -> None:
        self.app = app
        self.engine = engine
        self.url = url

    def client(self, **options: Any) -> httpx.Client:
        """A client whose paths are relative to the server."""
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextmanager
def make_client(*plugins: object, **options: Any) -> Iterator[httpx.Client]:
    """A client of `make_server`, whose arguments it takes."""
    with make_server(*plugins, **options) as server, server.client() as client:
        yield client


@contextmanager
def make_server(
    *plugins: object,
    engine: FakeEngine | None = None,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    endpoints: Mapping[str, Mapping[str, Any]] | None = None,
    server: Mapping[str, Any] | None = None,
    real: bool = False,
) -> Iterator[RunningServer]:
    """Serve endpoints and plugins.

    plugins: Endpoint objects, and any other plugin objects or modules. engine: a FakeEngine, by default a new one. models: [models]
    tables; by default one, `fake`, with a tokenizer of single bytes. endpoints: [endpoints] tables by name. server: [server] keys.
    real: load the models with the torch engine, in this process.

    Raises: StartupError, as `jackfield serve` would.
    """
    with tempfile.TemporaryDirectory() as folder:
        fake = None if real else (engine or FakeEngine())
        tables: dict[str, Any] = {
            "server": dict(server or {}),
            "models": {
                name: dict(table) for name, table in ({"fake": {"source": write_model(Path(folder))}} if models is None else models).items()
            },
            "engine": {"mode": "thread", "threads": 1},
            "endpoints": {name: dict(table) for name, table in (endpoints or {}).items()},
        }
        settings = convert(tables, Settings, where="the test")
        loaded = _plugins(plugins, settings)
        if fake is not None:
            loaded.manager.register(fake, name="fake-engine")
        app = App(settings, plugins=loaded)
        with _serving(app) as url:
            yield RunningServer(app, fake, url)


class _Given:
    """A plugin that a test hands over, in the place of an installed one, so that it passes the same checks."""

    dist = SimpleNamespace(name="the test's", version="0")

    def __init__(self, thing: object) -> None:
        self._thing = thing
        names = [thing.name] if isinstance(thing, Endpoint) else _registered(thing)
        self.name: str = next(filter(None, names), getattr(thing, "__name__", type(thing).__name__))
        self.table = "endpoints" if names else "plugins"

    def load(self) -> object:
        """The object itself, or a plugin that registers it."""
        return _Registers(self._thing) if isinstance(self._thing, Endpoint) else self._thing


class _Registers:
    def __init__(self, endpoint: Endpoint[Any, Any]) -> None:
        self._endpoint = endpoint

    @hookimpl
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        """The one endpoint."""
        registry.add(self._endpoint)


def _registered(thing: object) -> list[str]:
    """Names of the endpoints that a plugin's module registers; none if it fails, which the loader will tell better."""
    registry = EndpointRegistry()
    register = getattr(thing, "jackfield_register_endpoints", None)
    try:
        if register is not None and not inspect.isclass(thing) and not inspect.iscoroutinefunction(register):
            register(registry=registry)
    except Exception:
        log.debug("%r cannot register its endpoints", thing, exc_info=True)
    return [endpoint.name for endpoint in registry.endpoints]


def _plugins(objects: tuple[object, ...], settings: Settings) -> Plugins:
    given = [_Given(thing) for thing in objects]
    tables: dict[str, dict[str, Any]] = {"endpoints": dict(settings.endpoints), "plugins": dict(settings.plugins)}
    for plugin in given:
        tables[plugin.table].setdefault(plugin.name, {})
    return load_plugins(tables["endpoints"], tables["plugins"], installed=given)


@contextmanager
def _serving(app: App) -> Iterator[str]:
    config = uvicorn.Config(
        app.asgi,
        host="127.0.0.1",
        port=0,
        http=HTTPProtocol,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.serve())
        except BaseException as error:  # uvicorn ends by SystemExit when the lifespan fails; the test wants to see why
            failure.append(error)
        finally:
            server.settled.set()

    thread = threading.Thread(target=run, name="test-server", daemon=True)
    thread.start()
    server.settled.wait(START_TIMEOUT_S)
    if not server.started:
        if app.failure is not None:
            raise app.failure
        raise RuntimeError(f"the test server did not start within {START_TIMEOUT_S:.0f} s{f': {failure[0]!r}' if failure else ''}")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.end()
        thread.join(20)


class _Server(uvicorn.Server):
    """uvicorn, which ends when it is told: its own looks at the clock take 0.1 to 0.2 s, and a suite starts servers by the hundred.

    settled: it has started, or it will not.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """From another thread, after the start."""
        self.should_exit = True
        assert self._loop is not None
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._told.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.settled.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 864_000
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Without uvicorn's pause, if nobody is connected any more."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # connections that are closed say so in the next turn
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        else:
            await self.lifespan.shutdown()


def write_model(folder: Path) -> str:
    """Write a model folder without weights (`jackfield.tiny`), for endpoints that use a model's files and no engine; returns it."""
    write_tiny(folder, weights=False)
    return str(folder)
