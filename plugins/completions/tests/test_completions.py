"""Completions over a real socket. The fake engine says its prompt again; the kit's tokenizer puts `<s>` and `</s>` around a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jackfield import InternalError
from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_completions import CompletionsEndpoint

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(CompletionsEndpoint(), engine=FakeEngine(max_length=64)) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as client:
        answer = client.post(PATH, json={"temperature": 0, "prompt": "Hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def only(server: RunningServer, **body: Any) -> dict[str, Any]:
    """The one choice."""
    [choice] = post(server, body)["choices"]
    assert isinstance(choice, dict)
    return choice


def events(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    with server.client() as client:
        answer = client.post(PATH, json={"temperature": 0, "prompt": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_whole_answer(server: RunningServer) -> None:
    answer = post(server, {"request_id": "x"})
    assert answer.pop("created") > 1.7e9
    assert answer.pop("system_fingerprint").startswith("jackfield-")
    assert answer == {
        "id": "cmpl-x",
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "Hi",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 4,
            "total_tokens": 9,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        },
    }


def test_every_form_of_prompt(server: RunningServer) -> None:
    for same in ("Hi", ["Hi"], [0, 42, 75, 1], [[0, 42, 75, 1]]):
        assert only(server, prompt=same)["text"] == "Hi"
    answer = post(server, {"prompt": ["ab", "c"], "n": 2, "temperature": 1, "seed": 1})
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "ab"), (1, "ba"), (2, "c"), (3, "c")]
    assert answer["usage"] | {"prompt_tokens": 7, "completion_tokens": 18, "total_tokens": 25} == answer["usage"]
    assert only(server, add_special_tokens=False, return_token_ids=True)["prompt_token_ids"] == [42, 75]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[1], [300]]}, "prompt[1][0]"),
        ({"prompt": [1], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x" * 63}, "prompt"),
        ({"prompt": ["a", "x" * 63]}, "prompt[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 61}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"suffix": "y"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stop": ["a", ""]}, "stop"),
        ({"prompt": ["a"] * 3, "n": 2000}, "n"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(server: RunningServer, body: dict[str, Any], param: str) -> None:
    error = post(server, body, 400)["error"]
    assert error["param"] == param, error
    assert len(error["message"]) < 500


def test_what_asks_for_nothing_passes(server: RunningServer) -> None:
    assert only(server, suffix="", best_of=1, use_beam_search=False)["text"] == "Hi"
    assert post(server, {"n": 2, "best_of": 2})["choices"][1]["text"] == "Hi"


def test_lengths(server: RunningServer) -> None:
    assert only(server, prompt="x" * 40)["text"] == "x" * 15, "16 tokens, and the first of them is a special one"
    assert only(server, prompt="x" * 40, max_tokens=22)["text"] == "x" * 21
    assert post(server, {"prompt": "x" * 60})["choices"][0]["finish_reason"] == "length", "its own 16 give way"
    assert post(server, {"prompt": "x" * 99, "truncate_prompt_tokens": -1})["usage"]["prompt_tokens"] == 48


def test_logprobs(server: RunningServer) -> None:
    assert only(server, logprobs=0, prompt=[67, 68], max_tokens=2)["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
    }
    assert only(server, logprobs=2, prompt=[67], max_tokens=1)["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.5}]
    named = only(server, logprobs=1, prompt=[67], max_tokens=1, return_tokens_as_token_ids=True)["logprobs"]
    assert (named["tokens"], named["top_logprobs"]) == (["token_id:67"], [{"token_id:67": -0.5}])


def test_places_are_of_characters(server: RunningServer) -> None:
    choice = only(server, prompt="é🌍x", logprobs=0, add_special_tokens=False)
    assert choice["text"] == "é🌍x"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("prompt", ["Hi", [42, 75], ["Hi"]])
def test_echo(server: RunningServer, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 2, "add_special_tokens": False if isinstance(prompt[0], str) else None}
    choice = only(server, **body, logprobs=1)
    assert choice["text"] == "HiHi"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "tokens": ["H", "i", "H", "i"],
        "top_logprobs": [None, {"i": -0.5}, {"H": -0.5}, {"i": -0.5}],
    }
    assert choice["prompt_logprobs"] == [None, {"75": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}]
    assert only(server, **body)["prompt_logprobs"] is None
    alone = only(server, **body | {"max_tokens": 0}, logprobs=1)
    assert (alone["text"], alone["finish_reason"], alone["logprobs"]["tokens"]) == ("Hi", "length", ["H", "i"])
    assert only(server, **body | {"max_tokens": 0})["text"] == "Hi"


def test_echo_of_a_frame_and_of_what_is_left(server: RunningServer) -> None:
    choice = only(server, echo=True, logprobs=0, max_tokens=0)
    assert choice["text"] == "Hi"
    assert choice["logprobs"]["tokens"] == ["<s>", "H", "i", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    cut = only(server, prompt="abcdef", echo=True, logprobs=0, max_tokens=0, truncate_prompt_tokens=5)
    assert (cut["text"], cut["logprobs"]["text_offset"]) == ("def", [0, 0, 1, 2, 3])
    right = only(server, prompt="abcdef", echo=True, max_tokens=0, truncate_prompt_tokens=5, truncation_side="right")
    assert right["text"] == "abc"
    assert only(server, prompt=[0, 42], echo=True, max_tokens=0)["text"] == "<s>H"
    named = only(server, prompt=[0, 42], echo=True, logprobs=0, max_tokens=0, return_tokens_as_token_ids=True)
    assert named["logprobs"]["tokens"] == ["token_id:0", "token_id:42"]


def test_prompt_logprobs_and_token_ids(server: RunningServer) -> None:
    answer = post(server, {"prompt": ["ab", "c"], "prompt_logprobs": 0, "return_token_ids": True, "n": 2})
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[0, 67, 68, 1]] * 2 + [[0, 69, 1]] * 2
    assert [choice["prompt_logprobs"] and len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [4, None, 3, None]
    assert answer["choices"][0]["token_ids"] == [0, 67, 68, 1, 0]


def test_byte_by_byte(server: RunningServer) -> None:
    body = {"prompt": [67, 68], "temperature": 0, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    with server.client() as client:
        raw = client.post(PATH, json=body, headers={"x-request-id": "x"}).text
    first, second, _, _, _ = raw.split("\n\n")
    created = json.loads(first.removeprefix("data: "))["created"]
    fingerprint = json.loads(second.removeprefix("data: "))["system_fingerprint"]
    head = f'data: {{"id":"cmpl-x","object":"text_completion","created":{created},"model":"fake","choices":['
    nulls = '"prompt_token_ids":null,"token_ids":null}]'
    assert raw == (
        head + '{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null,' + nulls + "}\n\n"
        + head + '{"index":0,"text":"b","logprobs":null,"finish_reason":"length","stop_reason":null,' + nulls
        + f',"system_fingerprint":"{fingerprint}"}}\n\n'
        + head + '],"usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0},'
        + '"completion_tokens_details":null}}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ["ab", "c"], "n": 2, "temperature": 1, "seed": 1},
        {"prompt": "a🌍b", "max_tokens": 4},
        {"prompt": "abcdef", "stop": ["cde"]},
        {"prompt": "abcdef", "stop": ["xde", "efg"]},
        {"prompt": "abcdef", "stop": "cde", "logprobs": 2},
        {"prompt": ["ab", "é"], "n": 2, "echo": True, "logprobs": 1},
        {"prompt": [[67], [0, 68]], "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 0},
        {"echo": True, "max_tokens": 0},
        {"return_token_ids": True, "stop": ["i"], "include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_a_stream_says_what_a_whole_answer_says(server: RunningServer, body: dict[str, Any]) -> None:
    whole = post(server, body)
    chunks = events(server, **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert all(piece["finish_reason"] is None for piece in mine[:-1])
        for name, told in (choice["logprobs"] or {}).items():
            assert [entry for piece in mine if piece["logprobs"] for entry in piece["logprobs"][name]] == told
        assert [token for piece in mine for token in piece["token_ids"] or ()] == (choice["token_ids"] or [])
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any(piece["prompt_token_ids"] for piece in mine[1:])


def test_usage_in_streams(server: RunningServer) -> None:
    assert not any("usage" in chunk for chunk in events(server))
    chunks = events(server, prompt=[67, 68], max_tokens=2, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]
    with make_server(CompletionsEndpoint(), endpoints={"completions": {"force_include_usage": True}}) as forced:
        assert events(forced)[-1]["usage"]["completion_tokens"] == 5


def test_a_fault_in_the_middle() -> None:
    engine = FakeEngine(fault=lambda request: InternalError("a fault on demand"), fault_after=3)
    with make_server(CompletionsEndpoint(), engine=engine) as server, server.client() as client:
        *lines, error, done, _ = client.post(PATH, json={"prompt": "abcdef", "stream": True}).text.split("\n\n")
    assert done == "data: [DONE]"
    assert "a fault on demand" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert all(json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] is None for line in lines)


def test_openai(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.completions.create(model="fake", prompt="Hi", temperature=0, logprobs=1, echo=True)
        assert answer.choices[0].text == "HiHi"
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        chunks = list(client.completions.create(model="fake", prompt=["ab", "c"], temperature=0, stream=True))
        texts = ["", ""]
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["ab", "c"]
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model="fake", prompt="Hi", suffix="x")


async def test_openai_async(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        stream = await client.completions.create(model="fake", prompt="Hi", temperature=0, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hi"
