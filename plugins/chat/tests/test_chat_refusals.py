"""What chat refuses of its own; what every endpoint that generates refuses is tested with the core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jackfield.testing import RunningServer, make_server
from jackfield_chat import ChatEndpoint

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(ChatEndpoint()) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int) -> Any:
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"function_call": {"name": "add"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"x": 1}}, "media_io_kwargs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stop": ""}, "stop"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(server: RunningServer, body: dict[str, Any], param: str) -> None:
    error = post(server, body, 400)["error"]
    assert error["param"] == param, error
    assert len(error["message"]) < 500


def test_refusals_say_what_to_do(server: RunningServer) -> None:
    assert "add_generation_prompt = false" in post(server, {"continue_final_message": True}, 400)["error"]["message"]
    image = {"messages": [{"role": "user", "content": [{"type": "hologram", "x": 1}]}]}
    assert "'hologram'" in post(server, image, 400)["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [], "function_call": "auto"},
        {"tool_choice": "auto", "modalities": ["text"], "response_format": {"type": "text"}},
        {"mm_processor_kwargs": {}, "media_io_kwargs": {}},
        dict.fromkeys(["tools", "seed", "stop", "top_p", "stream", "stream_options", "logit_bias", "user", "n", "response_format"]),
        {"reasoning_effort": "low"},
        {"top_logprobs": 0, "logprobs": False},
    ],
    ids=str,
)
def test_what_asks_for_nothing_passes(server: RunningServer, body: dict[str, Any]) -> None:
    assert post(server, body, 200)["choices"][0]["message"]["content"] == "[use"
