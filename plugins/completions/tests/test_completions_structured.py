"""Texts that have to match something, by a model of random weights that would rather say anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from jackfield.testing import RunningServer, make_server
from jackfield_completions import CompletionsEndpoint

PATH = "/v1/completions"
VOCAB = 259
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
LARK = 'start: "<" WORD (" " WORD)* ">"\nWORD: /[a-c]{1,3}/'
GBNF = 'root ::= "<" word (" " word)* ">"\nword ::= [a-c] [a-c]? [a-c]?'


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(CompletionsEndpoint(), models={"tiny": {"source": "tiny:llama"}}, real=True) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as client:
        answer = client.post(PATH, json={"prompt": "Hi", "max_tokens": 200, "seed": 1, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(server: RunningServer, body: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """By choice: the text of all chunks, and how it ended."""
    with server.client() as client:
        answer = client.post(PATH, json={"prompt": "Hi", "max_tokens": 200, "seed": 1, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    found: dict[int, tuple[str, str]] = {}
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text, reason = found.get(choice["index"], ("", None))
            assert reason is None, "a chunk after the last"
            found[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return found


def only(server: RunningServer, **body: Any) -> dict[str, Any]:
    [choice] = post(server, body)["choices"]
    assert isinstance(choice, dict)
    return choice


def of_schema(text: str) -> bool:
    """Valid, and written in the one way that there is."""
    value = json.loads(text)
    jsonschema_rs.validator_for(SCHEMA).validate(value)
    return "\n" not in text and list(value) == list(SCHEMA["properties"])  # type: ignore[call-overload]


def of_words(text: str) -> bool:
    return re.fullmatch(r"<[a-c]{1,3}( [a-c]{1,3})*>", text) is not None


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}}, of_schema),
    "json": ({"structured_outputs": {"json": SCHEMA}}, of_schema),
    "json_text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, of_schema),
    "regex": (
        {"structured_outputs": {"regex": r"\d{3}-(ab|ç)*x"}},
        lambda text: re.fullmatch(r"[0-9]{3}-(ab|ç)*x", text) is not None,
    ),
    "choice": ({"structured_outputs": {"choice": ["yes", "yes, yes", "nö", "😀"]}}, ["yes", "yes, yes", "nö", "😀"].__contains__),
    "lark": ({"structured_outputs": {"grammar": LARK}}, of_words),
    "gbnf": ({"structured_outputs": {"grammar": GBNF}}, of_words),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_matches(server: RunningServer, form: str) -> None:
    """At temperature 1, whole and streamed, several choices of several prompts."""
    asked, matches = FORMS[form]
    body = {**asked, "n": 2, "prompt": ["Hi", "Go on"], "max_tokens": 300}
    whole = {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in post(server, body)["choices"]}
    assert len(whole) == 4
    for text, reason in whole.values():
        assert matches(text), text
        assert reason == "stop"
    assert streamed(server, body) == whole


@pytest.mark.parametrize("body", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}], ids=str)
def test_any_object(server: RunningServer, body: dict[str, Any]) -> None:
    """Of twenty that a model without sense begins, some end; what does not is the beginning of an object."""
    choices = post(server, {**body, "n": 20, "max_tokens": 400})["choices"]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert all(choice["text"].startswith("{") for choice in choices)


def test_white_space_that_is_asked_for(server: RunningServer) -> None:
    form = {"json": SCHEMA, "whitespace_pattern": "[ \\n]{1,2}"}
    text = only(server, structured_outputs=form)["text"]
    jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))
    assert re.match(r"\{[ \n]{1,2}\"name\"[ \n]{1,2}:[ \n]{1,2}\"", text)


@pytest.mark.parametrize("max_tokens", [1, 2, 12, 25, 40])
def test_what_is_cut_is_a_beginning(server: RunningServer, max_tokens: int) -> None:
    """The same seed says the same, as far as it comes."""
    form = FORMS["json"][0]
    whole = only(server, **form)
    cut = only(server, **form, max_tokens=max_tokens)
    assert (whole["finish_reason"], cut["finish_reason"]) == ("stop", "length")
    assert len(cut["text"].encode()) <= max_tokens, "a token is a byte here"
    assert whole["text"].startswith(cut["text"])
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
        json.loads(cut["text"])


def test_the_last_token_that_there_is_room_for(server: RunningServer) -> None:
    form = {"choice": ["0123456789"]}
    answer = post(server, {"structured_outputs": form, "max_tokens": 10, "return_token_ids": True})
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("0123456789", "stop")
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) == 10
    assert only(server, structured_outputs=form, max_tokens=9)["finish_reason"] == "length"


def test_a_stop_text_cuts_it(server: RunningServer) -> None:
    form = {"choice": ["abcdef"]}
    cut = only(server, structured_outputs=form, stop="cd")
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == ("ab", "stop", "cd")
    kept = only(server, structured_outputs=form, stop="cd", include_stop_str_in_output=True)
    assert (kept["text"], kept["stop_reason"]) == ("abcd", "cd")
    at_the_end = only(server, structured_outputs=form, stop=["xy", "f"])
    assert (at_the_end["text"], at_the_end["stop_reason"]) == ("abcde", "f")
    never = only(server, structured_outputs=form, stop=["xy", "fg"])
    assert (never["text"], never["finish_reason"], never["stop_reason"]) == ("abcdef", "stop", None)


def test_a_token_that_stops_it_may_come_where_it_is_whole(server: RunningServer) -> None:
    [bang] = post(server, {"prompt": "!", "max_tokens": 0, "echo": True, "add_special_tokens": False, "return_token_ids": True})["choices"][
        0
    ]["prompt_token_ids"]
    choice = only(server, structured_outputs={"regex": "[ab]+"}, stop_token_ids=[bang], ignore_eos=True, logit_bias={str(bang): 100})
    assert re.fullmatch("[ab]+", choice["text"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", bang)


def test_biases_go_within_the_grammar(server: RunningServer) -> None:
    """-100 for every token there is bars none: what fits the grammar is as likely as before. What bars all is the request's fault."""
    form = {"choice": ["ab", "cd"]}
    everything = {str(token_id): -100 for token_id in range(VOCAB)}
    assert only(server, structured_outputs=form, logit_bias=everything)["text"] in form["choice"]
    assert only(server, structured_outputs=form, bad_words=["a"])["text"] == "cd"
    for barring in ({"bad_words": ["a", "c"]}, {"allowed_token_ids": [5]}):
        error = post(server, {"structured_outputs": form, **barring}, 400)["error"]
        assert "no token that may come next" in error["message"]
        assert next(iter(barring)) in error["message"]


