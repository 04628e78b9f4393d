"""huggingface_hub's client and LangChain's class, unmodified."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings

from jackfield.testing import RunningServer
from plugins.tei.tests.conftest import logits_of, vectors_of


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own conftest.py says that nothing may be looked up on a hub; here the client's business is a server of ours."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


TEXTS = ["What is deep learning?", "I like you"]


def test_huggingface_hub(server: RunningServer, folders: dict[str, Path]) -> None:
    url = f"{server.url}/tei"
    client = InferenceClient()
    vectors = vectors_of(folders["base"], TEXTS)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0], model=f"{url}/embed"), vectors[:1], atol=1e-5)
    raw = client.feature_extraction(TEXTS, model=f"{url}/embed", normalize=False, truncate=True, truncation_direction="left")
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), vectors, atol=1e-5)
    likeness = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS, model=f"{url}/similarity")
    assert likeness == pytest.approx([1.0, float(vectors[0] @ vectors[1])], abs=1e-5)
    # The bare address, as a deployed endpoint has it.
    np.testing.assert_allclose(InferenceClient(model=url).feature_extraction(TEXTS), vectors, atol=1e-5)
    best = client.text_classification(TEXTS[1], model=f"{url}/predict")
    assert best.label == ["sad", "calm", "glad"][int(logits_of(folders["mood"], [(TEXTS[1],)])[0].argmax())]


async def test_huggingface_hub_async(server: RunningServer, folders: dict[str, Path]) -> None:
    async with AsyncInferenceClient(model=f"{server.url}/tei") as client:
        np.testing.assert_allclose(await client.feature_extraction(TEXTS), vectors_of(folders["base"], TEXTS), atol=1e-5)


def test_huggingface_hub_reads_errors(server: RunningServer) -> None:
    client = InferenceClient(model=f"{server.url}/tei")
    with pytest.raises(huggingface_hub.errors.BadRequestError, match="maximum context length is 128"):
        client.feature_extraction("x" * 300)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="embed_sparse"):
        client.feature_extraction("x", model=f"{server.url}/tei/embed_sparse")


async def test_langchain(server: RunningServer, folders: dict[str, Path]) -> None:
    embeddings = HuggingFaceEndpointEmbeddings(model=f"{server.url}/tei", model_kwargs={"normalize": True, "truncate": True})
    many = [f"text {n}" for n in range(60)]
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), vectors_of(folders["base"], TEXTS), atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), vectors_of(folders["base"], TEXTS)[0], atol=1e-5)
    assert len(await embeddings.aembed_documents(many)) == 60
