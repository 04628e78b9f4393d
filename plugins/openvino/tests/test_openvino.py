"""Real and tiny models on OpenVINO over a real socket, against sentence-transformers and transformers computed here."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from jackfield import ModelError
from jackfield.engine.cpu import has_fast_bfloat16
from jackfield.sources import resolve_source
from jackfield.testing import RunningServer, make_server
from jackfield_classify import ClassifyEndpoint
from jackfield_embed import EmbedEndpoint
from jackfield_openvino import OpenVinoPlugin
from jackfield_pooling import PoolingEndpoint
from jackfield_score import RerankEndpoint, ScoreEndpoint
from tests.checkpoints import save_checkpoint, save_sentence_transformer
from tests.parity import MINILM
from tests.servers import served

# Of 1 to 62 tokens and the frame: several batches of a step, the window of the ModernBERT below, and beyond it.
TEXTS = [("abc def ghi, " * 10)[:length] for length in (62, 1, 2, 13, 29, 14, 15, 30, 2, 45)]
PAIRS = [("what is ai?", "machines"), ("what is ai?", "pizza, with cheese"), ("a", "x"), ("w" * 60, "d" * 40)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JACKFIELD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every architecture that the README names, and every kind of head."""
    root = tmp_path_factory.mktemp("models")
    return {
        "minilm": Path(resolve_source("minilm", MINILM)),
        "mpnet": save_sentence_transformer(root / "mpnet", "mpnet"),
        "modernbert": save_sentence_transformer(root / "modernbert", "modernbert"),
        "classes": save_checkpoint(root / "classes", "distilbert", head="ForSequenceClassification", num_labels=3),
        "ranker": save_checkpoint(root / "ranker", "bert", head="ForSequenceClassification", num_labels=1),
        "tokens": save_checkpoint(root / "tokens", "xlm-roberta", head="ForTokenClassification", num_labels=3),
    }


@pytest.fixture(scope="module")
def server(cache: Path, folders: dict[str, Path]) -> Iterator[RunningServer]:
    endpoints = (EmbedEndpoint(), ClassifyEndpoint(), ScoreEndpoint(), RerankEndpoint(), PoolingEndpoint())
    models = {name: {"source": str(folder), "engine": "openvino"} for name, folder in folders.items()}
    with make_server(*endpoints, OpenVinoPlugin(), models=models, real=True) as made:
        yield made


def ask(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json().get("data") or answer.json()["results"]
    return items


@pytest.mark.parametrize("model", ["minilm", "mpnet", "modernbert"])
def test_vectors(server: RunningServer, folders: dict[str, Path], model: str) -> None:
    """Of mixed lengths in one request, each as if it were alone."""
    right = SentenceTransformer(str(folders[model]), device="cpu").encode(TEXTS, batch_size=1)
    got = [item["embedding"] for item in ask(server, "/v1/embeddings", model=model, input=TEXTS)]
    np.testing.assert_allclose(got, right, atol=1e-5)


def test_concurrent_requests(server: RunningServer) -> None:
    right = [item["embedding"] for item in ask(server, "/v1/embeddings", model="minilm", input=TEXTS)]
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(ask, server, "/v1/embeddings", model="minilm", input=text) for text in TEXTS * 5]
    for future, vector in zip(futures, right * 5, strict=True):
        np.testing.assert_allclose(future.result()[0]["embedding"], vector, atol=1e-5)


