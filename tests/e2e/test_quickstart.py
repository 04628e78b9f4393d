"""The server of the README's first command, from a cache that may be empty: it embeds, ranks and chats, whether a model is named or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Served, served


@pytest.fixture(scope="module")
def quickstart(smollm2_cache: str) -> Iterator[Served]:
    with served("config/quickstart.toml", env={"JACKFIELD_CACHE": smollm2_cache}) as server:
        yield server


def test_it_says_what_it_serves(quickstart: Served) -> None:
    assert quickstart.wrote("(endpoints: chat, completions, embed, rerank, tokenize)")
    with quickstart.client() as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["minilm", "smollm2"]


def test_it_embeds_ranks_and_chats(quickstart: Served) -> None:
    """No request names a model: each route has one that it serves, and tokenize the first of the file."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with quickstart.client() as client:
        embedded = client.post("/v1/embeddings", json={"input": "The cat sits outside"}).json()
        ranked = client.post("/v1/rerank", json={"query": "Where do cats sleep?", "documents": ["Bread is flour.", "Cats sleep in it."]})
        chatted = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 20}).json()
        completed = client.post("/v1/completions", json={"prompt": "The capital of France is", "temperature": 0, "max_tokens": 2}).json()
        tokens = client.post("/tokenize", json={"prompt": "hello world"}).json()["tokens"]
        refused = client.post("/v1/embeddings", json={"model": "smollm2", "input": "hello"})
    assert (embedded["model"], len(embedded["data"][0]["embedding"])) == ("minilm", 384)
    assert ranked.json()["results"][0]["index"] == 1
    assert chatted["model"] == completed["model"] == "smollm2"
    assert "Paris" in chatted["choices"][0]["message"]["content"]
    assert completed["choices"][0]["text"] == " Paris."
    assert tokens == [101, 7592, 2088, 102]
    assert refused.status_code == 404
