"""Streams, byte by byte and as what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jackfield import InternalError
from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_chat import ChatEndpoint

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(ChatEndpoint(), engine=FakeEngine(max_length=256)) as running:
        yield running


def events(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    with server.client() as client:
        answer = client.post(PATH, json={"messages": HI, "temperature": 0, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def test_byte_by_byte(server: RunningServer) -> None:
    body = {"messages": HI, "temperature": 0, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    with server.client() as client:
        raw = client.post(PATH, json=body, headers={"x-request-id": "x"}).text
    created = json.loads(raw.partition("\n")[0].removeprefix("data: "))["created"]
    fingerprint = json.loads(raw.split("\n\n")[2].removeprefix("data: "))["system_fingerprint"]
    head = f'data: {{"id":"chatcmpl-x","object":"chat.completion.chunk","created":{created},"model":"fake","choices":['
    assert raw == (
        head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":0,"delta":{"content":"["},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        + head + '{"index":0,"delta":{"content":"u"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],'
        + f'"system_fingerprint":"{fingerprint}"}}\n\n'
        + head + '],"usage":{"prompt_tokens":19,"total_tokens":21,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0},'
        + '"completion_tokens_details":null}}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


def test_roles_come_first_and_once(server: RunningServer) -> None:
    chunks = events(server, n=3, max_tokens=3)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [{"role": "assistant", "content": ""}] * 3
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[3:])
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 5},
        {"n": 2, "temperature": 1, "seed": 3},
        {"stop": "ser]H"},
        {"stop": ["ser]H"], "include_stop_str_in_output": True},
        {"stop": ["ant]x"]},
        {"skip_special_tokens": False},
        {"messages": [{"role": "user", "content": "🌍你好"}]},
        {"messages": [{"role": "user", "content": "🌍"}], "max_tokens": 8},
        {"echo": True, "add_generation_prompt": False},
        {"logprobs": True, "top_logprobs": 2, "stop": ["ser]H"]},
        {"return_token_ids": True, "stop": ["ser]H"]},
    ],
    ids=str,
)
def test_a_stream_says_what_a_whole_answer_says(server: RunningServer, body: dict[str, Any]) -> None:
    with server.client() as client:
        whole = client.post(PATH, json={"messages": HI, "temperature": 0, **body}).json()
    chunks = events(server, **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert text(chunks, choice["index"]) == choice["message"]["content"]
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert all(piece["finish_reason"] is None and "stop_reason" not in piece for piece in mine[:-1])
        logprobs = [entry for piece in mine if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert logprobs == (choice["logprobs"] or {"content": []})["content"]
        assert [token for piece in mine for token in piece.get("token_ids") or ()] == (choice["token_ids"] or [])


def test_what_is_held_back_sends_nothing(server: RunningServer) -> None:
    chunks = events(server, stop=["ser]H"])
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", "[", "u", ""]
    assert chunks[-1]["choices"][0]["stop_reason"] == "ser]H"
    assert all("\ufffd" not in json.dumps(chunk, ensure_ascii=False) for chunk in events(server, messages=[{"role": "🌍", "content": ""}]))


def test_usage(server: RunningServer) -> None:
    assert not any("usage" in chunk for chunk in events(server, max_tokens=2))
    assert not any("usage" in chunk for chunk in events(server, max_tokens=2, stream_options={"include_usage": False}))
    *chunks, last = events(server, max_tokens=3, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert last["choices"] == []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3]
    assert all(chunk["usage"]["prompt_tokens"] == 19 for chunk in chunks)
    chunks = events(server, max_tokens=3, stream_options={"continuous_usage_stats": True})
    assert all(chunk["choices"] and chunk["usage"] for chunk in chunks)


def test_usage_that_the_operator_wants() -> None:
    with make_server(ChatEndpoint(), endpoints={"chat": {"force_include_usage": True}}) as server:
        assert events(server, max_tokens=2)[-1]["usage"]["completion_tokens"] == 2


def test_token_ids(server: RunningServer) -> None:
    chunks = events(server, max_tokens=2, n=2, return_token_ids=True)
    assert [len(chunk.get("prompt_token_ids", ())) for chunk in chunks] == [19, 0, 0, 0, 0, 0]


def test_echo(server: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "So "}]
    chunks = events(server, messages=messages, continue_final_message=True, add_generation_prompt=False, echo=True, max_tokens=1)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "So ", "["]
    assert not events(server, echo=True, logprobs=True, max_tokens=1)[0].get("prompt_logprobs")


@pytest.mark.parametrize("fault_after", [1, 3])
def test_a_fault_in_the_middle(fault_after: int) -> None:
    engine = FakeEngine(fault=lambda request: InternalError("a fault on demand"), fault_after=fault_after)
    with make_server(ChatEndpoint(), engine=engine) as server, server.client() as client:
        answer = client.post(PATH, json={"messages": HI, "stream": True, "stream_options": {"include_usage": True}})
        *lines, error, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        assert "a fault on demand" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert len(lines) == fault_after + 1
        assert all(json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] is None for line in lines)
        engine.fault = None
        assert client.post(PATH, json={"messages": HI}).status_code == 200


def test_what_is_wrong_from_the_start_has_a_status(server: RunningServer) -> None:
    with server.client() as client:
        bodies: list[dict[str, Any]] = [{"n": 0}, {"max_tokens": 1000}, {"model": "nope"}, {"messages": []}]
        for body in bodies:
            answer = client.post(PATH, json={"messages": HI, "stream": True, **body})
            assert answer.status_code in (400, 404)
            assert answer.json()["error"]["code"] == answer.status_code
