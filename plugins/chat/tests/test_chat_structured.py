"""Answers that have to match something, by a model of random weights. What each form takes and refuses is tested with completions, too."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from jackfield.testing import RunningServer, make_server
from jackfield_chat import ChatEndpoint

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-zé]{2,6}$"},
        "warm": {"type": "boolean"},
        "degrees": {"$ref": "#/$defs/d"},
    },
    "required": ["city", "warm", "degrees"],
    "additionalProperties": False,
    "$defs": {"d": {"anyOf": [{"type": "integer", "minimum": -40, "maximum": 40}, {"type": "null"}]}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(ChatEndpoint(), models={"tiny": {"source": "tiny:llama"}}, real=True) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as client:
        answer = client.post(PATH, json={"messages": HI, "max_tokens": 200, "seed": 1, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(server: RunningServer, body: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """By choice: the text of all chunks, and how it ended."""
    with server.client() as client:
        answer = client.post(PATH, json={"messages": HI, "max_tokens": 200, "seed": 1, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            assert choice["index"] not in reasons, "a chunk after the last"
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                reasons[choice["index"]] = choice["finish_reason"]
    return {index: (text, reasons[index]) for index, text in texts.items()}


def only(server: RunningServer, **body: Any) -> tuple[str, str]:
    """Text and finish_reason of the one choice."""
    [choice] = post(server, body)["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def of_schema(text: str) -> bool:
    jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))
    return re.fullmatch(r'\{"city": "\w+", "warm": (true|false), "degrees": (null|-?\d+)\}', text) is not None


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}}},
        of_schema,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, of_schema),
    "regex": ({"structured_outputs": {"regex": "[a-f]{2}(-[a-f]{2}){2}"}}, lambda text: bool(re.fullmatch("[a-f]{2}(-[a-f]{2}){2}", text))),
    "choice": ({"structured_outputs": {"choice": ["for", "against", "neither"]}}, ["for", "against", "neither"].__contains__),
    "lark": (
        {"structured_outputs": {"grammar": 'start: SIGN? NUMBER ("+" NUMBER)*\nSIGN: "-"\nNUMBER: /[1-9][0-9]?/'}},
        lambda text: bool(re.fullmatch(r"-?[1-9][0-9]?(\+[1-9][0-9]?)*", text)),
    ),
    "gbnf": (
        {"structured_outputs": {"grammar": 'root ::= list\nlist ::= "[" ( list ("," list)? )? "]"'}},
        lambda text: bool(set(text) <= set("[],")) and isinstance(json.loads(text), list),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_matches(server: RunningServer, form: str) -> None:
    """At temperature 1, whole and streamed, two choices."""
    asked, matches = FORMS[form]
    body = {**asked, "n": 2, "max_completion_tokens": 400}
    whole = {choice["index"]: (choice["message"]["content"], choice["finish_reason"]) for choice in post(server, body)["choices"]}
    assert len(whole) == 2
    for text, reason in whole.values():
        assert matches(text), text
        assert reason == "stop"
    assert streamed(server, body) == whole


def test_any_object(server: RunningServer) -> None:
    choices = post(server, {"response_format": {"type": "json_object"}, "n": 20, "max_tokens": 400})["choices"]
    ended = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_text_is_any_text(server: RunningServer) -> None:
    assert only(server, response_format={"type": "text"}, max_tokens=20) == only(server, max_tokens=20)


def test_the_same_seed_says_the_same(server: RunningServer) -> None:
    """Whether tokens are computed one by one, for their log-probabilities, or what must follow is taken at once."""
    asked = FORMS["json"][0]
    assert only(server, **asked, seed=7) == only(server, **asked, seed=7, logprobs=True)
    assert only(server, **asked, seed=7) != only(server, **asked, seed=8)


@pytest.mark.parametrize("max_tokens", [1, 10, 11, 24])
def test_what_is_cut_is_a_beginning(server: RunningServer, max_tokens: int) -> None:
    asked = FORMS["json"][0]
    whole, _ = only(server, **asked)
    cut, reason = only(server, **asked, max_tokens=max_tokens)
    assert reason == "length"
    assert whole.startswith(cut)
    assert 0 < len(cut) <= max_tokens
    assert streamed(server, {**asked, "max_tokens": max_tokens}) == {0: (cut, "length")}


def test_stop_texts_and_log_probabilities(server: RunningServer) -> None:
    asked = {"structured_outputs": {"choice": ["abcdef"]}}
    [choice] = post(server, {**asked, "stop": ["e"], "logprobs": True, "top_logprobs": 2})["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("abcd", "e")
    [choice] = post(server, {**asked, "logprobs": True, "top_logprobs": 2, "return_token_ids": True})["choices"]
    told = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in told) == choice["message"]["content"] == "abcdef"
    assert len(told) == len(choice["token_ids"]) == 6
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    assert streamed(server, {**asked, "logprobs": True}) == {0: ("abcdef", "stop")}


def test_what_bars_every_token(server: RunningServer) -> None:
    asked = {"structured_outputs": {"choice": ["ab", "cd"]}}
    assert only(server, **asked, logit_bias={str(token_id): -100 for token_id in range(259)})[0] in ("ab", "cd")
    for barring in ({"bad_words": ["a", "c"]}, {"allowed_token_ids": [5]}):
        assert "no token that may come next" in post(server, {**asked, **barring}, 400)["error"]["message"]


def test_min_tokens_and_ignore_eos(server: RunningServer) -> None:
    assert only(server, structured_outputs={"regex": "(ab)+"}, min_tokens=30, max_tokens=400)[1] == "stop"
    assert only(server, structured_outputs={"choice": ["ab"]}, min_tokens=30) == ("ab", "stop")
    assert only(server, structured_outputs={"regex": "a+"}, ignore_eos=True, max_tokens=40) == ("a" * 40, "length")


def test_a_message_that_is_gone_on_with(server: RunningServer) -> None:
    """What is new matches; what is echoed is no part of it."""
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    assert only(server, **body, structured_outputs={"choice": ["yes"]}) == ("The answer is yes", "stop")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": {"contains": {"type": "null"}}}}}},
            "response_format.json_schema.schema",
            "contains",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        (
            {"structured_outputs": {"json": {"type": "object", "patternProperties": {"(?!a)": {}}}}},
            "structured_outputs.json",
            "look-around",
        ),
        ({"structured_outputs": {"regex": "(?<=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: /[/"}}, "structured_outputs.grammar", "1("),
        ({"structured_outputs": {"grammar": 'start: "' + "x" * 600_000 + '"'}}, "structured_outputs.grammar", "524288"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1000"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs", "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ],
    ids=lambda value: str(value)[:90],
)
def test_what_cannot_be_honoured_is_named(server: RunningServer, body: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True):
        error = post(server, {**body, "stream": stream}, 400)["error"]
        assert error["param"] == param, error
        assert says in error["message"]
