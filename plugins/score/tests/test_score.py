"""Scores and reranking by real tiny models over a real socket, against sentence-transformers computed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from jackfield.testing import make_client
from jackfield_score import RerankEndpoint, ScoreEndpoint
from tests.checkpoints import save_checkpoint, save_sentence_transformer
from tests.http.raw import check_error

IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "6.0"}
PAIRS = [("what is ai?", "machines"), ("what is ai?", "pizza, with cheese"), ("", "x"), ("a", ""), ("w" * 60, "d" * 40)]
DOCUMENTS = ["machines that learn", "pizza", "", "a much longer document than all of the others, " * 2, "pizza"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    head = "ForSequenceClassification"
    for name, activation in (("saved", None), ("saved-tanh", torch.nn.Tanh()), ("saved-identity", torch.nn.Identity())):
        made = save_checkpoint(root / f"plain-{name}", "bert", head=head, num_labels=1, seed=4)
        CrossEncoder(str(made), device="cpu", activation_fn=activation).save_pretrained(str(root / name))
    return {
        "ce": save_checkpoint(root / "ce", "bert", head=head, num_labels=1),
        "identity": save_checkpoint(root / "identity", "bert", head=head, num_labels=1, seed=1, sentence_transformers=IDENTITY),
        "roberta": save_checkpoint(root / "roberta", "roberta", head=head, num_labels=1, seed=2),
        **{name: root / name for name in ("saved", "saved-tanh", "saved-identity")},
        "three": save_checkpoint(root / "three", "bert", head=head, num_labels=3, seed=3),
        "bi": save_sentence_transformer(root / "bi", "bert", max_seq_length=128, prompts={"query": "q: ", "document": "d: "}),
    }


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    models = {name: {"source": str(folder)} for name, folder in folders.items()}
    with make_client(ScoreEndpoint(), RerankEndpoint(), models=models, real=True) as made:
        yield made


def scores(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["score"] for item in data]


@pytest.mark.parametrize("model", ["ce", "identity", "roberta", "saved", "saved-tanh", "saved-identity"])
def test_scores_are_those_of_sentence_transformers(client: httpx.Client, folders: dict[str, Path], model: str) -> None:
    pairs = [pair for pair in PAIRS if pair[0]]
    expected = CrossEncoder(str(folders[model]), device="cpu").predict(pairs, batch_size=1)
    queries, documents = map(list, zip(*pairs, strict=True))
    got = scores(client.post("/score", json={"model": model, "queries": queries, "documents": documents}))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.ptp(got) > 0.01


def test_no_activation_gives_logits(client: httpx.Client, folders: dict[str, Path]) -> None:
    body = {"model": "ce", "text_1": "what is ai?", "text_2": ["machines", "pizza"]}
    logits = CrossEncoder(str(folders["ce"]), device="cpu").predict(
        [("what is ai?", "machines"), ("what is ai?", "pizza")], activation_fn=torch.nn.Identity()
    )
    np.testing.assert_allclose(scores(client.post("/v1/score", json={**body, "use_activation": False})), logits, atol=1e-5)
    np.testing.assert_allclose(scores(client.post("/score", json=body)), 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_segments_count(client: httpx.Client, folders: dict[str, Path]) -> None:
    """The fixture shows it when the second text's tokens are taken for the first's."""
    encoder = CrossEncoder(str(folders["ce"]), device="cpu")
    features = encoder.tokenizer(["what is ai?"], ["machines"], return_tensors="pt")
    assert features["token_type_ids"].any()
    with torch.inference_mode():
        wrong = encoder.model(features["input_ids"], token_type_ids=torch.zeros_like(features["input_ids"])).logits.sigmoid()
    (right,) = scores(client.post("/score", json={"model": "ce", "text_1": "what is ai?", "text_2": "machines"}))
    assert abs(right - float(wrong)) > 1e-4


def test_an_embedder_scores_by_cosine(client: httpx.Client, folders: dict[str, Path]) -> None:
    """With its instructions for queries and documents, each text embedded once."""
    model = SentenceTransformer(str(folders["bi"]), device="cpu")
    documents = ["machines", "pizza", "machines"]
    expected = (model.encode_query(["what is ai?"]) @ model.encode_document(documents).T)[0]
    answer = client.post("/score", json={"model": "bi", "queries": "what is ai?", "documents": documents})
    np.testing.assert_allclose(scores(answer), expected, atol=1e-5)
    lengths = [len("q: what is ai?") + 2, *(len(f"d: {text}") + 2 for text in documents)]
    assert answer.json()["usage"]["prompt_tokens"] == sum(lengths)
    assert "cosine" in check_error(
        client.post("/score", json={"model": "bi", "queries": "a", "documents": "b", "use_activation": False}), 400
    )


@pytest.mark.parametrize("model", ["ce", "bi"])
@pytest.mark.parametrize(
    ("queries", "documents", "count"),
    [("q", "d", 1), ("q", ["d1", "d2"], 2), (["q"], ["d1", "d2"], 2), (["q1", "q2"], ["d1", "d2"], 2)],
    ids=["1:1", "1:N", "[1]:N", "N:N"],
)
def test_shapes(client: httpx.Client, model: str, queries: Any, documents: Any, count: int) -> None:
    got = scores(client.post("/score", json={"model": model, "queries": queries, "documents": documents}))
    assert len(got) == count
    as_list = [queries] if isinstance(queries, str) else queries
    for place, document in enumerate([documents] if isinstance(documents, str) else documents):
        query = as_list[place if len(as_list) > 1 else 0]
        alone = scores(client.post("/score", json={"model": model, "queries": query, "documents": document}))
        np.testing.assert_allclose(alone, got[place], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries", "2 texts and documents has 3"),
        ({"queries": ["a", "b"], "documents": "c"}, "queries", "2 texts and documents has 1"),
        ({"queries": [], "documents": ["c"]}, "queries", "empty"),
        ({"queries": "a", "documents": []}, "documents", "empty"),
        ({"text_1": "", "text_2": "b"}, "text_1", "empty"),
        ({"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1[1]", "empty"),
        ({"text_1": "a"}, "text_2", "text_2"),
        ({"documents": "a"}, "queries", "queries"),
        ({"queries": "a", "text_2": "b"}, "queries", "not both"),
        ({}, "queries", "needed"),
        ({"queries": "a", "documents": ["b", "d" * 200]}, "documents[1]", "128"),
        ({"queries": "q" * 200, "documents": "b", "truncate_prompt_tokens": -1}, "queries", "first text of the pair has 200 tokens"),
        ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "129"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_requests_name_the_field(client: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = client.post("/score", content=json.dumps({"model": "ce", **body}), headers={"content-type": "application/json"})
    assert words in check_error(answer, 400)
    assert answer.json()["error"]["param"] == param


def test_a_model_of_several_labels_is_refused(client: httpx.Client) -> None:
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        message = check_error(client.post(path, json={"model": "three", **body}), 400)
        assert "3 labels" in message
        assert "it can: classify" in message


def test_long_documents_are_cut_and_the_query_is_whole(client: httpx.Client, folders: dict[str, Path]) -> None:
    long = "abcdefgh" * 40
    limit = 128
    encoder = CrossEncoder(str(folders["ce"]), device="cpu", max_length=limit)
    body = {"model": "ce", "text_1": "what is ai?", "text_2": long, "truncate_prompt_tokens": -1}
    answer = client.post("/score", json=body)
    np.testing.assert_allclose(scores(answer), encoder.predict([("what is ai?", long)]), atol=1e-5)
    assert answer.json()["usage"]["prompt_tokens"] == limit
    assert "truncated_tokens" not in answer.json()["data"][0]
    told = client.post("/score", json={**body, "text_2": [long, "short"], "return_truncation": True}).json()["data"]
    assert [item["truncated_tokens"] for item in told] == [len(long) - (limit - 3 - len("what is ai?")), 0]
    room = limit - len("what is ai?") - 3
    tail = client.post("/score", json={"model": "ce", "text_1": "what is ai?", "text_2": long[-room:]})
    np.testing.assert_allclose(scores(client.post("/score", json={**body, "truncation_side": "left"})), scores(tail), atol=1e-6)
    head = client.post("/score", json={"model": "ce", "text_1": "what is ai?", "text_2": long[:10]})
    np.testing.assert_allclose(scores(client.post("/score", json={**body, "max_tokens_per_doc": 10})), scores(head), atol=1e-6)


# Reranking


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["ce", "identity", "bi"])
def test_rerank_sorts(client: httpx.Client, model: str, path: str) -> None:
    body = {"model": model, "query": "what is ai?", "documents": DOCUMENTS}
    unsorted = scores(client.post("/score", json={"model": model, "queries": body["query"], "documents": DOCUMENTS}))
    answer = client.post(path, json=body).json()
    results = answer["results"]
    assert [result["index"] for result in results] == sorted(range(len(DOCUMENTS)), key=lambda index: (-round(unsorted[index], 5), index))
    for result in results:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
        assert abs(result["relevance_score"] - unsorted[result["index"]]) <= 1e-5
    best = client.post(path, json={**body, "top_n": 2, "return_documents": False}).json()
    assert [result["index"] for result in best["results"]] == [result["index"] for result in results[:2]]
    assert not any("document" in result for result in best["results"])
    assert len(client.post(path, json={**body, "top_n": 0}).json()["results"]) == len(DOCUMENTS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0


def test_rerank_says_what_was_cut(client: httpx.Client) -> None:
    body = {"model": "ce", "query": "ab", "documents": ["d" * 200, "d"], "return_truncation": True}
    results = client.post("/rerank", json=body).json()["results"]
    assert {result["index"]: result["truncated_tokens"] for result in results} == {0: 200 - (128 - 3 - 2), 1: 0}
    for model, expected in (("ce", 190), ("bi", 200 + len("d: ") + 2 - 10)):
        results = client.post("/rerank", json={**body, "model": model, "max_tokens_per_doc": 10}).json()["results"]
        assert {result["index"]: result["truncated_tokens"] for result in results} == {0: expected, 1: 0}


def test_structured_documents(client: httpx.Client) -> None:
    documents = [{"text": "machines", "id": 7}, {"title": "Pizza", "rank": 2, "body": "with cheese"}, "plain"]
    read = ["machines", "title: Pizza\nrank: 2\nbody: with cheese", "plain"]
    body = {"model": "ce", "query": "what is ai?"}
    got = client.post("/rerank", json={**body, "documents": documents}).json()["results"]
    expected = client.post("/rerank", json={**body, "documents": read}).json()["results"]
    assert [(r["index"], r["relevance_score"]) for r in got] == [(r["index"], r["relevance_score"]) for r in expected]
    assert {r["index"]: r["document"] for r in got} == {0: documents[0], 1: documents[1], 2: {"text": "plain"}}
    chosen = {**body, "documents": documents[1:2], "rank_fields": ["body", "title"]}
    alone = {**body, "documents": ["body: with cheese\ntitle: Pizza"]}
    (one,), (other,) = (client.post("/rerank", json=each).json()["results"] for each in (chosen, alone))
    assert one["relevance_score"] == other["relevance_score"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", {}]}, "documents[1]"),
        ({"query": "a", "documents": ["b", {"x": [1]}]}, "documents[1]"),
        ({"query": "a", "documents": [{"x": "y"}], "rank_fields": ["z"]}, "documents[0]"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
        ({"query": "a", "documents": ["b"], "relevant_spans": {}}, "relevant_spans"),
        ({"query": "a", "documents": ["b", 3]}, "documents[1]"),
        ({"documents": ["b"]}, "query"),
    ],
    ids=str,
)
def test_bad_reranks_name_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/rerank", json={"model": "ce", **body})
    check_error(answer, 400)
    assert answer.json()["error"]["param"] == param


def test_coheres_client(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "ce", "query": "what is ai?", "documents": ["pizza", "machines"]}
    expected = [(r["index"], r["relevance_score"]) for r in client.post("/v2/rerank", json=body).json()["results"]]
    base_url = str(client.base_url).rstrip("/")
    second = cohere.ClientV2("none", base_url=base_url).rerank(**body, top_n=2, max_tokens_per_doc=100)
    assert [(r.index, r.relevance_score) for r in second.results] == expected
    first = cohere.Client("none", base_url=base_url).rerank(**body, return_documents=True)
    assert [(r.index, r.relevance_score) for r in first.results] == expected
    assert [r.document.text for r in first.results if r.document] == [body["documents"][index] for index, _ in expected]
