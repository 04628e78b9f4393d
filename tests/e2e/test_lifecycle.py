"""How the server starts, fails, heals and ends, as processes and signals with the real model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.servers import Served, served

CONFIG = "config/embeddings.toml"
# Long enough that signals meet it in the engine: distinct, since equal prompts of a request are computed once.
HEAVY = {"input": [f"{number} " + "word " * 230 for number in range(200)], "encoding_format": "base64"}
LIGHT = {"input": "The cat sits outside"}

# Read by every Python process that starts with its folder on PYTHONPATH: connections leave no further than this machine.
GUARD = """
import ipaddress
import os
import pathlib
import socket

folder = pathlib.Path(os.environ["GUARD_FOLDER"])
(folder / f"loaded-{os.getpid()}").touch()


def check(host):
    name = host.decode() if isinstance(host, bytes) else host
    try:
        local = name in (None, "", "localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = False
    if not local:
        with (folder / "leaked").open("a") as file:
            file.write(f"{name}\\n")
        raise OSError(f"a network call to {name}")


def guarded(real):
    def connect(self, address):
        if isinstance(address, tuple):
            check(address[0])
        return real(self, address)

    return connect


def guarded_function(real, pick):
    def call(*args, **kwargs):
        check(pick(args[0]))
        return real(*args, **kwargs)

    return call


socket.socket.connect = guarded(socket.socket.connect)
socket.socket.connect_ex = guarded(socket.socket.connect_ex)
socket.create_connection = guarded_function(socket.create_connection, lambda address: address[0])
socket.getaddrinfo = guarded_function(socket.getaddrinfo, lambda host: host)
"""


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> float:
    """Wait for what must come, and how long it took. Raises: AssertionError with `what` after timeout_s."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - started


def engine_of(server: Served) -> psutil.Process:
    return next(child for child in psutil.Process(server.process.pid).children() if "jackfield.worker" in child.cmdline())


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def embed(server: Served, body: dict[str, Any]) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/embeddings", json=body)


def vector(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text[:300]
    return np.array(answer.json()["data"][0]["embedding"])


def in_engine(server: Served) -> int:
    """Prompt tokens that were charged and not yet answered."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return int(float(next(line for line in text.splitlines() if line.startswith('jackfield_queue{unit="tokens"}')).split()[-1]))


@contextmanager
def pending(server: Served, body: dict[str, Any], count: int = 1) -> Iterator[list[Future[httpx.Response]]]:
    """Requests that are in the engine when the block begins."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(embed, server, body) for _ in range(count)]
        until(lambda: in_engine(server) > 0, "a request in the engine", 30)
        yield futures


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Stopped inside the block."""
    process.suspend()
    try:
        yield
    finally:
        if process.is_running():
            process.resume()


def status(server: Served, path: str) -> int:
    """Of a new connection; 0 when it is refused or cut."""
    try:
        return httpx.get(f"{server.url}{path}", timeout=10).status_code
    except httpx.TransportError:
        return 0


def unavailable(answer: httpx.Response) -> str:
    """The message of a 503 in the one shape."""
    assert answer.status_code == 503, answer.text[:300]
    error = answer.json()["error"]
    assert error["code"] == 503
    assert error["type"] == "ServiceUnavailableError"
    assert int(answer.headers["retry-after"]) >= 1
    return str(error["message"])


def failed_start(*arguments: str, env: dict[str, str] | None = None) -> str:
    """What a server that cannot start says: exit code 2 and one paragraph."""
    with served(*arguments, env=env, wait=False) as server:
        server.process.wait(60)
        assert server.end() == 2, server.log()
        paragraphs = [text for text in server.log().split("\n\n") if text.strip()]
    assert len(paragraphs) == 1, server.log()
    assert paragraphs[0].startswith("jackfield cannot start"), server.log()
    assert "Traceback" not in paragraphs[0]
    return paragraphs[0]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_sigterm_lets_what_runs_finish_and_refuses_the_rest() -> None:
    with served(CONFIG, "--set", "server.drain_delay_s=2") as server, server.client() as client:
        expected = vector(client.post("/v1/embeddings", json=LIGHT))
        engine = engine_of(server)
        with frozen(engine), pending(server, LIGHT, 3) as futures:
            until(lambda: in_engine(server) == 3 * 6, "three requests in the engine")
            told = time.monotonic()
            server.process.terminate()
            until(lambda: client.get("/ready").status_code == 503, "not ready")
            assert "shutting down" in unavailable(client.post("/v1/embeddings", json=LIGHT))
            assert client.get("/health").status_code == 200
            until(lambda: status(server, "/health") == 0, "new connections are refused")
            assert server.process.poll() is None, "it did not wait for its requests"
            assert not any(future.done() for future in futures)
            engine.resume()
            for future in futures:
                np.testing.assert_allclose(vector(future.result(20)), expected, atol=1e-5)
        assert server.process.wait(20) == 0
        assert time.monotonic() - told < 30, "longer than drain_timeout_s"
        assert is_gone(engine)


def test_a_second_sigterm_ends_at_once() -> None:
    """With a request in an engine that cannot hear that it is over: nothing is waited for, and the engine is ended all the same."""
    with served(CONFIG) as server:
        engine = engine_of(server)
        with frozen(engine), pending(server, LIGHT) as futures:
            server.process.terminate()
            until(lambda: status(server, "/health") == 0, "new connections are refused")
            assert server.process.poll() is None, "it did not wait for its request"
            server.process.terminate()
            assert server.process.wait(3) == 0, server.log()
            until(lambda: is_gone(engine), "the engine process is gone", 1)
            assert "shutting down" in unavailable(futures[0].result(5))
        assert "Traceback" not in server.log()


def test_a_stuck_and_a_killed_engine_are_replaced() -> None:
    with served(CONFIG, "--set", "engine.stall_s=2", "--set", "engine.heartbeat_s=0.5") as server:
        expected = vector(embed(server, LIGHT))

        def replaced(old: psutil.Process) -> psutil.Process:
            """The healthy successor."""
            until(lambda: is_gone(old), "the old process is ended", 5)
            until(lambda: status(server, "/ready") == 200, "the engine is back", 60)
            assert status(server, "/health") == 200
            np.testing.assert_allclose(vector(embed(server, LIGHT)), expected, atol=1e-5)
            return engine_of(server)

        first = engine_of(server)
        with frozen(first), pending(server, LIGHT) as futures:
            assert until(lambda: status(server, "/health") == 503, "/health tells that it is stuck", 10) > 1
            assert "stuck" in unavailable(futures[0].result(5))
        second = replaced(first)
        with pending(server, HEAVY, 2) as futures:
            second.kill()
            until(lambda: status(server, "/health") == 503, "/health tells of the death", 5)
            for future in futures:
                assert "engine" in unavailable(future.result(5))
        third = replaced(second)
        assert len({first.pid, second.pid, third.pid}) == 3
        server.process.kill()
        until(lambda: is_gone(third), "an idle engine ends with its server", 5)


def test_ready_when_the_models_are_loaded_and_no_engine_outlives_its_server() -> None:
    port = free_port()
    with served(CONFIG, "--set", f"server.port={port}", wait=False) as server, ThreadPoolExecutor(1) as pool:
        server.url = f"http://127.0.0.1:{port}"
        until(lambda: status(server, "/health") == 200, "it listens while it loads", 60)
        assert "loading" in unavailable(httpx.get(f"{server.url}/ready"))
        assert "loading" in unavailable(embed(server, LIGHT))
        seen: set[int] = set()

        def ready() -> bool:
            seen.add(status(server, "/ready"))
            return 200 in seen

        until(ready, "ready", 60)
        assert seen == {503, 200}
        request = pool.submit(embed, server, HEAVY)
        until(lambda: in_engine(server) > 0, "a request in the engine", 30)
        engine = engine_of(server)
        server.process.kill()
        until(lambda: is_gone(engine), "a busy engine ends with its server", 5)
        assert isinstance(request.exception(10), httpx.TransportError)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert f"127.0.0.1:{port}" in failed_start(CONFIG, "--set", f"server.port={port}")


@pytest.mark.parametrize("source", ["/no/such/folder", "package:no_such_package/model"])
def test_a_model_that_does_not_exist_is_named(source: str) -> None:
    assert source in failed_start(CONFIG, "--set", f"models.minilm.source={source}")


def guard(folder: Path) -> dict[str, str]:
    """The environment of processes that leave a file in `folder` when they start, and write what they call beyond this machine."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(GUARD)
    cache = {"HF_HOME": str(folder / "cache"), "HF_HUB_CACHE": str(folder / "cache" / "hub")}
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "GUARD_FOLDER": str(folder), "HF_HUB_OFFLINE": "0", **cache}


def leaked(folder: Path) -> list[str]:
    assert list(folder.glob("loaded-*")), "the guard is in no process"
    file = folder / "leaked"
    return file.read_text().split() if file.exists() else []


@pytest.mark.parametrize("how", ["flag", "file"])
def test_a_hub_id_offline_is_named_and_not_looked_up(tmp_path: Path, how: str) -> None:
    """Told by the flag, or by the configuration, which names the model as it likes."""
    config = tmp_path / "jackfield.toml"
    config.write_text('[server]\noffline = true\n[models.mine]\nsource = "some-org/some-model"\n[endpoints.embed]\n')
    arguments, name = ([str(config)], "mine") if how == "file" else (["some-org/some-model", "--offline"], "some-org/some-model")
    text = failed_start(*arguments, env=guard(tmp_path / "guard"))
    assert text.startswith(f"jackfield cannot start (model): model {name!r}: 'some-org/some-model' is no local path"), text
    assert "not in the local cache, and the server is offline" in text
    assert leaked(tmp_path / "guard") == []


def test_a_hub_id_online_is_looked_up(tmp_path: Path) -> None:
    """Which shows that the guard sees such a call, so that its silence elsewhere means something."""
    text = failed_start("some-org/some-model", env=guard(tmp_path / "guard"))
    assert "model 'some-org/some-model'" in text
    assert "offline" not in text
    assert "huggingface.co" in leaked(tmp_path / "guard")


def test_offline_makes_no_network_call(tmp_path: Path) -> None:
    env = guard(tmp_path / "trial")
    attempt = "import socket; socket.create_connection(('192.0.2.1', 9), 1)"
    tried = subprocess.run([sys.executable, "-c", attempt], env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert "a network call to 192.0.2.1" in tried.stderr
    assert leaked(tmp_path / "trial") == ["192.0.2.1"]

    folder = tmp_path / "server"
    with served(CONFIG, "--offline", env=guard(folder)) as server:
        assert vector(embed(server, LIGHT)).shape == (384,)
        pids = {int(path.name.removeprefix("loaded-")) for path in folder.glob("loaded-*")}
        assert {server.process.pid, engine_of(server).pid} <= pids, "the guard is not in both processes"
        assert server.end() == 0
    assert leaked(folder) == []
