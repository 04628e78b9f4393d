"""Family F: the server. Where a case names chat, not served yet, the same goes to the embeddings route: the fault is of the core."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.cases.bench import QUICK, Bench, case, serving, steps
from tests.servers import served

PATH = "/v1/embeddings"
RIGHT = {"model": "minilm", "input": "Hi"}


@case("F01")
def malformed_json(bench: Bench) -> None:
    for step in steps("F01"):
        bench.raw(PATH, step["raw_body"].encode(), 400)


@case("F02")
def content_types(bench: Bench) -> None:
    for step, status in zip(steps("F02"), (400, 400, 400, 200, 200), strict=True):
        answer = bench.send("POST", PATH, content=b'{"input":"x"}', headers={"content-type": step["headers"]["Content-Type"]})
        assert answer.status_code == status


@case("F03")
def wild_json(bench: Bench) -> None:
    bench.raw(PATH, b'{"model":"minilm","input":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400)
    message = {"model": "minilm", "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": 5}
    assert bench.post(PATH, message, 400)["error"]["param"] == "chat_template_kwargs"
    bench.post(PATH, {**RIGHT, "metadata": {"x": [[[]]]}})
    for step in steps("F03")[3:]:
        assert bench.post(PATH, step["body"], 400)["error"]["param"] == "model"


@case("F05")
def extra_fields(bench: Bench) -> None:
    bench.post(PATH, steps("F05")[1]["body"])
    bench.post(PATH, {**RIGHT, "temperator": 0, "store": False, "metadata": {}, "service_tier": "auto"})


@case("F06")
def one_bad_item(bench: Bench) -> None:
    """A checkpoint with NaN in the row of one token: the requests without it share batches with the one that has it."""
    texts = [f"good text {i}" + " more" * (i % 9) for i in range(15)]
    right = {text: bench.embed(text, "nan-token")[0] for text in texts}

    def ask(text: str) -> httpx.Response:
        return bench.send("POST", PATH, json={"model": "nan-token", "input": text})

    with ThreadPoolExecutor(16) as pool:
        started = time.monotonic()
        answers = list(pool.map(ask, [*texts[:8], "bad!", *texts[8:]]))
        assert time.monotonic() - started < 10
    bad = answers.pop(8)
    assert bad.status_code == 500
    for text, answer in zip(texts, answers, strict=True):
        np.testing.assert_allclose(answer.json()["data"][0]["embedding"], right[text], atol=1e-5)
    assert ask("good text 1").status_code == 200


def engine_of(server: Bench) -> psutil.Process:
    children = psutil.Process(server.server.process.pid).children()
    return next(child for child in children if "jackfield.worker" in child.cmdline())


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def health(server: Bench) -> int:
    return server.send("GET", "/health").status_code


def queued_tokens(server: Bench) -> float:
    return float(server.send("GET", "/metrics").text.partition('jackfield_queue{unit="tokens"} ')[2].split()[0])


def whole(server: Bench) -> Bench:
    """Its engine is loaded: what was done to it before is over. (/health is 200 from when it begins to load.)"""
    until(lambda: server.send("GET", "/ready").status_code == 200)
    return server


@case("F07")
def engine_dies(mended: Bench) -> None:
    """The engine is a process, so whatever raises in it looks like its end: killed with work in it."""
    server = whole(mended)
    with ThreadPoolExecutor(8) as pool:
        texts = ["word " * 200] * 64
        waiting = [pool.submit(server.send, "POST", PATH, json={"model": "minilm", "input": [f"{i} {t}" for t in texts]}) for i in range(6)]
        until(lambda: queued_tokens(server) > 0)  # charged just before they go into the engine, which has work for seconds then
        engine_of(server).kill()
        assert {future.result(20).status_code for future in waiting} <= {200, 503}
        assert any(future.result().status_code == 503 for future in waiting)
        until(lambda: server.send("POST", PATH, json=RIGHT).status_code == 200)


@case("F08")
def health_tells(mended: Bench) -> None:
    server = whole(mended)
    with ThreadPoolExecutor(1) as pool:
        assert health(server) == 200
        engine = engine_of(server)
        engine.suspend()
        stuck = pool.submit(server.send, "POST", PATH, json=RIGHT)
        until(lambda: health(server) == 503)
        assert stuck.result(20).status_code == 503
        whole(server)
        busy = pool.submit(server.embed, [f"{i} " + "word " * 250 for i in range(200)])
        while not busy.done():
            assert health(server) == 200
            time.sleep(0.1)
        assert len(busy.result()) == 200
        engine_of(server).kill()
        until(lambda: health(server) == 503, 5)
        assert server.send("GET", "/v1/models").status_code == 200


@case("F10")
def memory_stays(bench: Bench) -> None:
    """1,000 requests here, failed ones among them; 100,000 in `make bench-memory`."""
    processes = [psutil.Process(bench.server.process.pid), engine_of(bench)]

    def memory() -> int:
        return sum(process.memory_full_info().uss for process in processes)

    def ask(number: int) -> int:
        text = "word " * (1 + number % 20)
        return bench.send("POST", PATH, json={"model": "minilm" if number % 10 else "nope", "input": text}).status_code

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(300)))
        before = memory()
        answers = list(pool.map(ask, range(1000)))
    assert answers.count(404) == 100
    assert answers.count(200) == 900
    assert memory() - before < 50e6


@case("F11")
def sigterm_drains(tmp_path: Path, one_model: str) -> None:
    with serving(tmp_path, one_model) as server, ThreadPoolExecutor(4) as pool:
        texts = ["word " * 250] * 150
        waiting = [pool.submit(server.embed, [f"{i} {text}" for text in texts]) for i in range(2)]
        until(lambda: queued_tokens(server) > 2 * 150 * 250)  # both are charged for, and go into the engine
        server.server.process.terminate()
        assert server.server.wrote("SIGTERM: finishing")
        try:
            status = httpx.post(f"{server.server.url}{PATH}", json=RIGHT, timeout=10).status_code
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):  # the port is closed, or was before it read a request
            status = 503
        assert status == 503
        assert [len(future.result(60)) for future in waiting] == [150, 150]
        assert server.server.process.wait(30) == 0


@case("F12")
def idle_engine_lives(tmp_path: Path, one_model: str) -> None:
    """Idle for longer than the stall limit, before the first request and after it."""
    with serving(tmp_path, one_model, *QUICK) as server:
        for _ in range(2):
            time.sleep(3)
            assert health(server) == 200
            assert server.embed("Hi")


@case("F14")
def long_request_id(bench: Bench) -> None:
    answer = bench.send("POST", PATH, json=RIGHT, headers={"x-request-id": "x" * 60_000})
    assert answer.status_code == 200
    assert len(answer.json()["id"]) <= 140
    assert len(answer.headers["x-request-id"]) <= 128
    for odd in (b"a\xe9\xff", "ключ".encode(), b'a"b<c>'):
        answer = bench.send("POST", PATH, json=RIGHT, headers={b"x-request-id": odd})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"].isascii()


@case("F16")
def keys_are_compared_safely(tmp_path: Path, one_model: str) -> None:
    with serving(tmp_path, one_model, env={"JACKFIELD_API_KEY": "SECRET"}) as server:
        wrong = [b"Bearer wrong", b"Bearer  SECRET", b"Bearer", b"Basic SECRET", "Bearer ключ".encode(), b"Bearer SECRET\xe9", b""]
        for header in wrong:
            assert server.send("GET", "/v1/models", headers={b"authorization": header}).status_code == 401
        assert server.send("GET", "/v1/models").status_code == 401
        assert server.send("GET", "/v1/models", headers={"authorization": "bearer SECRET"}).status_code == 200
        assert health(server) == 200
        assert "SECRET" not in server.server.log()


@case("F20")
def templates_of_requests_are_refused(bench: Bench) -> None:
    for step in steps("F20"):
        fields = {"messages": step["body"]["messages"], "chat_template": step["body"]["chat_template"]}
        assert bench.post("/tokenize", {"model": "smollm2", **fields}, 400)["error"]["param"] == "chat_template"
        assert bench.post(PATH, {"model": "minilm", **fields}, 400)["error"]["param"] == "chat_template"
    assert health(bench) == 200


@case("F21")
def code_of_a_model_never_runs(tmp_path: Path, minilm: str) -> None:
    import json
    import shutil

    for name in ("config.json", "tokenizer_config.json"):
        folder, marker = tmp_path / name / "model", tmp_path / name / "marker"
        shutil.copytree(minilm, folder)
        content = json.loads((folder / name).read_text())
        content["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        (folder / name).write_text(json.dumps(content))
        (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: ...\n")
        with served(str(folder), wait=False) as server:
            assert server.process.wait(60) == 2
            server.end()
            assert "trust_remote_code" in server.log()
        assert not marker.exists()


@case("F22")
def error_bodies(bench: Bench) -> None:
    """`Bench.send` looks at every error of every case; here those of the routes themselves."""
    assert bench.send("GET", "/nope").status_code == 404
    assert bench.send("GET", PATH).status_code == 405
    assert bench.send("DELETE", "/health").status_code == 405
    assert bench.send("POST", "/docs/nope").status_code in (404, 405)
    assert bench.send("GET", "/v1/models/nope").status_code == 404


@case("F23")
def body_limits(bench: Bench) -> None:
    big = steps("F23")[0]["body"] | {"input": ["word " * 1200] * 2000}
    answer = bench.post(PATH, big)
    assert len(answer["data"]) == 2000
    assert answer["usage"]["prompt_tokens"] == 2000 * 256
    process = psutil.Process(bench.server.process.pid)
    before = process.memory_info().rss
    peak = before
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = send_chunked(bench, 1 << 30)
    stop.set()
    watcher.join()
    assert status == 413
    assert peak - before < 400e6


def send_chunked(bench: Bench, size: int) -> int:
    """Send a body without a length until the server answers; returns the status."""
    url = httpx.URL(bench.server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        try:
            for piece in pieces(size):
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # answered and closed before it had read everything, which is the point
        return int(connection.recv(4096).split(b" ", 2)[1])


def pieces(size: int) -> Iterator[bytes]:
    piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    for _ in range(size // 0x100000):
        yield piece
