"""The server as processes: what they load, how they end."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.servers import Served, served

# Weights of the quick start's model in float32.
WEIGHTS_BYTES = 91_000_000


def engine_of(server: Served) -> psutil.Process:
    return next(child for child in psutil.Process(server.process.pid).children() if "jackfield.worker" in child.cmdline())


def test_only_the_engine_process_loads_torch(embedder: Served) -> None:
    http = psutil.Process(embedder.process.pid)
    engine = engine_of(embedder)
    assert "libtorch" not in Path(f"/proc/{http.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{engine.pid}/maps").read_text()


def test_endpoints_of_one_model_share_its_weights(embedder: Served) -> None:
    """Embeddings, scores and raw outputs of one model take the memory of its embeddings alone."""
    endpoints = ("embed", "score", "rerank", "pooling")
    enabled = [argument for name in endpoints for argument in ("--set", f'endpoints.{name}.models=["minilm"]')]
    with served("config/embeddings.toml", *enabled) as server, server.client() as client, embedder.client() as other:
        vector = client.post("/v1/embeddings", json={"input": "a text"}).json()["data"][0]["embedding"]
        assert client.post("/pooling", json={"input": "a text", "task": "embed"}).json()["data"][0]["data"] == vector
        score = client.post("/score", json={"queries": "a text", "documents": "a text"}).json()["data"][0]["score"]
        assert abs(score - 1) < 1e-5
        assert client.post("/rerank", json={"query": "a text", "documents": ["a text"]}).status_code == 200
        assert other.post("/v1/embeddings", json={"input": "a text"}).json()["data"][0]["embedding"] == vector
        more, one = engine_of(server).memory_full_info().pss, engine_of(embedder).memory_full_info().pss
    assert more - one < WEIGHTS_BYTES / 2
