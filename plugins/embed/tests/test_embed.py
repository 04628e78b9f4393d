"""The endpoint's own wire, over a real socket with the fake engine."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_embed import EmbedEndpoint


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(EmbedEndpoint(), engine=FakeEngine(max_length=64)) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int = 200, path: str = "/v1/embeddings") -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_every_form_of_input(server: RunningServer) -> None:
    text = post(server, {"input": "ab"})
    ids = [0, 67, 68, 1]
    for same in (["ab"], ids, [ids]):
        assert post(server, {"input": same})["data"] == text["data"]
    many = post(server, {"input": ["ab", "", "ab"]})
    assert [item["index"] for item in many["data"]] == [0, 1, 2]
    assert many["data"][0]["embedding"] == many["data"][2]["embedding"] == text["data"][0]["embedding"]
    assert many["usage"]["prompt_tokens"] == 4 + 2 + 4


def test_messages(server: RunningServer) -> None:
    chat = post(server, {"messages": [{"role": "user", "content": "hi"}]})
    assert chat["data"] == post(server, {"input": "[user]hi", "add_special_tokens": False})["data"]
    parts = post(server, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "add_generation_prompt": True})
    assert parts["data"] == post(server, {"input": "[user]hi[assistant]", "add_special_tokens": False})["data"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [65]]}, "input[1]"),
        ({"input": ["a", 65]}, "input[1]"),
        ({"input": [65, "a"]}, "input[1]"),
        ({"input": [True]}, "input[0]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [0, 99999]}, "input[1]"),
        ({"input": [[0], [0, 2**63]]}, "input[1][1]"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"input": "a" * 63}, "input"),
        ({"input": ["a", "a" * 63]}, "input[1]"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize"),
        ({"input": "a", "prompt_name": "nope"}, "prompt_name"),
        ({"input": "a", "input_type": "nope"}, "input_type"),
        ({"input": "a", "priority": 2**40}, "priority"),
        ({"input": [65], "prompt_name": "query"}, "prompt_name"),
        ({"input": [[65]], "input_type": "query"}, "input_type"),
        ({"input": [65], "add_special_tokens": True}, "add_special_tokens"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a"}], "input_type": "query"}, "input_type"),
    ],
    ids=str,
)
def test_bad_input_names_the_field(server: RunningServer, body: dict[str, Any], param: str) -> None:
    error = post(server, body, 400)["error"]
    assert error["param"] == param, error
    assert error["code"] == 400
    assert len(error["message"]) < 500


def test_truncation_keeps_the_special_tokens(server: RunningServer) -> None:
    long = "abcdefghij" * 10
    assert post(server, {"input": long, "truncate_prompt_tokens": -1})["usage"]["prompt_tokens"] == 64
    right = post(server, {"input": long, "truncate_prompt_tokens": 6})
    assert right["data"] == post(server, {"input": "abcd"})["data"]
    left = post(server, {"input": long, "truncate_prompt_tokens": 6, "truncation_side": "left"})
    assert left["data"] == post(server, {"input": "ghij"})["data"]
    tokens = post(server, {"input": list(range(20)), "truncate_prompt_tokens": 3})
    assert tokens["data"] == post(server, {"input": [0, 1, 2]})["data"]
    tokens = post(server, {"input": list(range(20)), "truncate_prompt_tokens": 3, "truncation_side": "left"})
    assert tokens["data"] == post(server, {"input": [17, 18, 19]})["data"]


def test_base64_is_little_endian_float32(server: RunningServer) -> None:
    floats = post(server, {"input": ["a", "b"]})["data"]
    for item, expected in zip(post(server, {"input": ["a", "b"], "encoding_format": "base64"})["data"], floats, strict=True):
        raw = b64decode(item["embedding"])
        assert len(raw) == 8 * 4
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.array(expected["embedding"], dtype=np.float32))


def test_native_dimensions_and_nulls_are_fine(server: RunningServer) -> None:
    plain = post(server, {"input": "a"})["data"]
    nulls = dict.fromkeys(["dimensions", "encoding_format", "user", "model", "normalize", "truncate_prompt_tokens", "priority"])
    assert post(server, {"input": "a", "dimensions": 8})["data"] == plain
    assert post(server, {"input": "a", **nulls})["data"] == plain


def test_dimensions_where_the_operator_allows_them() -> None:
    with make_server(EmbedEndpoint(), engine=FakeEngine(matryoshka=True)) as server:
        full = np.array(post(server, {"input": "a"})["data"][0]["embedding"])
        short = np.array(post(server, {"input": "a", "dimensions": 3})["data"][0]["embedding"])
        np.testing.assert_allclose(short, full[:3] / np.linalg.norm(full[:3]), atol=1e-6)
        assert post(server, {"input": "a", "dimensions": 9}, 400)["error"]["param"] == "dimensions"
        cohere = post(server, {"texts": ["a"], "output_dimension": 3}, path="/v2/embed")
        np.testing.assert_allclose(cohere["embeddings"]["float"][0], short, atol=1e-6)


def test_priority_and_request_id_reach_the_engine(server: RunningServer) -> None:
    answer = post(server, {"input": "a", "priority": -3, "request_id": "mine"})
    assert answer["id"] == "embd-mine"
    assert server.engine is not None
    assert server.engine.requests[-1].priority == -3


@pytest.mark.parametrize("kind", ["search_document", "search_query", "classification", "clustering", "image"])
def test_cohere_kinds_always_pass(server: RunningServer, kind: str) -> None:
    answer = post(server, {"texts": ["a"], "input_type": kind}, path="/v2/embed")
    assert answer["response_type"] == "embeddings_by_type"
    assert list(answer["embeddings"]) == ["float"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": []}, "texts"),
        ({"images": ["x"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]"),
        ({"texts": ["a" * 70], "truncate": "NONE"}, "texts[0]"),
        ({"texts": ["a" * 10], "truncate": "NONE", "max_tokens": 5}, "texts[0]"),
        ({"texts": ["a"], "max_tokens": 65}, "max_tokens"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]"),
        ({"texts": ["a"], "output_dimension": 4}, "output_dimension"),
    ],
    ids=str,
)
def test_cohere_bad_input(server: RunningServer, body: dict[str, Any], param: str) -> None:
    assert post(server, body, 400, "/v2/embed")["error"]["param"] == param


def test_cohere_truncates(server: RunningServer) -> None:
    long = "abcdefghij" * 10
    end = post(server, {"texts": [long], "max_tokens": 6}, path="/v2/embed")
    start = post(server, {"texts": [long], "max_tokens": 6, "truncate": "START"}, path="/v2/embed")
    assert end["embeddings"] == post(server, {"texts": ["abcd"]}, path="/v2/embed")["embeddings"]
    assert start["embeddings"] == post(server, {"texts": ["ghij"]}, path="/v2/embed")["embeddings"]
    assert end["meta"]["billed_units"]["input_tokens"] == 6
    joined = post(server, {"inputs": [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, path="/v2/embed")
    assert joined["texts"] == ["a\nb"]
