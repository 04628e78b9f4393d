"""The examples of the cookbook do what it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakeredis import TcpFakeServer
from transformers import AutoModel, AutoTokenizer

from examples.counter import CounterPlugin
from examples.redis_cache import RedisCache, RedisCacheSettings
from examples.second_engine import SecondEngine
from jackfield import ModelError
from jackfield.testing import FakeEngine, make_client, make_server, tiny_model
from jackfield_embed import EmbedEndpoint
from jackfield_score import RerankEndpoint


@pytest.fixture
def redis() -> Iterator[str]:
    """A server that speaks Redis' protocol over a socket; the plugin talks to it with the real client."""
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_what_was_computed_is_not_computed_again(redis: str) -> None:
    with make_server(EmbedEndpoint(), RerankEndpoint(), RedisCache(RedisCacheSettings(url=redis))) as server, server.client() as client:
        assert server.engine is not None
        first = client.post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
        assert [len(request.token_ids) for request in server.engine.requests] == [2]
        assert client.post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"] == first
        assert len(server.engine.requests) == 1
        mixed = client.post("/v1/embeddings", json={"input": ["b", "new", "a"]}).json()["data"]
        assert [len(request.token_ids) for request in server.engine.requests] == [2, 1]
        assert [mixed[0]["embedding"], mixed[2]["embedding"]] == [first[1]["embedding"], first[0]["embedding"]]
        short = client.post("/v1/embeddings", json={"input": "a", "normalize": False}).json()["data"]
        assert len(server.engine.requests) == 3, "other parameters are other results"
        assert short[0]["embedding"] != first[0]["embedding"]
    with make_server(EmbedEndpoint(), RedisCache(RedisCacheSettings(url=redis))) as other, other.client() as client:
        assert client.post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"] == first
        assert other.engine is not None
        assert not other.engine.requests


def test_without_redis_requests_are_served() -> None:
    plugin = RedisCache(RedisCacheSettings(url="redis://127.0.0.1:1/0"))
    with make_client(EmbedEndpoint(), plugin) as client:
        assert client.post("/v1/embeddings", json={"input": ["a"]}).status_code == 200


def test_counts() -> None:
    with make_client(EmbedEndpoint(), CounterPlugin(), engine=FakeEngine()) as client:
        assert client.get("/counts").json() == {"requests": {}, "failed": {}, "tokens": {}}
        client.post("/v1/embeddings", json={"input": "abc"})
        client.post("/v1/embeddings", json={"input": []})
        counts = client.get("/counts").json()
    assert counts["requests"] == {"embed": 2, "counter": 1}
    assert counts["failed"] == {"embed": 1, "counter": 0}
    assert counts["tokens"] == {"embed": 5, "counter": 0}


QUICK = {"source": "tiny:bert", "engine": "mean"}


def test_a_second_engine_beside_the_first() -> None:
    with make_client(EmbedEndpoint(), SecondEngine(), models={"quick": QUICK, "whole": {"source": "tiny:bert"}}, real=True) as client:
        told = {entry["id"]: entry["execution"] for entry in client.get("/v1/models").json()["data"]}
        assert told == {"quick": "other", "whole": "packed"}
        texts = ["a cat", "a longer text of a dog"]
        answers = {
            name: client.post("/v1/embeddings", json={"model": name, "input": texts, "normalize": normalize}).json()["data"]
            for name, normalize in (("quick", False), ("whole", True))
        }
        unit = client.post("/v1/embeddings", json={"model": "quick", "input": "a cat"}).json()["data"][0]["embedding"]
        metrics = client.get("/metrics").text
    folder = tiny_model("bert")
    table, tokenizer = (
        AutoModel.from_pretrained(folder).get_input_embeddings().weight.detach().numpy(),
        AutoTokenizer.from_pretrained(folder),
    )
    for text, quick, whole in zip(texts, answers["quick"], answers["whole"], strict=True):
        mean = table[tokenizer(text)["input_ids"]].mean(axis=0)
        np.testing.assert_allclose(quick["embedding"], mean, atol=1e-6)
        assert np.abs(np.array(whole["embedding"]) - mean / np.linalg.norm(mean)).max() > 0.01
    assert np.linalg.norm(unit) == pytest.approx(1.0, abs=1e-6)
    assert 'jackfield_engine_sequences_total{engine="mean"} 3.0' in metrics


def test_a_second_engine_takes_only_what_asks_for_it() -> None:
    with make_client(EmbedEndpoint(), SecondEngine(), engine=FakeEngine(max_length=99)) as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 99


def test_a_second_engine_says_what_it_misses(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"model\.safetensors cannot be read"),
        make_client(EmbedEndpoint(), SecondEngine(), models={"quick": {**QUICK, "source": str(tmp_path)}}),
    ):
        pass
