"""Family G: plugins, as packages that a server finds: folders with a module and its metadata on the import path."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cases.bench import Bench, case, serving
from tests.servers import served

# An endpoint that needs no engine; NAME, METHOD and PATH are put in.
ENDPOINT = """
from typing import Any
from msgspec import Struct
from jackfield import Context, Endpoint, Request, Route, hookimpl

class Ask(Request, frozen=True, kw_only=True):
    text: str = ""

class Answer(Struct, frozen=True, kw_only=True):
    answer: str

class Thing(Endpoint[Ask, Answer]):
    name = "NAME"
    id_prefix = "thing"
    routes = (Route(method="METHOD", paths=("PATH",), request=Ask, response=Answer),)

    def build_response(self, ctx: Context[Ask]) -> Answer:
        return Answer(answer="NAME")

@hookimpl
def jackfield_register_endpoints(registry: Any) -> None:
    registry.add(Thing())
"""


def install(site: Path, name: str, code: str) -> None:
    """Write a package whose module declares an entry point of its own name."""
    (site / f"p_{name}.py").write_text(code)
    info = site / f"p_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: p-{name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[jackfield]\n{name} = p_{name}\n")


def endpoint(name: str, method: str = "POST", path: str = "/v1/thing") -> str:
    return ENDPOINT.replace("NAME", name).replace("METHOD", method).replace("PATH", path)


@contextmanager
def started(folder: Path, minilm: str, tables: str, *flags: str) -> Iterator[Bench]:
    config = f'[models.minilm]\nsource = "{minilm}"\n{tables}'
    with serving(folder, config, *flags, env={"PYTHONPATH": str(folder)}) as server:
        yield server


def refused(folder: Path, minilm: str, tables: str) -> str:
    """The message of a start that must fail with exit code 2."""
    path = folder / "server.toml"
    path.write_text(f'[models.minilm]\nsource = "{minilm}"\n{tables}')
    with served(str(path), env={"PYTHONPATH": str(folder)}, wait=False) as server:
        assert server.process.wait(60) == 2
        server.end()
        return server.log()


@case("G01")
def broken_plugins_do_not_take_the_server_down(tmp_path: Path, minilm: str) -> None:
    install(tmp_path, "good", endpoint("good"))
    install(tmp_path, "missing", "import no_such_module\n")
    install(tmp_path, "exits", "import sys\nsys.exit(3)\n")
    tables = "[endpoints.good]\n[endpoints.missing]\n[plugins.exits]\n"
    with started(tmp_path, minilm, f'[server]\nplugin_errors = "skip"\n{tables}') as server:
        assert server.send("GET", "/health").status_code == 200
        assert server.post("/v1/thing", {})["answer"] == "good"
        warnings = [line for line in server.server.lines if "skipped" in line]
        assert any("missing" in line and "p-missing 1.2" in line and "no_such_module" in line for line in warnings)
        assert any("exits" in line and "p-exits 1.2" in line and "sys.exit(3)" in line for line in warnings)
    strict = refused(tmp_path, minilm, tables)
    assert "missing" in strict or "exits" in strict


@case("G02")
def a_needed_plugin_that_fails_stops_the_start(tmp_path: Path, minilm: str) -> None:
    install(
        tmp_path, "backend", "from jackfield import hookimpl\n@hookimpl\ndef jackfield_engine(spec):\n    raise RuntimeError('no device')\n"
    )
    message = refused(tmp_path, minilm, "[plugins.backend]\n[endpoints.embed]\n")
    assert "backend" in message
    assert "no device" in message


@case("G03")
def one_route_has_one_owner(tmp_path: Path, minilm: str) -> None:
    install(tmp_path, "p1", endpoint("p1"))
    install(tmp_path, "p2", endpoint("p2"))
    install(tmp_path, "p3", endpoint("p3", path="/v1/embeddings"))
    install(tmp_path, "p4", endpoint("p4", "GET", path="/v1/models/{anything:str}"))
    message = refused(tmp_path, minilm, "[endpoints.p1]\n[endpoints.p2]\n")
    assert all(word in message for word in ("POST", "/v1/thing", "p1", "p2"))
    assert refused(tmp_path, minilm, "[endpoints.p2]\n[endpoints.p1]\n") == message
    message = refused(tmp_path, minilm, "[endpoints.p3]\n[endpoints.embed]\n")
    assert all(word in message for word in ("/v1/embeddings", "p3", "embed"))
    message = refused(tmp_path, minilm, "[endpoints.p4]\n")
    assert "/v1/models" in message
    assert "the server itself" in message
    with started(tmp_path, minilm, '[endpoints.p1]\n[endpoints.p2]\nprefix = "/two"\n') as server:
        assert server.post("/v1/thing", {})["answer"] == "p1"
        assert server.post("/two/v1/thing", {})["answer"] == "p2"


@case("G04")
def methods_share_a_path(tmp_path: Path, minilm: str) -> None:
    install(tmp_path, "getter", endpoint("getter", "GET"))
    install(tmp_path, "poster", endpoint("poster", "POST"))
    with started(tmp_path, minilm, "[endpoints.getter]\n[endpoints.poster]\n") as server:
        assert server.send("GET", "/v1/thing").json()["answer"] == "getter"
        assert server.post("/v1/thing", {})["answer"] == "poster"
        assert server.send("DELETE", "/v1/thing").status_code == 405


HALF = "\n@hookimpl\ndef jackfield_wrap_submit(endpoint, submit, no_such_argument):\n    return None\n"
RAISES = """
from jackfield import stageimpl
@stageimpl(wrapper=True)
def build_response(ctx):
    response = yield
    if ctx.request.user == "raise":
        raise RuntimeError("p2 is broken")
    return response
