"""The request shapes that text-embeddings-inference documents, and what it says of wrong ones, over a real socket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from jackfield.testing import RunningServer, make_client
from jackfield_tei import TeiEndpoint
from plugins.tei.tests.conftest import logits_of, states_of, vectors_of
from tests.http.raw import check_error

TEXTS = ["Today is a nice day", "I like you"]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(f"/tei{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(torch.from_numpy(logits).softmax(-1))


def sigmoid(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(torch.from_numpy(logits).sigmoid())


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """What the error says, in the one shape."""
    check_error(answer, status)
    detail: dict[str, Any] = answer.json()["error"]
    return detail


# Vectors


def test_a_text_and_a_list_of_texts(client: httpx.Client, folders: dict[str, Path]) -> None:
    np.testing.assert_allclose(post(client, "/embed", inputs=TEXTS[0]), vectors_of(folders["base"], TEXTS[:1]), atol=1e-5)
    np.testing.assert_allclose(post(client, "/embed", inputs=TEXTS), vectors_of(folders["base"], TEXTS), atol=1e-5)


def test_token_ids_of_one_of_several_and_beside_texts(client: httpx.Client, folders: dict[str, Path]) -> None:
    ids = AutoTokenizer.from_pretrained(folders["base"])(TEXTS)["input_ids"]
    both = vectors_of(folders["base"], TEXTS)
    np.testing.assert_allclose(post(client, "/embed", inputs=ids[0]), both[:1], atol=1e-5)
    np.testing.assert_allclose(post(client, "/embed", inputs=ids), both, atol=1e-5)
    np.testing.assert_allclose(post(client, "/embed", inputs=[TEXTS[0], ids[1]]), both, atol=1e-5)


def test_vectors_as_they_are(client: httpx.Client, folders: dict[str, Path]) -> None:
    means = [states.mean(axis=0) for states in states_of(folders["base"], TEXTS)]
    np.testing.assert_allclose(post(client, "/embed", inputs=TEXTS, normalize=False), means, atol=1e-4)


def test_dimensions(folders: dict[str, Path]) -> None:
    whole = vectors_of(folders["base"], TEXTS)[:, :8]
    with make_client(TeiEndpoint(), models={"base": {"source": str(folders["base"]), "matryoshka": True}}, real=True) as client:
        given = post(client, "/embed", inputs=TEXTS, dimensions=8)
        np.testing.assert_allclose(given, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-5)
        assert refused(client.post("/tei/embed", json={"inputs": "a", "dimensions": 0}), 400)["param"] == "dimensions"


def test_every_token(client: httpx.Client, folders: dict[str, Path]) -> None:
    given = post(client, "/embed_all", inputs=TEXTS)
    assert [len(rows) for rows in given] == [len(states) for states in states_of(folders["base"], TEXTS)]
    for rows, states in zip(given, states_of(folders["base"], TEXTS), strict=True):
        np.testing.assert_allclose(rows, states, atol=1e-4)
    assert len(post(client, "/embed_all", inputs="x")) == 1


def test_similarity(client: httpx.Client, folders: dict[str, Path]) -> None:
    sentences = ["That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    source, *others = vectors_of(folders["base"], ["That is a happy person", *sentences])
    inputs = {"sentences": sentences, "source_sentence": "That is a happy person"}
    right = [float(source @ other) for other in others]
    for body in ({"inputs": inputs}, {"inputs": inputs, "parameters": {}}, {"inputs": inputs, "parameters": {"truncate": True}}):
        assert post(client, "/similarity", **body) == pytest.approx(right, abs=1e-5)


def test_instructions_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["base"], tmp_path / "prompted")
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with make_client(TeiEndpoint(), models={"prompted": {"source": str(folder)}}, real=True) as client:
        assert post(client, "/embed", inputs="a", prompt_name="query") == post(client, "/embed", inputs="query: a")
        assert post(client, "/tokenize", inputs="a", prompt_name="query") == post(client, "/tokenize", inputs="query: a")
        pair = {"source_sentence": "a", "sentences": ["b"]}
        both = {"source_sentence": "query: a", "sentences": ["query: b"]}
        assert post(client, "/similarity", inputs=pair, parameters={"prompt_name": "query"}) == post(client, "/similarity", inputs=both)
        assert refused(client.post("/tei/embed", json={"inputs": [70], "prompt_name": "query"}), 400)["param"] == "inputs"


# Labels and scores


def test_labels_of_a_text_come_likeliest_first(client: httpx.Client, folders: dict[str, Path]) -> None:
    logits = logits_of(folders["mood"], [("I like you.",)])[0]
    names = ["sad", "calm", "glad"]
    given = post(client, "/predict", inputs="I like you.")
    order = np.argsort(logits)[::-1]
    assert [one["label"] for one in given] == [names[i] for i in order]
    assert list(given[0]) == ["score", "label"]
    np.testing.assert_allclose([one["score"] for one in given], softmax(logits)[order], atol=1e-5)
    raw = post(client, "/predict", inputs=["I like you."], raw_scores=True)
    np.testing.assert_allclose([one["score"] for one in raw], logits[order], atol=1e-4)


def test_two_texts_are_a_pair_and_lists_are_a_batch(client: httpx.Client, folders: dict[str, Path]) -> None:
    items: list[tuple[str, ...]] = [("a",), ("b", "c")]
    right = softmax(logits_of(folders["mood"], items))
    batch = post(client, "/predict", inputs=[list(item) for item in items])
    for given, wanted in zip(batch, right, strict=True):
        np.testing.assert_allclose([one["score"] for one in given], np.sort(wanted)[::-1], atol=1e-5)
    assert post(client, "/predict", inputs=["b", "c"]) == batch[1]
    documented, _ = post(client, "/predict", inputs=[["I like you."], ["I hate pineapples"]])
    alone = post(client, "/predict", inputs="I like you.")
    assert [one["label"] for one in documented] == [one["label"] for one in alone]
    assert [one["score"] for one in documented] == pytest.approx([one["score"] for one in alone], abs=1e-5)


def test_a_ranker_predicts_its_one_label(client: httpx.Client, folders: dict[str, Path]) -> None:
    given = post(client, "/predict", inputs="x", model="ranker")
    assert given == [{"label": "LABEL_0", "score": pytest.approx(float(sigmoid(logits_of(folders["ranker"], [("x",)]))[0, 0]), abs=1e-5)}]


def test_texts_by_their_scores(client: httpx.Client, folders: dict[str, Path]) -> None:
    query, texts = "What is Deep Learning?", ["Deep Learning is not...", "Deep learning is...", "x"]
    logits = logits_of(folders["ranker"], [(query, text) for text in texts])[:, 0]
    order = [int(i) for i in np.argsort(logits)[::-1]]
    given = post(client, "/rerank", query=query, texts=texts)
    assert [list(one) for one in given] == [["index", "score"]] * 3
    assert [one["index"] for one in given] == order
    np.testing.assert_allclose([one["score"] for one in given], sigmoid(logits)[order], atol=1e-5)
    raw = post(client, "/rerank", query=query, texts=texts, raw_scores=True, return_text=True)
    assert [list(one) for one in raw] == [["index", "text", "score"]] * 3
    assert [one["text"] for one in raw] == [texts[i] for i in order]
    np.testing.assert_allclose([one["score"] for one in raw], logits[order], atol=1e-4)


def test_of_equal_texts_the_last_comes_first(client: httpx.Client) -> None:
    places = [one["index"] for one in post(client, "/rerank", query="test", texts=["test", "other", "test"])]
    assert places in ([2, 0, 1], [1, 2, 0])


# Tokens


def test_tokens_have_their_places_in_bytes(client: httpx.Client, folders: dict[str, Path]) -> None:
    text = "ab é 北京"
    (tokens,) = post(client, "/tokenize", inputs=text)
    assert [token["id"] for token in tokens] == AutoTokenizer.from_pretrained(folders["base"])(text)["input_ids"]
    assert list(tokens[0]) == ["id", "text", "special", "start", "stop"]
    assert (tokens[0]["special"], tokens[0]["start"], tokens[0]["stop"]) == (True, None, None)
    inner = [token for token in tokens if not token["special"]]
    assert (inner[0]["start"], inner[-1]["stop"]) == (0, len(text.encode()))
    for token in inner:
        if token["stop"] - token["start"] == len(token["text"].encode()):
            assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    assert post(client, "/tokenize", inputs=[text, "x"])[0] == tokens
    assert post(client, "/tokenize", inputs=text, add_special_tokens=False) == [inner]


def test_ids_become_texts(client: httpx.Client, folders: dict[str, Path]) -> None:
    ids = AutoTokenizer.from_pretrained(folders["base"])("hello")["input_ids"]
    assert post(client, "/decode", ids=ids) == ["hello"]
    assert post(client, "/decode", ids=[ids, ids[1:-1]]) == ["hello", "hello"]
    assert post(client, "/decode", ids=ids, skip_special_tokens=False) == [AutoTokenizer.from_pretrained(folders["base"]).decode(ids)]


def test_info(client: httpx.Client) -> None:
    info = client.get("/tei/info").json()
    assert info["model_id"] == "base"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["model_dtype"], info["auto_truncate"]) == (128, "float32", False)
    assert client.get("/tei/info", params={"model": "ranker"}).json()["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}
    assert client.get("/tei/info", params={"model": "mood"}).json()["model_type"]["classifier"]["label2id"]["glad"] == 2


# The root


def test_the_root_is_what_the_model_does(client: httpx.Client) -> None:
    assert post(client, "", inputs=TEXTS) == post(client, "/embed", inputs=TEXTS)
    pair = {"source_sentence": "a", "sentences": ["b"]}
    assert post(client, "", inputs=pair) == post(client, "/similarity", inputs=pair)
    assert post(client, "", inputs="x", model="mood") == post(client, "/predict", inputs="x")
    assert post(client, "", query="a", texts=["b", "c"], model="ranker") == post(client, "/rerank", query="a", texts=["b", "c"])
    assert post(client, "/", inputs="x") == post(client, "/embed", inputs="x")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": 7}, "inputs"),
        ({"inputs": {"sentences": ["b"]}}, "inputs.source_sentence"),
        ({"query": "a", "texts": ["b"]}, "query"),
        ({"inputs": "a", "model": "ranker"}, "query"),
        ({"inputs": [["a", 1]], "model": "mood"}, "inputs[0][1]"),
    ],
)
def test_wrong_bodies_at_the_root(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert refused(client.post("/tei", json=body), 400)["param"] == param


def test_it_can_be_mounted_at_the_servers_own_root(folders: dict[str, Path]) -> None:
    models = {"base": {"source": str(folders["base"])}}
    with make_client(TeiEndpoint(), models=models, endpoints={"tei": {"prefix": ""}}, real=True) as client:
        assert client.post("/", json={"inputs": "x"}).json() == client.post("/embed", json={"inputs": "x"}).json()
        assert "/" in client.get("/openapi.json").json()["paths"]


# What is cut, counted, limited, refused


def test_too_long_is_an_error_or_is_cut(client: httpx.Client, folders: dict[str, Path]) -> None:
    long = "a word " * 60
    detail = refused(client.post("/tei/embed", json={"inputs": ["x", long]}), 400)
    assert detail["param"] == "inputs[1]"
    assert "truncate" in detail["message"]
    ids = AutoTokenizer.from_pretrained(folders["base"])(long)["input_ids"]
    right, left = [*ids[:127], ids[-1]], [ids[0], *ids[-127:]]
    for side, kept in (("Right", right), ("left", left), ("right", right), ("Left", left), (None, right)):
        assert post(client, "/embed", inputs=long, truncate=True, truncation_direction=side) == post(client, "/embed", inputs=kept)
    models = {"base": {"source": str(folders["base"])}}
    with make_client(TeiEndpoint(), models=models, endpoints={"tei": {"auto_truncate": True}}, real=True) as cutting:
        assert cutting.post("/tei/embed", json={"inputs": long}).status_code == 200
        refused(cutting.post("/tei/embed", json={"inputs": long, "truncate": False}), 400)


def test_headers_count_what_was_computed(client: httpx.Client) -> None:
    headers = client.post("/tei/rerank", json={"query": "ab", "texts": ["cde", "fé"]}).headers
    assert headers["x-compute-characters"] == str(2 * 2 + 3 + 2)
    names = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-inference-time", "x-compute-tokens")
    assert all(headers[name].isdigit() for name in names)
    assert headers["x-compute-type"] == "cpu"
    assert "x-compute-time" not in client.post("/tei/tokenize", json={"inputs": "a"}).headers


def test_a_batch_has_a_limit(folders: dict[str, Path]) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/embed", {"inputs": ["a"] * 3}),
        ("/predict", {"inputs": [["a"]] * 3}),
        ("/rerank", {"query": "q", "texts": ["a"] * 3}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 2}}),
        ("/tokenize", {"inputs": ["a"] * 3}),
        ("/decode", {"ids": [[70]] * 3}),
    ]
    with make_client(TeiEndpoint(), endpoints={"tei": {"max_client_batch_size": 2}}) as client:
        for path, body in bodies:
            detail = refused(client.post(f"/tei{path}", json=body), 413)
            assert "batch size 3 > maximum allowed batch size 2" in detail["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {"inputs": ""}, "inputs"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": ["a", ""]}, "inputs[1]"),
        ("/embed", {"inputs": [[]]}, "inputs[0]"),
        ("/embed", {"inputs": ["a", 7]}, "inputs[1]"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "prompt_name"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ("/embed_all", {"inputs": [70, 1000]}, "inputs"),
        ("/rerank", {"query": "q", "texts": []}, "texts"),
        ("/rerank", {"query": "", "texts": ["a"]}, "query"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "inputs"),
        ("/predict", {"inputs": []}, "inputs"),
        ("/predict", {"inputs": [["a"], "b", []]}, "inputs[2]"),
        ("/predict", {"inputs": ["a", ["b", "c", "d"]]}, "inputs[1]"),
        ("/predict", {"inputs": ""}, "inputs"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", ""]}}, "inputs.sentences[1]"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"prompt_name": "x"}},
            "parameters.prompt_name",
        ),
        ("/tokenize", {"inputs": []}, "inputs"),
        ("/tokenize", {"inputs": "a", "prompt_name": "x"}, "prompt_name"),
        ("/decode", {"ids": []}, "ids"),
        ("/decode", {"ids": [[70], []]}, "ids[1]"),
        ("/decode", {"ids": [70, [71]]}, "ids[0]"),
    ],
)
def test_what_is_refused_and_where(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    detail = refused(client.post(f"/tei{path}", json=body), 400)
    assert (detail["param"] or "").startswith(param)


def test_a_model_of_another_kind_is_told_what_it_can(client: httpx.Client) -> None:
    for path, body, model in (
        ("/embed", {"inputs": "a"}, "ranker"),
        ("/predict", {"inputs": "a"}, "base"),
        ("/rerank", {"query": "q", "texts": ["a"]}, "mood"),
    ):
        detail = refused(client.post(f"/tei{path}", json={**body, "model": model}), 400)
        assert detail["param"] == "model"
        assert "it can:" in detail["message"]


def test_sparse_vectors_are_refused_by_name(client: httpx.Client) -> None:
    assert "/embed_sparse" in refused(client.post("/tei/embed_sparse", json={"inputs": "I like you."}), 501)["message"]
    assert list(client.get("/openapi.json").json()["paths"]["/tei/embed_sparse"]["post"]["responses"]) == ["501"]
