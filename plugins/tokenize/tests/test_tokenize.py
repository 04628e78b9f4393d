"""The routes over a real socket; the tokenizer of the test kit has one token a byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jackfield.testing import RunningServer, make_server
from jackfield_tokenize import TokenizeEndpoint


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(TokenizeEndpoint()) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_tokenize(server: RunningServer) -> None:
    assert post(server, "/tokenize", {"prompt": "ab"}) == {"count": 4, "max_model_len": 512, "tokens": [0, 67, 68, 1], "token_strs": None}
    bare = post(server, "/tokenize", {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True})
    assert bare["tokens"] == [67, 68]
    assert bare["token_strs"] == ["a", "b"]
    assert post(server, "/tokenize", {"prompt": "", "add_special_tokens": False})["tokens"] == []
    assert post(server, "/tokenize", {"prompt": "x" * 5000})["count"] == 5002


@pytest.mark.parametrize("text", ["Hello:World", " hello", "hello !", "don't  stop\n\n", "🌍你好", "<s>", "\x00"])
def test_round_trip(server: RunningServer, text: str) -> None:
    tokens = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens}) == {"prompt": text}


def test_messages(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    generation = post(server, "/tokenize", {"messages": messages})["tokens"]
    without = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
    assert post(server, "/detokenize", {"tokens": generation})["prompt"] == "[user]Hi[assistant]"
    assert post(server, "/detokenize", {"tokens": without})["prompt"] == "[user]Hi"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [65, 259]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
    ids=str,
)
def test_bad_input_names_the_field(server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    assert post(server, path, body, 400)["error"]["param"] == param


def test_detokenize_nothing(server: RunningServer) -> None:
    assert post(server, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_info(server: RunningServer) -> None:
    with server.client() as client:
        info = client.get("/tokenizer_info", params={"model": "fake"}).json()
        assert client.get("/tokenizer_info", params={"model": "nope"}).status_code == 404
        assert client.post("/tokenizer_info").status_code == 405
    assert info["model"] == "fake"
    assert info["eos_token"] == "</s>"
    assert "chat_template" in info
    assert not [value for value in info.values() if isinstance(value, str) and "/tmp" in value]


def test_needs_no_engine(server: RunningServer) -> None:
    assert server.engine is not None
    assert server.engine.requests == []
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok", "engines": {}}