@torch.inference_mode()
def logits_of(folder: Path, auto: Any) -> list[torch.Tensor]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), auto.from_pretrained(folder).eval()
    ids = [tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"] for text in TEXTS]
    return [model(input_ids=one, attention_mask=torch.ones_like(one)).logits[0] for one in ids]


def test_classes(server: RunningServer, folders: dict[str, Path]) -> None:
    right = logits_of(folders["classes"], AutoModelForSequenceClassification)
    got = [item["probs"] for item in ask(server, "/classify", model="classes", input=TEXTS, use_activation=False)]
    np.testing.assert_allclose(got, right, atol=5e-5)


def test_classes_of_tokens(server: RunningServer, folders: dict[str, Path]) -> None:
    right = logits_of(folders["tokens"], AutoModelForTokenClassification)
    items = ask(server, "/pooling", model="tokens", input=TEXTS, task="token_classify", use_activation=False)
    for item, logits in zip(items, right, strict=True):
        np.testing.assert_allclose(item["data"], logits, atol=5e-5)


def test_scores(server: RunningServer, folders: dict[str, Path]) -> None:
    """The parts of a pair are told apart."""
    right = CrossEncoder(str(folders["ranker"]), device="cpu").predict(PAIRS, batch_size=1)
    queries, documents = map(list, zip(*PAIRS, strict=True))
    got = [item["score"] for item in ask(server, "/score", model="ranker", queries=queries, documents=documents)]
    np.testing.assert_allclose(got, right, atol=1e-5)
    ranked = ask(server, "/rerank", model="ranker", query=PAIRS[0][0], documents=documents[:2])
    assert [item["index"] for item in ranked] == sorted((0, 1), key=lambda place: -right[place])


def test_what_is_told(server: RunningServer) -> None:
    with server.client() as client:
        entry = client.get("/v1/models/minilm").json()
        assert (entry["execution"], entry["dtype"], entry["device"]) == ("other", "float32", "cpu")
        assert client.get("/health").json()["engines"] == {"openvino": "ready"}, "one engine for all of its models"


@pytest.mark.skipif(not has_fast_bfloat16(), reason="OpenVINO falls back to float32 where bfloat16 is slow")
def test_bfloat16(cache: Path, server: RunningServer) -> None:
    """Made of the same conversion as float32."""
    right = [item["embedding"] for item in ask(server, "/v1/embeddings", model="minilm", input=TEXTS)]
    before = sorted((cache / "openvino").iterdir())
    models = {"m": {"source": MINILM, "engine": "openvino", "dtype": "bfloat16"}}
    with make_server(EmbedEndpoint(), OpenVinoPlugin(), models=models, real=True) as other:
        got = [item["embedding"] for item in ask(other, "/v1/embeddings", input=TEXTS)]
        with other.client() as client:
            assert client.get("/v1/models/m").json()["dtype"] == "bfloat16"
    assert sorted((cache / "openvino").iterdir()) == before
    assert min(np.sum(np.multiply(got, right), axis=1)) > 0.9995
    assert np.abs(np.subtract(got, right)).max() > 1e-6


def start(folder: Path, **table: Any) -> list[float]:
    """Serve a model, and give a vector of it."""
    models = {"m": {"source": str(folder), "engine": "openvino", **table}}
    with make_server(EmbedEndpoint(), OpenVinoPlugin(), models=models, real=True) as made:
        vector: list[float] = ask(made, "/v1/embeddings", input="a text")[0]["embedding"]
        return vector


def test_a_model_is_converted_once_and_a_changed_one_anew(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jackfield.openvino")
    folder = tmp_path / "model"
    first = start(save_sentence_transformer(folder, "bert", seed=1))
    assert start(folder) == first
    assert caplog.text.count("converting it for OpenVINO") == 1
    save_checkpoint(folder, "bert", seed=2)
    second = start(folder)
    assert caplog.text.count("converting it for OpenVINO") == 2
    np.testing.assert_allclose(second, SentenceTransformer(str(folder), device="cpu").encode("a text"), atol=1e-5)
    assert np.abs(np.subtract(first, second)).max() > 0.01
    assert not [path for path in (cache / "openvino").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("make", "table", "reason"),
    [
        (lambda folder: save_sentence_transformer(folder, "gemma3"), {}, r"OpenVINO cannot convert Gemma3TextModel \(.*engine = \"torch\""),
        (save_sentence_transformer, {"device": "cuda"}, "device 'cuda' with engine 'openvino'"),
        (save_sentence_transformer, {"options": {"STREAMS": 1}}, "Unsupported property STREAMS"),
    ],
    ids=["architecture", "device", "option"],
)
def test_what_it_refuses(cache: Path, tmp_path: Path, make: Callable[[Path], Path], table: dict[str, Any], reason: str) -> None:
    level = logging.getLogger().level
    with pytest.raises(ModelError, match=reason):
        start(make(tmp_path / "model"), **table)
    assert logging.getLogger().level == level


def test_it_takes_what_asks_for_it_alone(folders: dict[str, Path]) -> None:
    models = {"m": {"source": str(folders["mpnet"])}}
    with make_server(EmbedEndpoint(), OpenVinoPlugin(), models=models, real=True) as made, made.client() as client:
        assert client.get("/health").json()["engines"] == {"torch": "ready"}


def test_the_processes(cache: Path, tmp_path: Path, folders: dict[str, Path]) -> None:
    """The server's has neither torch nor OpenVINO, and starts a new engine for one that was killed."""
    config = tmp_path / "jackfield.toml"
    config.write_text(f'[models.m]\nsource = "{folders["mpnet"]}"\nengine = "openvino"\n[endpoints.embed]\n')
    with served(str(config)) as made, made.client() as client:
        before = client.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
        http = psutil.Process(made.process.pid)
        maps = Path(f"/proc/{http.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "libopenvino" not in maps
        (engine,) = [child for child in http.children() if "jackfield.worker" in child.cmdline()]
        assert "libopenvino" in Path(f"/proc/{engine.pid}/maps").read_text()
        engine.kill()
        assert made.wrote("the engine is ready again", timeout_s=60), made.log()
        assert client.post("/v1/embeddings", json={"input": TEXTS}).json()["data"] == before


def test_nothing_is_reported_over_the_network() -> None:
    code = "import jackfield_openvino.quiet, sys; print([name for name in sys.modules if name.startswith('openvino_telemetry.')])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
