"""A server that is told to end does so soon, also when its engine does not listen: because it still loads, or because it is stuck."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import save_sentence_transformer
from tests.e2e.test_lifecycle import LIGHT, engine_of, free_port, frozen, in_engine, is_gone, pending, status, unavailable, until
from tests.servers import Served, served

# An engine is waited for 3 s at most, after the drain.
SOON_S = 7.0
# Of the light request, for a tokenizer of single bytes.
TOKENS = len(LIGHT["input"]) + 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_transformer(tmp_path_factory.mktemp("model") / "tiny")


def ended(server: Served, engine: psutil.Process, within_s: float) -> None:
    """Its exit code is that of a server which was told to end, its log has no complaint, and it leaves no process behind."""
    started = time.monotonic()
    assert server.process.wait(30) == 0, server.log()
    assert time.monotonic() - started < within_s
    until(lambda: is_gone(engine), "the engine process is gone", 1)
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("stuck", [False, True], ids=["loading", "stuck while loading"])
def test_told_while_the_models_load(model: Path, stuck: bool) -> None:
    port = free_port()
    with served(str(model), "--set", f"server.port={port}", wait=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        until(lambda: status(server, "/ready") == 503, "it listens while it loads", 60)
        engine = engine_of(server)
        if stuck:
            engine.suspend()
        server.process.terminate()
        ended(server, engine, within_s=4)
    assert "is ready at" not in server.log()


def test_told_with_a_stuck_engine(model: Path) -> None:
    """The request in it is given up when the drain time is over, and its client is told why."""
    with served(str(model), "--set", "server.drain_timeout_s=0.5") as server:
        engine = engine_of(server)
        with frozen(engine), pending(server, LIGHT, 2) as futures:
            until(lambda: in_engine(server) == 2 * TOKENS, "both requests are in the engine")
            server.process.terminate()
            ended(server, engine, within_s=SOON_S)
            for future in futures:
                assert "shutting down" in unavailable(future.result(5))
