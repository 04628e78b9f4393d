"""Family B: scores and reranking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.cases.bench import Bench, case, steps

PAIR = {"text_1": "What is AI?", "text_2": "Machine learning."}


def body(case_id: str, number: int = 0) -> dict[str, Any]:
    given: dict[str, Any] = steps(case_id)[number]["body"]
    return given


def scores(answer: dict[str, Any]) -> list[float]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["score"] for item in answer["data"]]


@torch.inference_mode()
def logit(folder: Path, query: str, document: str, *, segments: bool = True, **options: Any) -> float:
    """Of a pair, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    features = tokenizer([query], [document], return_tensors="pt", **options)
    if not segments:
        features["token_type_ids"].zero_()
    return float(AutoModelForSequenceClassification.from_pretrained(folder).eval()(**features).logits)


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


@case("B02")
def activations_of_the_models_files(scorer: Bench, heads: dict[str, Path]) -> None:
    for model in ("bert-ce-id", "bert-ce-id-old"):
        expected = logit(heads[model], "q", "d")
        (got,) = scores(scorer.post("/score", {"model": model, "text_1": "q", "text_2": "d"}))
        assert abs(got - expected) <= 1e-5
        (result,) = scorer.post("/v1/rerank", {"model": model, "query": "q", "documents": ["d"]})["results"]
        assert abs(result["relevance_score"] - expected) <= 1e-5
        assert abs(expected - sigmoid(expected)) > 0.05, "the fixture would not show a sigmoid"


@case("B04")
def the_best_of_all(scorer: Bench) -> None:
    (best,) = scorer.post("/v1/rerank", body("B04"))["results"]
    everything = scorer.post("/v1/rerank", {**body("B04"), "top_n": None})["results"]
    values = [result["relevance_score"] for result in everything]
    assert len(values) == 3
    assert values == sorted(values, reverse=True)
    assert best["index"] == everything[0]["index"]


@case("B07")
def equal_documents_keep_their_places(scorer: Bench) -> None:
    results = scorer.post("/v1/rerank", body("B07"))["results"]
    same = [result for result in results if result["document"]["text"] == "same"]
    assert {result["index"] for result in results} == {0, 1, 2, 3}
    assert [result["index"] for result in same] == [0, 2, 3]
    assert np.ptp([result["relevance_score"] for result in same]) <= 1e-6


@case("B09")
def empty_texts(scorer: Bench, heads: dict[str, Path]) -> None:
    """An empty query is refused, an empty document is scored as what it is (plugins/score/README.md)."""
    assert scorer.post("/v1/rerank", body("B09"), 400)["error"]["param"] == "query"
    alone = scorer.post("/score", {"model": "bert-ce", "text_1": "What is AI?", "text_2": ""})
    assert alone["usage"]["prompt_tokens"] == 7
    among = scorer.post("/score", {"model": "bert-ce", "text_1": "What is AI?", "text_2": ["a", "", "b"]})
    expected = sigmoid(logit(heads["bert-ce"], "What is AI?", ""))
    np.testing.assert_allclose([scores(alone)[0], scores(among)[1]], expected, atol=1e-5)


@case("B10")
def too_long(scorer: Bench) -> None:
    error = scorer.post("/score", body("B10"), 400)["error"]
    assert "512" in error["message"]
    assert "5004" in error["message"]
    assert error["param"] == "text_2[1]"
    assert scores(scorer.post("/score", body("B10", 1)))
    assert len(scores(scorer.post("/score", {**body("B10"), "truncate_prompt_tokens": -1}))) == 2


@case("B11")
def the_query_stays(scorer: Bench, heads: dict[str, Path]) -> None:
    given = body("B11")
    expected = logit(heads["bert-ce"], given["text_1"], given["text_2"], truncation=True, max_length=512)
    answer = scorer.post("/score", given)
    np.testing.assert_allclose(scores(answer), sigmoid(expected), atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == 512
    ends = {**given, "text_2": f"{given['text_2']} end", "truncation_side": "left"}
    assert abs(scores(scorer.post("/score", ends))[0] - sigmoid(expected)) > 1e-4


@case("B12")
def segments(scorer: Bench, heads: dict[str, Path]) -> None:
    for document in ("Machine learning.", "Machine [SEP] learning."):
        (got,) = scores(scorer.post("/score", {**body("B12"), "text_2": document}))
        assert abs(got - sigmoid(logit(heads["bert-ce"], "What is AI?", document))) <= 1e-5
        assert abs(got - sigmoid(logit(heads["bert-ce"], "What is AI?", document, segments=False))) > 1e-4


@case("B13")
def usage(scorer: Bench) -> None:
    first = scorer.post("/score", body("B13"))["usage"]
    assert first["prompt_tokens"] == first["total_tokens"] == 10
    second = scorer.post("/v1/rerank", body("B13", 1))["usage"]
    assert second["prompt_tokens"] == second["total_tokens"] == 33


@case("B14")
def several_labels(scorer: Bench) -> None:
    for number, path in enumerate(("/v1/rerank", "/score")):
        assert "3 labels" in scorer.post(path, body("B14", number), 400)["error"]["message"]


@case("B15")
def shapes(scorer: Bench) -> None:
    given = [step["body"] for step in steps("B15")]
    for one, count in zip(given[:3], (1, 2, 2), strict=True):
        assert len(scores(scorer.post("/score", one))) == count
    for one in given[3:5]:
        scorer.post("/score", one, 400)
    by_place = scores(scorer.post("/score", given[2]))
    (second,) = scores(scorer.post("/score", {**given[2], "text_1": given[2]["text_1"][1], "text_2": given[2]["text_2"][1]}))
    assert abs(by_place[1] - second) <= 1e-5


@case("B16")
def embedders_rerank_and_rerankers_do_not_embed(scorer: Bench) -> None:
    results = scorer.post("/v1/rerank", body("B16"))["results"]
    assert results[0]["document"]["text"] == "a cat"
    assert "score" in scorer.post("/v1/embeddings", body("B16", 1), 400)["error"]["message"]


@case("B17")
def neighbours_do_not_matter(scorer: Bench) -> None:
    documents = [" ".join(["word", "other", "third"][n % 3] for n in range(count)) for count in (1, 3, 7, 20, 45, 80, 120, 170, 230, 300)]
    results = scorer.post("/v1/rerank", {"model": "bert-ce", "query": "q", "documents": documents})["results"]
    alone = [scores(scorer.post("/score", {"model": "bert-ce", "text_1": "q", "text_2": document}))[0] for document in documents]
    for result in results:
        assert abs(result["relevance_score"] - alone[result["index"]]) <= 1e-5
    assert [result["index"] for result in results] == sorted(range(10), key=lambda index: -alone[index])


@case("B18")
def usual_paths(scorer: Bench) -> None:
    answers = [scorer.post(step["path"], step["body"])["results"] for step in steps("B18")[:3]]
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]
    assert scores(scorer.post("/score", {"model": "bert-ce", **PAIR})) == scores(scorer.post("/v1/score", {"model": "bert-ce", **PAIR}))
