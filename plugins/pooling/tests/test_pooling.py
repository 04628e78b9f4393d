"""What models compute, as it is, by real tiny models over a real socket, against transformers computed here."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from jackfield.testing import make_client
from jackfield_pooling import PoolingEndpoint
from tests.checkpoints import save_checkpoint, save_sentence_transformer
from tests.http.raw import check_error

TEXTS = ["hello", "a longer text", "", "x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "embedder": save_sentence_transformer(root / "embedder", "bert", max_seq_length=128),
        "classifier": save_checkpoint(root / "classifier", "bert", head="ForSequenceClassification", num_labels=3, seed=1),
        "tagger": save_checkpoint(root / "tagger", "distilbert", head="ForTokenClassification", num_labels=5, seed=2),
    }


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    models = {name: {"source": str(folder)} for name, folder in folders.items()}
    with make_client(PoolingEndpoint(), models=models, real=True) as made:
        yield made


def numbers(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(item["index"], item["object"]) for item in data] == [(index, "pooling") for index in range(len(data))]
    return [np.array(item["data"]) for item in data]


@torch.inference_mode()
def expected(kind: Any, folder: Path, text: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"]
    return kind.from_pretrained(folder).eval()(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_vectors(client: httpx.Client, folders: dict[str, Path]) -> None:
    model = SentenceTransformer(str(folders["embedder"]), device="cpu")
    for body in ({}, {"task": "embed"}):
        got = numbers(client.post("/pooling", json={"model": "embedder", "input": TEXTS, **body}))
        np.testing.assert_allclose(np.stack(got), model.encode(TEXTS, batch_size=1), atol=1e-5)
    encoded = client.post("/pooling", json={"model": "embedder", "input": TEXTS[0], "encoding_format": "base64"}).json()["data"][0]["data"]
    np.testing.assert_allclose(np.frombuffer(b64decode(encoded), "<f4"), got[0], atol=1e-6)


@pytest.mark.parametrize("task", ["hidden_states", "token_embed"])
def test_states_of_tokens(client: httpx.Client, folders: dict[str, Path], task: str) -> None:
    got = numbers(client.post("/pooling", json={"model": "embedder", "input": TEXTS, "task": task}))
    for text, states in zip(TEXTS, got, strict=True):
        right = expected(AutoModel, folders["embedder"], text).last_hidden_state[0]
        if task == "token_embed":
            right = torch.nn.functional.normalize(right, dim=1)
        assert states.shape == (len(text) + 2, 32)
        np.testing.assert_allclose(states, right, atol=2e-5)
    encoded = client.post("/pooling", json={"model": "embedder", "input": "hello", "task": task, "encoding_format": "base64"})
    flat = np.frombuffer(b64decode(encoded.json()["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(flat.reshape(-1, 32), got[0], atol=1e-5)


def test_labels_of_texts(client: httpx.Client, folders: dict[str, Path]) -> None:
    got = numbers(client.post("/pooling", json={"model": "classifier", "input": TEXTS}))
    raw = numbers(client.post("/pooling", json={"model": "classifier", "input": TEXTS, "task": "classify", "use_activation": False}))
    for text, probabilities, logits in zip(TEXTS, got, raw, strict=True):
        right = expected(AutoModelForSequenceClassification, folders["classifier"], text).logits[0]
        np.testing.assert_allclose(logits, right, atol=2e-5)
        np.testing.assert_allclose(probabilities, right.softmax(-1), atol=1e-5)


def test_labels_of_tokens(client: httpx.Client, folders: dict[str, Path]) -> None:
    got = numbers(client.post("/pooling", json={"model": "tagger", "input": TEXTS}))
    for text, probabilities in zip(TEXTS, got, strict=True):
        right = expected(AutoModelForTokenClassification, folders["tagger"], text).logits[0].softmax(-1)
        assert probabilities.shape == (len(text) + 2, 5)
        np.testing.assert_allclose(probabilities, right, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "classifier", "input": "a", "task": "embed"}, "model", "it can: classify, hidden_states"),
        ({"model": "embedder", "input": "a", "task": "classify"}, "model", "it can: embed"),
        ({"model": "embedder", "input": "a", "task": "score"}, "task", "score"),
        ({"model": "classifier", "input": "a", "dimensions": 2}, "dimensions", "classify"),
        ({"model": "embedder", "input": "a", "dimensions": 8}, "dimensions", "8"),
        ({"model": "embedder", "input": "a", "normalize": True, "use_activation": False}, "normalize", "differ"),
    ],
    ids=str,
)
def test_bad_requests_name_the_field(client: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = client.post("/pooling", json=body)
    assert words in check_error(answer, 400)
    assert answer.json()["error"]["param"] == param