"""
BLOCKS = """
import time
from jackfield import stageimpl
@stageimpl(wrapper=True)
def preprocess(ctx):
    if ctx.request.user == "block":
        time.sleep(3)
    return (yield)
"""
FLOODS = """
import logging
from jackfield import stageimpl
log = logging.getLogger(__name__ + ".deep.inside")
@stageimpl(wrapper=True)
def build_response(ctx):
    response = yield
    if ctx.request.user == "flood":
        for number in range(3000):
            log.warning("drop %d of a flood", number)
    return response
"""
WRONG = """
from jackfield import stageimpl
@stageimpl(wrapper=True)
def build_response(ctx):
    response = yield
    return 7 if ctx.request.user == "wrong" else response
"""


@case("G07")
def half_registered_and_raising_plugins(tmp_path: Path, minilm: str) -> None:
    install(tmp_path, "p1", endpoint("p1") + HALF)
    install(tmp_path, "p2", RAISES)
    install(tmp_path, "p3", BLOCKS)
    install(tmp_path, "p4", FLOODS)
    install(tmp_path, "p5", WRONG)
    tables = '[server]\nplugin_errors = "skip"\n[endpoints.p1]\n[endpoints.embed]\nthreaded = true\n'
    tables += "".join(f"[plugins.{name}]\n" for name in ("p2", "p3", "p4", "p5"))
    with started(tmp_path, minilm, tables) as server, ThreadPoolExecutor(1) as pool:
        assert server.send("POST", "/v1/thing", json={}).status_code == 404
        assert server.send("POST", "/v1/embeddings", json={"input": "x", "user": "raise"}).status_code == 500
        assert server.server.wrote("p2 is broken")
        assert "on a request to endpoint 'embed', in code of 'p2'" in server.server.log()
        assert server.send("POST", "/v1/embeddings", json={"input": "x", "user": "wrong"}).status_code == 500
        assert server.server.wrote("gave int; a EmbeddingResponse")
        assert server.send("POST", "/v1/embeddings", json={"input": "x", "user": "flood"}).status_code == 200
        assert server.server.wrote("p4 writes more than 100 lines a second")
        assert 100 <= server.server.log().count("of a flood") <= 1000
        metrics = server.send("GET", "/metrics").text
        assert 'jackfield_plugin_faults_total{plugin="p2"} 1.0' in metrics
        assert float(metrics.partition('jackfield_log_lines_dropped_total{source="p4"} ')[2].split()[0]) >= 2000
        assert len(server.embed("x")) == 1
        blocked = pool.submit(server.post, "/v1/embeddings", {"input": "x", "user": "block"})
        while not blocked.done():
            before = time.monotonic()
            assert server.send("GET", "/health").status_code == 200
            assert time.monotonic() - before < 1
            time.sleep(0.05)
        assert blocked.result()["data"]


@case("G08")
def routes_of_plugins_are_behind_everything(tmp_path: Path, minilm: str) -> None:
    install(tmp_path, "mine", endpoint("mine", path="/my/route"))
    with started(tmp_path, minilm, '[server]\napi_keys = ["secret"]\nmax_body_bytes = 1000\n[endpoints.mine]\n') as server:
        key = {"authorization": "Bearer secret"}
        assert server.send("POST", "/my/route", json={}).status_code == 401
        assert server.send("POST", "/my/route", json={}, headers=key).status_code == 200
        assert server.send("POST", "/my/route", content=b"{", headers={**key, "content-type": "application/json"}).status_code == 400
        assert server.send("POST", "/my/route", json={"text": "x" * 2000}, headers=key).status_code == 413
        assert 'path="/my/route",status="401"' in (metrics := server.send("GET", "/metrics", headers=key).text) or 'status="401"' in metrics
        assert 'path="/my/route",status="200"' in metrics
