"""Clients as people have them, unmodified, against the real model."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import cohere
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from sentence_transformers import SentenceTransformer

from tests.servers import Served

TEXTS = ["The cat sits outside", "A man is playing guitar", "The new movie is awesome"]


@pytest.fixture(scope="module")
def vectors(minilm: str) -> np.ndarray:
    return np.asarray(SentenceTransformer(minilm, device="cpu").encode(TEXTS))


def test_openai(embedder: Served, vectors: np.ndarray) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="unused")
    every: list[dict[str, Any]] = [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}]
    for options in every:
        answer = client.embeddings.create(model="minilm", input=TEXTS, **options)
        given: list[Any] = [item.embedding for item in answer.data]
        ours = [np.frombuffer(b64decode(item), "<f4") if isinstance(item, str) else item for item in given]
        np.testing.assert_allclose(ours, vectors, atol=1e-5)
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 20
    assert client.models.retrieve("minilm").id == "minilm"
    assert [model.id for model in client.models.list()] == ["minilm"]


def test_openai_errors(embedder: Served) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="no-such-model") as missing:
        client.embeddings.create(model="no-such-model", input="x")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="256"):
        client.embeddings.create(model="minilm", input="word " * 900)


async def test_openai_async(embedder: Served, vectors: np.ndarray) -> None:
    async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="unused") as client:
        answer = await client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS)
    np.testing.assert_allclose([item.embedding for item in answer.data], vectors, atol=1e-5)
    assert answer.model == "minilm"


def test_cohere(embedder: Served, vectors: np.ndarray) -> None:
    client = cohere.ClientV2(base_url=embedder.url, api_key="unused")
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = client.embed(model="minilm", texts=TEXTS, input_type="search_document", embedding_types=kinds)
    forms: Any = answer.embeddings
    np.testing.assert_allclose(forms.float_, vectors, atol=1e-5)
    scaled = np.rint(vectors / np.abs(vectors).max(1, keepdims=True) * 127)
    assert np.abs(np.array(forms.int8) - scaled).max() <= 1
    assert np.abs(np.array(forms.uint8) - 128 - scaled).max() <= 1
    bits = np.packbits(vectors >= 0, axis=1)
    assert np.array_equal(forms.ubinary, bits)
    assert np.array_equal(forms.binary, bits.astype(int) - 128)
    decoded = [np.frombuffer(b64decode(text), "<f4") for text in forms.base64]
    np.testing.assert_allclose(decoded, vectors, atol=1e-5)
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens == 20


def test_langchain(embedder: Served, vectors: np.ndarray) -> None:
    model = OpenAIEmbeddings(model="minilm", base_url=f"{embedder.url}/v1", api_key="unused", check_embedding_ctx_length=False)  # type: ignore[arg-type]
    np.testing.assert_allclose(model.embed_documents(TEXTS), vectors, atol=1e-5)
    np.testing.assert_allclose(model.embed_query(TEXTS[0]), vectors[0], atol=1e-5)
