"""Classification by real tiny models over a real socket, against transformers computed here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from jackfield import ModelError
from jackfield.testing import make_client
from jackfield_classify import ClassifyEndpoint
from tests.checkpoints import IN_BUCKETS, KINDS, save_checkpoint
from tests.http.raw import check_error

TEXTS = ["I loved it", "never again!", "x", "", "a much longer text than all of the others " * 2]
HEAD = "ForSequenceClassification"
# A model for each way of making probabilities of logits.
MODELS: dict[str, dict[str, Any]] = {
    "three": {"num_labels": 3, "id2label": {0: "NEG", 1: "NEUTRAL", 2: "POS"}},
    "single": {"num_labels": 3, "problem_type": "single_label_classification"},
    "multi": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "regression": {"num_labels": 1, "problem_type": "regression"},
    "regressions": {"num_labels": 3, "problem_type": "regression"},
    "one": {"num_labels": 1},
    "twenty": {"num_labels": 20},
    "tanh": {"num_labels": 2, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
}
softmax = partial(torch.softmax, dim=-1)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "three": softmax,
    "single": softmax,
    "multi": torch.sigmoid,
    "regression": torch.clone,
    "regressions": torch.clone,
    "one": torch.sigmoid,
    "twenty": softmax,
    "tanh": torch.tanh,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: save_checkpoint(root / name, "bert", head=HEAD, seed=seed, **more) for seed, (name, more) in enumerate(MODELS.items())}
    config = made["twenty"] / "config.json"  # as a file that names no label at all, but their number
    text = json.loads(config.read_text())
    del text["id2label"], text["label2id"]
    config.write_text(json.dumps({**text, "num_labels": 20}))
    made["hole"] = save_checkpoint(root / "hole", "bert", head=HEAD, num_labels=3)
    config = made["hole"] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_labels": 3, "id2label": {"2": "last"}, "label2id": {}}))
    return made


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    models = {name: {"source": str(folder)} for name, folder in folders.items()}
    with make_client(ClassifyEndpoint(), models=models, real=True) as made:
        yield made


@torch.inference_mode()
def logits_of(folder: Path, texts: list[str]) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = [tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"] for text in texts]
    return torch.cat([model(input_ids=one, attention_mask=torch.ones_like(one)).logits for one in ids])


def probs(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert all(item["num_classes"] == len(item["probs"]) for item in data)
    return np.array([item["probs"] for item in data])


@pytest.mark.parametrize("model", MODELS)
def test_probabilities(client: httpx.Client, folders: dict[str, Path], model: str) -> None:
    logits = logits_of(folders[model], TEXTS)
    answer = client.post("/classify", json={"model": model, "input": TEXTS})
    np.testing.assert_allclose(probs(answer), ACTIVATIONS[model](logits), atol=1e-5)
    assert float(logits.std()) > 0.1
    raw = client.post("/v1/classify", json={"model": model, "input": TEXTS, "use_activation": False})
    np.testing.assert_allclose(probs(raw), logits, atol=2e-5)
    names = {0: "NEG", 1: "NEUTRAL", 2: "POS"} if model == "three" else {number: f"LABEL_{number}" for number in range(20)}
    assert [item["label"] for item in answer.json()["data"]] == [names[int(place)] for place in logits.argmax(-1)]


def test_a_label_without_a_name_is_null(client: httpx.Client) -> None:
    answer = client.post("/classify", json={"model": "hole", "input": ["a", "b", "abc", "xyz", "hello", "never"]})
    data = answer.json()["data"]
    for item in data:
        assert item["label"] == ("last" if int(np.argmax(item["probs"])) == 2 else None)
    assert {item["label"] for item in data} >= {None}


def test_as_transformers_pipeline(client: httpx.Client, folders: dict[str, Path]) -> None:
    classify = pipeline("text-classification", model=str(folders["three"]), device="cpu", top_k=None)
    got = client.post("/classify", json={"model": "three", "input": TEXTS[0]}).json()["data"][0]
    expected = {entry["label"]: entry["score"] for entry in classify([TEXTS[0]])[0]}
    for name, value in zip(("NEG", "NEUTRAL", "POS"), got["probs"], strict=True):
        assert abs(expected[name] - value) <= 1e-5


def test_saturated_logits_do_not_become_one(tmp_path: Path) -> None:
    """In bfloat16 a sigmoid is exactly 1 from 6 on; scores of different texts stay different."""
    folder = save_checkpoint(tmp_path / "sure", "bert", head=HEAD, num_labels=1, dtype=torch.bfloat16)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    model.classifier.bias.data.fill_(8.0)
    model.save_pretrained(folder)
    table = {"source": str(folder), "dtype": "bfloat16"}
    with make_client(ClassifyEndpoint(), models={"sure": table}, real=True) as client:
        values = probs(client.post("/classify", json={"input": TEXTS}))[:, 0]
    assert len(set(values)) == len(TEXTS), values
    assert ((values > 0.99) & (values < 1)).all()


def test_ids_and_truncation(client: httpx.Client) -> None:
    ids = [1, *(ord("a") - ord("!") + 4 + n for n in range(20)), 2]
    text = "".join(chr(ord("a") + n) for n in range(20))
    both = probs(client.post("/classify", json={"model": "three", "input": text}))
    np.testing.assert_allclose(probs(client.post("/classify", json={"model": "three", "input": ids})), both, atol=1e-6)
    np.testing.assert_allclose(probs(client.post("/classify", json={"model": "three", "input": [ids, ids]})), [both[0], both[0]], atol=1e-6)
    cut = client.post("/classify", json={"model": "three", "input": "ab" * 200, "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 128
    assert "202" in check_error(client.post("/classify", json={"model": "three", "input": ["a", "ab" * 100]}), 400)


def test_messages_where_there_is_a_template(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "chat", "bert", head=HEAD, num_labels=3)
    path = folder / "tokenizer_config.json"
    template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    with make_client(ClassifyEndpoint(), models={"chat": {"source": str(folder)}}, real=True) as client:
        for more, rendered in (({}, "<s>user: hi</s><s>assistant: no</s>"), ({"add_generation_prompt": True}, None)):
            got = probs(client.post("/classify", json={"messages": messages, **more}))
            text = rendered or "<s>user: hi</s><s>assistant: no</s><s>assistant: "
            same = probs(client.post("/classify", json={"input": text, "add_special_tokens": False}))
            np.testing.assert_allclose(got, same, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": "a", "use_activation": True, "activation": False}, "activation"),
        ({"input": "a", "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ],
    ids=str,
)
def test_bad_requests_name_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/classify", json={"model": "three", **body})
    check_error(answer, 400)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["torch.nn.functional.relu", "os.system", "torch.nn.modules.activation.NoSuch"])
def test_activations_of_a_model_are_torchs_own(tmp_path: Path, path: str) -> None:
    folder = save_checkpoint(tmp_path / "odd", "bert", head=HEAD, num_labels=1, sentence_transformers={"activation_fn": path})
    with pytest.raises(ModelError, match="activation"), make_client(ClassifyEndpoint(), models={"odd": {"source": str(folder)}}, real=True):
        pass


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_architectures(tmp_path: Path, kind: str) -> None:
    """A head of texts, whatever it reads of their states, alone and among others."""
    more: dict[str, Any] = {"classifier_pooling": "mean"} if kind == "modernbert" else {}
    folder = save_checkpoint(tmp_path / kind, kind, head=HEAD, num_labels=3, **more)
    logits = logits_of(folder, TEXTS)
    with make_client(ClassifyEndpoint(), models={kind: {"source": str(folder)}}, real=True) as client:
        execution = client.get(f"/v1/models/{kind}").json()["execution"]
        got = probs(client.post("/classify", json={"input": TEXTS, "use_activation": False}))
    np.testing.assert_allclose(got, logits, atol=2e-5, rtol=1e-4)
    assert execution == ("buckets" if kind in IN_BUCKETS else "packed")


@pytest.mark.parametrize("kind", ["bert", "qwen2", "modernbert"])
def test_one_logit_in_half_precision(tmp_path: Path, kind: str) -> None:
    """A single number has no angle: which states the head reads is told by its size."""
    more: dict[str, Any] = {"classifier_pooling": "mean"} if kind == "modernbert" else {}
    folder = save_checkpoint(tmp_path / kind, kind, head=HEAD, num_labels=1, **more)
    logits = logits_of(folder, TEXTS)
    table = {"source": str(folder), "dtype": "bfloat16"}
    with make_client(ClassifyEndpoint(), models={kind: table}, real=True) as client:
        got = probs(client.post("/classify", json={"input": TEXTS, "use_activation": False}))
    np.testing.assert_allclose(got, logits, atol=0.1 * float(logits.abs().max()))
