"""Whole answers over a real socket. The fake engine says its prompt again, which the test's template writes as `[role]content`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield import SamplingParams
from jackfield.testing import FakeEngine, RunningServer, make_server, tiny_model
from jackfield_chat import ChatEndpoint

HI = [{"role": "user", "content": "Hi"}]
GOING_ON = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
CONTINUED = {"messages": GOING_ON, "continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(ChatEndpoint(), engine=FakeEngine(max_length=256)) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": HI, "temperature": 0, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def said(server: RunningServer, **body: Any) -> str:
    """The text of the one choice."""
    [choice] = post(server, body)["choices"]
    text: str = choice["message"]["content"]
    return text


def params(server: RunningServer) -> SamplingParams:
    """What the engine was last asked to do."""
    assert server.engine is not None
    given = server.engine.requests[-1].params
    assert isinstance(given, SamplingParams)
    return given


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """[models] tables of a model with another template."""

    def tables(template: str) -> dict[str, Any]:
        shutil.copytree(tiny_model("bert"), tmp_path, dirs_exist_ok=True)
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        return {"fake": {"source": str(tmp_path)}}

    return tables


def test_the_whole_answer(server: RunningServer) -> None:
    answer = post(server, {"request_id": "x"})
    assert answer.pop("created") > 1.7e9
    assert answer.pop("system_fingerprint").startswith("jackfield-")
    assert answer == {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "[user]Hi[assistant]",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 19,
            "total_tokens": 39,
            "completion_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "system", "content": "s"}, *HI], "[system]s[user]Hi[assistant]"),
        ([{"role": "developer", "content": "s"}, *HI], "[system]s[user]Hi[assistant]"),
        ([{"role": "wizard", "content": "s"}], "[wizard]s[assistant]"),
        ([{"role": "user"}], "[user][assistant]"),
        ([{"role": "user", "content": None}], "[user][assistant]"),
        ([{"role": "user", "content": []}], "[user][assistant]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "[user]a\nb[assistant]"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *HI], "[assistant]no[user]Hi[assistant]"),
        ([*HI, {"role": "assistant", "content": ""}, *HI], "[user]Hi[assistant][user]Hi[assistant]"),
        ([{"role": "tool", "tool_call_id": "1", "content": "4"}], "[user]<tool_response>\n4\n</tool_response>[assistant]"),
        ([{"role": "user", "content": "<s>x</s>"}], "[user]<s>x</s>[assistant]"),
    ],
    ids=str,
)
def test_messages(server: RunningServer, messages: list[dict[str, Any]], text: str) -> None:
    assert said(server, messages=messages) == text


def test_special_tokens_of_a_client_are_text(server: RunningServer) -> None:
    answer = post(server, {"messages": [{"role": "user", "content": "<s></s>"}], "return_token_ids": True})
    assert not set(answer["prompt_token_ids"]) & {0, 1, 2}
    assert post(server, {"add_special_tokens": True, "return_token_ids": True})["prompt_token_ids"][0] == 0


def test_going_on_with_a_message(server: RunningServer) -> None:
    assert said(server, **CONTINUED) == "[user]a[assistant]b "
    assert said(server, **CONTINUED, echo=True) == "b [user]a[assistant]b "
    assert said(server, echo=True) == "[user]Hi[assistant]", "the last message is not of the answer's role"
    answer = post(server, {"messages": HI, "add_generation_prompt": False, "echo": True})
    assert answer["choices"][0]["message"] | {"role": "user", "content": "Hi[user]Hi"} == answer["choices"][0]["message"]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y "}]}]
    assert said(server, **(CONTINUED | {"messages": parts}), echo=True) == "x\ny [assistant]x\ny "


def test_the_model_is_named_by_its_id(server: RunningServer) -> None:
    assert post(server, {"model": "fake"})["model"] == "fake"


def test_choices(server: RunningServer) -> None:
    answer = post(server, {"n": 3, "temperature": 1, "seed": 1})
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["user]Hi[assistant][", "ser]Hi[assistant][u", "er]Hi[assistant][us"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] | {"prompt_tokens": 19, "completion_tokens": 60, "total_tokens": 79} == answer["usage"]
    greedy = post(server, {"n": 2})["choices"]
    assert greedy[0]["message"] == greedy[1]["message"]
    assert post(server, {"n": 100_000}, 400)["error"]["param"] == "n"


def test_logprobs(server: RunningServer) -> None:
    entry = {"token": "[", "logprob": -0.5, "bytes": [91]}
    for more in ({}, {"top_logprobs": 0}, {"top_logprobs": None}):
        [first, _] = post(server, {"logprobs": True, "max_tokens": 2, **more})["choices"][0]["logprobs"]["content"]
        assert first == entry | {"top_logprobs": []}
    [told] = post(server, {"logprobs": True, "top_logprobs": 2, "max_tokens": 1})["choices"][0]["logprobs"]["content"]
    assert told == entry | {"top_logprobs": [entry, {"token": "\\", "logprob": -1.5, "bytes": [92]}]}
    named = post(server, {"logprobs": True, "max_tokens": 1, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]["content"]
    assert named == [{"token": "token_id:61", "logprob": -0.5, "bytes": [91], "top_logprobs": []}]
    assert post(server, {"top_logprobs": 0})["choices"][0]["logprobs"] is None


def test_a_part_of_a_character_has_its_bytes(server: RunningServer) -> None:
    answer = post(server, {"messages": [{"role": "🌍", "content": ""}], "logprobs": True, "max_tokens": 5})
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["[", *["\ufffd"] * 4]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "[🌍"
    assert answer["choices"][0]["message"]["content"] == "[🌍"


def test_prompt_logprobs(server: RunningServer) -> None:
    first, second, *_ = told = post(server, {"prompt_logprobs": 1, "max_tokens": 1})["prompt_logprobs"]
    assert len(told) == 19
    assert first is None
    assert second == {"87": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}
    named = post(server, {"prompt_logprobs": 2, "return_tokens_as_token_ids": True})["prompt_logprobs"][1]
    assert named["88"] == {"logprob": -1.5, "rank": 2, "decoded_token": "token_id:88"}
    assert post(server, {"echo": True, "logprobs": True})["prompt_logprobs"][1] == {
        "87": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}
    }
    assert post(server, {"echo": True})["prompt_logprobs"] is None


def test_token_ids(server: RunningServer) -> None:
    answer = post(server, {"return_token_ids": True, "max_tokens": 3})
    assert answer["prompt_token_ids"][:3] == answer["choices"][0]["token_ids"] == [61, 87, 85]


@pytest.mark.parametrize("stop", ["ser", ["ser"], ["xyz", "ser"]])
def test_stop(server: RunningServer, stop: Any) -> None:
    [choice] = post(server, {"stop": stop})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("[u", "stop", "ser")
    assert said(server, stop=stop, include_stop_str_in_output=True) == "[user"
    assert post(server, {"stop": stop})["usage"]["completion_tokens"] == 5


def test_lengths(server: RunningServer) -> None:
    assert said(server, max_tokens=2) == "[u"
    assert said(server, max_tokens=1, max_completion_tokens=3) == "[us"
    assert post(server, {"max_tokens": 237})["choices"][0]["finish_reason"] == "stop"
    for name in ("max_tokens", "max_completion_tokens"):
        error = post(server, {name: 238}, 400)["error"]
        assert error["param"] == name
        assert "238" in error["message"]
        assert "256" in error["message"]
    long = [{"role": "user", "content": "x" * 300}]
    assert "256" in post(server, {"messages": long}, 400)["error"]["message"]
    assert post(server, {"messages": long, "truncate_prompt_tokens": -1})["usage"]["prompt_tokens"] == 255
    assert post(server, {"messages": long, "truncate_prompt_tokens": -1, "max_tokens": 6})["usage"]["prompt_tokens"] == 250
    assert said(server, messages=long, truncate_prompt_tokens=14) == "xxx[assistant]"
    assert said(server, messages=long, truncate_prompt_tokens=9, truncation_side="right") == "[user]xxx"


def test_templates_that_go_through_parts(with_template: Callable[[str], dict[str, Any]]) -> None:
    template = (
        "{% for m in messages %}{% for part in m['content'] %}<{{ part['type'] }}:{{ part['text'] }}>{% endfor %}{% endfor %}"
        "{% if m is defined %}{% endif %}{% for d in documents or [] %}({{ d.text }}){% endfor %}{{ reasoning_effort }}{{ tone }}"
    )
    settings = {"chat": {"default_chat_template_kwargs": {"tone": "dull", "reasoning_effort": "none"}}}
    with make_server(ChatEndpoint(), models=with_template(template), endpoints=settings) as server:
        two = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
        assert said(server, messages=two) == "<text:a><text:b>nonedull"
        assert said(server, reasoning_effort="high") == "<text:Hi>highdull"
        assert said(server, chat_template_kwargs={"tone": "gay", "reasoning_effort": "low"}) == "<text:Hi>lowgay"
        assert said(server, chat_template_kwargs={"reasoning_effort": "low"}, reasoning_effort="high") == "<text:Hi>highdull"
        assert said(server, documents=[{"text": "D"}]) == "<text:Hi>(D)nonedull"


def test_what_a_template_gets_of_calls(with_template: Callable[[str], dict[str, Any]]) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}|{{ m.name }}|{{ m.reasoning_content }}|{{ m.tool_call_id }}|"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}]{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    broken = call | {"function": {"name": "sub", "arguments": '{"a'}}
    messages = [
        {"role": "assistant", "content": None, "name": "x", "reasoning": "hm", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    with make_server(ChatEndpoint(), models=with_template(template)) as server:
        assert said(server, messages=messages) == "[assistant:|x|hm||add(2)sub()][tool:4|||1|]"


def test_a_template_may_refuse(with_template: Callable[[str], dict[str, Any]]) -> None:
    with make_server(ChatEndpoint(), models=with_template("{{ raise_exception('roles must alternate') }}")) as server:
        error = post(server, {}, 400)["error"]
        assert "roles must alternate" in error["message"]
        assert error["param"] == "messages"


def test_a_developer_whom_the_template_knows(with_template: Callable[[str], dict[str, Any]]) -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}{{ m.content }}{% endfor %}"
    with make_server(ChatEndpoint(), models=with_template(template)) as server:
        assert said(server, messages=[{"role": "developer", "content": "s"}]) == "!s"


def test_templates_of_requests(server: RunningServer) -> None:
    body = {"chat_template": "T{{ messages[0].content }}"}
    assert post(server, body, 400)["error"]["param"] == "chat_template"
    with make_server(ChatEndpoint(), endpoints={"chat": {"trust_request_chat_template": True, "response_role": "bot"}}) as trusting:
        assert said(trusting, **body) == "THi"
        assert post(trusting, {"chat_template": "{% for"}, 400)["error"]["param"] == "messages"
        assert post(trusting, {})["choices"][0]["message"]["role"] == "bot"
        assert said(trusting, messages=[{"role": "bot", "content": "b"}], echo=True) == "b[bot]b[assistant]"
        error = post(trusting, {"chat_template_kwargs": {"chat_template": "x"}}, 400)["error"]
        assert error["param"] == "chat_template_kwargs"
