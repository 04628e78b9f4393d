"""Family A: embeddings."""

from __future__ import annotations

import json
import time
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai

from tests.cases.bench import Bench, case, steps

PATH = "/v1/embeddings"
CAT = [0.1392, 0.0030, 0.0470, 0.0396]


def body(case_id: str, number: int = 0) -> dict[str, Any]:
    given: dict[str, Any] = steps(case_id)[number]["body"]
    return given


def cosine(one: Any, other: Any) -> float:
    return float(np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


@case("A01")
def base64_is_honoured(bench: Bench) -> None:
    encoded = bench.post(PATH, body("A01"))["data"][0]["embedding"]
    assert isinstance(encoded, str)
    assert len(b64decode(encoded)) == 1536
    floats = bench.embed(body("A01")["input"])[0]
    assert np.abs(np.frombuffer(b64decode(encoded), "<f4") - floats).max() <= 1e-6
    client = openai.OpenAI(base_url=f"{bench.server.url}/v1", api_key="x")
    assert len(client.embeddings.create(model="minilm", input="hello").data[0].embedding) == 384


@case("A02")
def base64_is_float32(bench: Bench) -> None:
    for item in bench.post(PATH, body("A02"))["data"]:
        vector = np.frombuffer(b64decode(item["embedding"]), "<f4")
        assert vector.size == 384
        assert abs(np.linalg.norm(vector) - 1) <= 1e-3


@case("A04")
def lists_of_ids(bench: Bench) -> None:
    answer = bench.post(PATH, body("A04"))
    vector = np.frombuffer(b64decode(answer["data"][0]["embedding"]), "<f4")
    assert cosine(vector, bench.embed("Hello, world!")[0]) >= 0.99999
    assert answer["usage"]["prompt_tokens"] == 6


@case("A09")
def nan_is_an_error(bench: Bench, scorer: Bench) -> None:
    for number in (0, 1):
        answer = bench.send("POST", PATH, json=body("A09", number))
        assert answer.status_code == 500
        assert "non-finite" in answer.json()["error"]["message"]
    assert bench.embed("still here")
    answer = scorer.send("POST", "/classify", json=body("A09", 2))
    assert answer.status_code == 500
    assert "non-finite" in answer.json()["error"]["message"]
    assert scorer.post("/classify", {"model": "bert-clf", "input": "still here"})["data"]


@case("A10")
def too_long(bench: Bench) -> None:
    error = bench.post(PATH, body("A10"), 400)["error"]
    assert "256" in error["message"]
    assert str(bench.post("/tokenize", {"model": "minilm", "prompt": body("A10")["input"]})["count"]) in error["message"]


@case("A11")
def truncation(bench: Bench, scorer: Bench) -> None:
    answer = bench.post(PATH, body("A11", 0))
    assert answer["usage"]["prompt_tokens"] == 256
    word = bench.post("/tokenize", {"model": "minilm", "prompt": "word", "add_special_tokens": False})["tokens"]
    assert cosine(answer["data"][0]["embedding"], bench.embed([[101, *word * 254, 102]])[0]) >= 0.99999
    assert bench.post(PATH, body("A11", 1))["usage"]["prompt_tokens"] == 16
    for number, path in ((2, "/v1/rerank"), (3, "/classify")):
        assert scorer.post(path, body("A11", number))["usage"]["prompt_tokens"] == 512
    for wrong in (0, -5, 257):
        assert bench.post(PATH, {**body("A11"), "truncate_prompt_tokens": wrong}, 400)["error"]["param"] == "truncate_prompt_tokens"


@case("A12")
def truncation_counts_special_tokens(bench: Bench) -> None:
    text = body("A12")["input"]
    ids = bench.post("/tokenize", {"model": "minilm", "prompt": text})["tokens"]
    for asked, kept in ((-1, 256), (256, 256), (255, 255)):
        answer = bench.post(PATH, {**body("A12"), "truncate_prompt_tokens": asked})
        assert answer["usage"]["prompt_tokens"] == kept
        assert cosine(answer["data"][0]["embedding"], bench.embed([[*ids[: kept - 1], 102]])[0]) >= 0.99999


@case("A13")
def one_long_word(bench: Bench) -> None:
    started = time.monotonic()
    assert bench.post(PATH, body("A13"))["usage"]["prompt_tokens"] == 3
    assert time.monotonic() - started < 5


@case("A14")
def maximum_length(bench: Bench) -> None:
    text = "".join(f"sentence number {i} about topic {i % 7}. " for i in range(120))
    answer = bench.post(PATH, {"model": "minilm", "input": text, "truncate_prompt_tokens": -1})
    assert answer["usage"]["prompt_tokens"] == 256
    ids = bench.post("/tokenize", {"model": "minilm", "prompt": text})["tokens"]
    assert len(ids) == 842
    assert cosine(answer["data"][0]["embedding"], bench.embed([[*ids[:255], 102]])[0]) >= 0.9999
    assert bench.post(PATH, {"model": "minilm", "input": "hello"})["usage"]["prompt_tokens"] == 3


@case("A15")
def dimensions_refused(bench: Bench) -> None:
    for step in steps("A15")[:5]:
        error = bench.post(PATH, step["body"], 400)["error"]
        assert error["param"] == "dimensions"
    assert "matryoshka" in bench.post(PATH, body("A15", 0), 400)["error"]["message"]
    assert len(bench.post(PATH, body("A15", 5))["data"][0]["embedding"]) == 384
    assert len(bench.post(PATH, {**body("A15"), "dimensions": 384})["data"][0]["embedding"]) == 384


@case("A16")
def shortened_and_normalised(bench: Bench) -> None:
    with ThreadPoolExecutor(2) as pool:
        short, full = pool.map(lambda n: np.array(bench.post(PATH, body("A16", n))["data"][0]["embedding"]), (0, 1))
    assert short.shape == (128,)
    assert full.shape == (384,)
    assert abs(np.linalg.norm(short) - 1) <= 1e-5
    np.testing.assert_allclose(short, full[:128] / np.linalg.norm(full[:128]), atol=1e-6)


@case("A17")
def pooling_of_both_forms(bench: Bench) -> None:
    for number in (0, 1):
        vector = np.array(bench.post(PATH, body("A17", number))["data"][0]["embedding"])
        np.testing.assert_allclose(vector[:4], CAT, atol=1e-3)
        assert abs(np.linalg.norm(vector) - 1) <= 1e-5


@case("A18")
def neighbours_do_not_matter(bench: Bench) -> None:
    together = bench.post(PATH, body("A18", 0))["data"][0]["embedding"]
    alone = bench.post(PATH, body("A18", 1))["data"][0]["embedding"]
    assert cosine(together, alone) >= 0.99999
    assert np.abs(np.subtract(together, alone)).max() <= 1e-5


@case("A19")
def order_is_kept(bench: Bench) -> None:
    texts = body("A19")["input"]
    for given in (texts, texts * 20, [texts[0]] * 10):
        for text, vector in zip(given, bench.embed(given), strict=True):
            np.testing.assert_allclose(vector, single(bench, text), atol=1e-5)


_singles: dict[str, list[float]] = {}


def single(bench: Bench, text: str) -> list[float]:
    if text not in _singles:
        _singles[text] = bench.embed(text)[0]
    return _singles[text]


@case("A20")
def parallel_requests_keep_apart(bench: Bench) -> None:
    texts = [f"unique text number {i}" + " and more" * (i % 40) for i in range(32)]
    right = np.array([single(bench, text) for text in texts])

    def ask(number: int) -> np.ndarray:
        if number % 2:
            return np.array(bench.embed(texts[number % 32])[0])
        encoded = bench.post(PATH, {"model": "minilm", "input": texts[number % 32], "encoding_format": "base64"})
        return np.frombuffer(b64decode(encoded["data"][0]["embedding"]), "<f4")

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(128)))
    for number, vector in enumerate(answers):
        similarities = right @ vector
        assert similarities[number % 32] >= 0.99999
        assert similarities.argmax() == number % 32


@case("A21")
def lone_surrogates(bench: Bench, smol: Bench) -> None:
    raws = {number: step["raw_body"] for number, step in enumerate(steps("A21"))}
    bench.raw(PATH, raws[0].encode(), 400)
    smol.raw("/v1/chat/completions", raws[1].encode(), 400)
    bench.raw("/tokenize", raws[2].encode(), 400)
    bench.raw(PATH, raws[3].encode(), 200)
    bench.raw(PATH, json.dumps({"model": "minilm", "input": "x\udcad"}).encode(), 400)
    bench.raw(PATH, json.dumps({"model": "x\udcad", "input": "x"}).encode(), None)


@case("A22")
def all_of_unicode(bench: Bench) -> None:
    vectors = np.array([item["embedding"] for item in bench.post(PATH, body("A22"))["data"]])
    assert vectors.shape == (6, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0][:3], [-0.0416, -0.0247, 0.0779], atol=1e-3)
    np.testing.assert_allclose(vectors[2], bench.embed("naive cafe")[0], atol=1e-5)
