"""Family C: classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.cases.bench import Bench, case


def classify(scorer: Bench, model: str, given: Any = "x", **fields: Any) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = scorer.post("/classify", {"model": model, "input": given, **fields})["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert all(item["num_classes"] == len(item["probs"]) for item in data)
    return data


@torch.inference_mode()
def logits(folder: Path, text: str) -> Any:
    features = AutoTokenizer.from_pretrained(folder)([text], return_tensors="pt")
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()(**features).logits[0]


@case("C01")
def one_label_or_several(scorer: Bench, heads: dict[str, Path]) -> None:
    multi, single = logits(heads["clf-multi"], "x"), logits(heads["clf-single"], "x")
    np.testing.assert_allclose(classify(scorer, "clf-multi")[0]["probs"], multi.sigmoid(), atol=1e-5)
    probabilities = classify(scorer, "clf-single")[0]["probs"]
    np.testing.assert_allclose(probabilities, single.softmax(-1), atol=1e-5)
    assert abs(sum(probabilities) - 1) <= 1e-5
    for model, expected in (("clf-multi", multi), ("clf-single", single)):
        np.testing.assert_allclose(classify(scorer, model, use_activation=False)[0]["probs"], expected, atol=1e-4)


@case("C02")
def one_class(scorer: Bench, heads: dict[str, Path]) -> None:
    data = classify(scorer, "bert-ce", ["good", "bad"])
    assert [item["num_classes"] for item in data] == [1, 1]
    for text, item in zip(("good", "bad"), data, strict=True):
        np.testing.assert_allclose(item["probs"], logits(heads["bert-ce"], text).sigmoid(), atol=1e-5)
    assert data[0]["probs"] != data[1]["probs"]


@case("C03")
def regression(scorer: Bench, heads: dict[str, Path]) -> None:
    for model in ("clf-regression", "clf-regression-3"):
        (item,) = classify(scorer, model)
        np.testing.assert_allclose(item["probs"], logits(heads[model], "x"), atol=1e-4)
        assert item["label"].startswith("LABEL_")


@case("C04")
def names(scorer: Bench) -> None:
    texts = [f"text number {number}" for number in range(20)]
    for model, known in (("clf-named", ["NEG", "POS"]), ("clf-unnamed", ["LABEL_0", "LABEL_1"]), ("clf-hole", [None, "POS"])):
        for item in classify(scorer, model, texts):
            assert item["label"] == known[int(np.argmax(item["probs"]))]


@case("C05")
def order(scorer: Bench, heads: dict[str, Path]) -> None:
    for text, item in zip("abc", classify(scorer, "clf-single", ["a", "b", "c"]), strict=True):
        expected = logits(heads["clf-single"], text).softmax(-1)
        np.testing.assert_allclose(item["probs"], expected, atol=1e-5)
        assert item["label"] == f"LABEL_{int(expected.argmax())}"


@case("C06")
def twenty_classes(scorer: Bench, heads: dict[str, Path]) -> None:
    (item,) = classify(scorer, "clf-20")
    assert item["num_classes"] == 20
    np.testing.assert_allclose(item["probs"], logits(heads["clf-20"], "x").softmax(-1), atol=1e-5)