def test_log_probabilities_are_of_every_token(server: RunningServer) -> None:
    """What must follow is told, too, by the model's own logits: it would have said something else."""
    form = {"choice": ["abcd"]}
    answer = post(server, {"structured_outputs": form, "logprobs": 1})
    told = answer["choices"][0]["logprobs"]
    assert (told["tokens"], told["text_offset"]) == (["a", "b", "c", "d"], [0, 1, 2, 3])
    assert all(logprob < 0 for logprob in told["token_logprobs"])
    assert any(len(top) == 2 for top in told["top_logprobs"]), "none was the likeliest"
    assert answer["usage"]["completion_tokens"] == 4


def test_min_tokens_and_ignore_eos(server: RunningServer) -> None:
    """They hold where the text can go on, and end with it."""
    assert len(only(server, structured_outputs={"regex": "a+"}, min_tokens=30)["text"]) >= 30
    assert only(server, structured_outputs={"choice": ["ab"]}, min_tokens=30)["text"] == "ab"
    endless = only(server, structured_outputs={"regex": "a+"}, ignore_eos=True, max_tokens=40)
    assert (endless["text"], endless["finish_reason"]) == ("a" * 40, "length")
    whole = only(server, structured_outputs={"regex": "a{3}"}, ignore_eos=True)
    assert (whole["text"], whole["finish_reason"]) == ("aaa", "stop")


def test_the_echo_is_no_part_of_it(server: RunningServer) -> None:
    form = {"choice": ["ab"]}
    assert only(server, structured_outputs=form, echo=True)["text"] == "Hiab"
    for asked in (form, {"regex": ""}):
        nothing = only(server, structured_outputs=asked, echo=True, max_tokens=0)
        assert nothing["text"] == "Hi"
    assert only(server, structured_outputs={"regex": ""})["text"] == ""


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        ({"structured_outputs": {"json": {"properties": {"a": {"not": {}}}}}}, "structured_outputs.json", '"not"'),
        ({"structured_outputs": {"json": {"type": "string", "format": "hostnames"}}}, "structured_outputs.json", "hostnames"),
        ({"structured_outputs": {"json": {"type": "integer", "minimum": 7, "maximum": 6}}}, "structured_outputs.json", "minimum (7)"),
        ({"structured_outputs": {"json": {"$ref": "http://localhost/x"}}}, "structured_outputs.json", "http://localhost/x"),
        ({"structured_outputs": {"json": {"x-guidance": 5}}}, "structured_outputs.json", "x-guidance"),
        *(
            ({"structured_outputs": {"json": '{"items":' * depth + "{}" + "}" * depth}}, "structured_outputs.json", says)
            for depth, says in ((500, "recursion limit"), (100_000, "nested too deeply"))
        ),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "(?=a)"}}}, "structured_outputs.json", "look-around"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex", "backreferences"),
        ({"structured_outputs": {"regex": "a)"}}, "structured_outputs.regex", "a)"),
        ({"structured_outputs": {"grammar": "start: nosuch"}}, "structured_outputs.grammar", "nosuch"),
        ({"structured_outputs": {"grammar": 'root ::= "a" nosuch'}}, "structured_outputs.grammar", "nosuch"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "1000"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1000"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice", "1000"),
        ({"structured_outputs": {"choice": [f"{n}{'x' * 599}" for n in range(1000)]}}, "structured_outputs.choice", "524288"),
        ({"structured_outputs": {"grammar": f'start: "{"x" * 600_000}"'}}, "structured_outputs.grammar", "524288"),
        ({"structured_outputs": {"grammar": "root ::= a" + "\n" * 80_000 + 'a ::= "a"'}}, "structured_outputs.grammar", "32768"),
        (
            {"structured_outputs": {"grammar": "\n".join(f"a{n} ::= a{n + 1}" for n in range(501))}},
            "structured_outputs.grammar",
            "501 rules",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "2 of"),
        ({"structured_outputs": {}}, "structured_outputs", "0 of"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag", "not served"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
    ],
    ids=lambda value: str(value)[:90],
)
def test_what_cannot_be_honoured_is_named(server: RunningServer, body: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True):
        error = post(server, {**body, "stream": stream}, 400)["error"]
        assert error["param"] == param, error
        assert says in error["message"]
        assert len(error["message"]) < 700
