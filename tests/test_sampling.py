"""Fields of requests that generate, through the smallest endpoint that takes them: what reaches the engine, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct, structs

from jackfield import (
    Context,
    Endpoint,
    Grammar,
    Route,
    SamplingParams,
    SamplingRequest,
    TextPrompt,
    check_generation,
    choice_grammar,
    json_grammar,
    lark_grammar,
    make_sampling_params,
    prompt_limit,
    regex_grammar,
)
from jackfield.grammar import checked_grammar
from jackfield.testing import FakeEngine, RunningServer, make_server


class TextRequest(SamplingRequest, frozen=True, kw_only=True):
    """A text."""

    text: str = "hello"


class TextAnswer(Struct, frozen=True, kw_only=True):
    """What came after it."""

    texts: list[str]


class TextEndpoint(Endpoint[TextRequest, TextAnswer]):
    """Generates, and answers with the texts alone."""

    name = "text"
    id_prefix = "text"
    operations = ("generate",)
    routes = (Route(method="POST", paths=("/text",), request=TextRequest, response=TextAnswer, chunk=str, streams=True, example={}),)

    def preprocess(self, ctx: Context[TextRequest]) -> list[TextPrompt]:
        check_generation(ctx.request)
        return [TextPrompt(text=ctx.request.text, truncate=prompt_limit(ctx.request, ctx.model, max_tokens=7), param="text")]

    def sampling_params(self, ctx: Context[TextRequest]) -> SamplingParams:
        return make_sampling_params(ctx.request, ctx.model, max_tokens=7)

    def build_response(self, ctx: Context[TextRequest]) -> TextAnswer:
        return TextAnswer(texts=[choice.text for choice in ctx.choices])

    def build_chunk(self, ctx: Context[TextRequest], delta: Any) -> str | None:
        return delta.text or None


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(TextEndpoint(), engine=FakeEngine(max_length=64)) as running:
        yield running


def post(server: RunningServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as client:
        answer = client.post("/text", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def params(server: RunningServer, **body: Any) -> SamplingParams:
    """What the engine is asked to do for a request."""
    post(server, body)
    assert server.engine is not None
    given = server.engine.requests[-1].params
    assert isinstance(given, SamplingParams)
    return given


NEUTRAL = SamplingParams(max_tokens=7)


def test_what_is_left_out_is_neutral(server: RunningServer) -> None:
    assert params(server) == NEUTRAL
    assert params(server, **dict.fromkeys(set(TextRequest.__struct_fields__) - {"text"})) == NEUTRAL


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"temperature": 1e-30}, {"temperature": 1e-30}),
        ({"top_p": 1}, {}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": -1}, {}),
        ({"top_k": 0}, {}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"logit_bias": {"7": 500, "8": -500, "9": 1}}, {"logit_bias": {7: 100.0, 8: -100.0, 9: 1.0}}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
        ({"bad_words": ["a"]}, {"bad_words": ((223, 67), (67,))}),
        ({"n": 2}, {"n": 2}),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": -1}, {}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"]}, {"stop": ("x", "yz")}),
        ({"stop": []}, {}),
        ({"stop": ["x"] * 64}, {"stop": ("x",) * 64}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"stop_token_ids": [5]}, {"stop_token_ids": (5,)}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"logprob_token_ids": [5]}, {"logprob_token_ids": (5,)}),
    ],
    ids=str,
)
def test_fields_reach_the_engine(server: RunningServer, body: dict[str, Any], changes: dict[str, Any]) -> None:
    assert params(server, **body) == structs.replace(NEUTRAL, **changes)


@pytest.mark.parametrize(
    "body",
    [
        {"spaces_between_special_tokens": False},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "user": "me"},
        {"use_beam_search": False, "length_penalty": 1, "best_of": 1, "logits_processors": [], "kv_transfer_params": {}},
        {"response_format": {"type": "text"}, "n": 1, "best_of": 1},
        {"response_format": {"type": "text", "json_schema": {}}},
        {"stream": False, "return_token_ids": False},
        {"no_such_field": 1},
    ],
    ids=str,
)
def test_what_asks_for_nothing_passes(server: RunningServer, body: dict[str, Any]) -> None:
    assert params(server, **body) == NEUTRAL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, "1", True)),
        *(("top_p", value) for value in (0, -1, 1.1)),
        *(("top_k", value) for value in (-2, 1.5, "1")),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("repetition_penalty", value) for value in (0, -1)),
        *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1)),
        *(("logit_bias", value) for value in ({"x": 1}, {"1.5": 1}, {"": 1}, {"9" * 30: 1}, {"-1": 1}, {"300": 1}, {"1": "2"})),
        *(("allowed_token_ids", value) for value in ([], [-1], [300], ["1"])),
        *(("bad_words", value) for value in ([""], [1], "a")),
        *(("n", value) for value in (0, -1, "2", 2**40)),
        *(("seed", value) for value in (2**63, 1.5)),
        *(("max_tokens", value) for value in (0, -1, "5", 60)),
        *(("min_tokens", value) for value in (-1, 8)),
        *(("stop", value) for value in ("", ["a", ""], [1], ["x"] * 65)),
        *(("stop_token_ids", value) for value in ([-1], [300])),
        ("logprob_token_ids", [300]),
        *(("prompt_logprobs", value) for value in (-1, 21, True)),
        *(("truncate_prompt_tokens", value) for value in (-2, 65, 0)),
        ("truncation_side", "middle"),
        *(("cache_salt", value) for value in ("", "x" * 129)),
        ("stream_options", {"include_usage": True}),
        *(("best_of", value) for value in (2, 0)),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        *(("response_format", value) for value in ("json_object", {}, {"type": "xml"}, {"type": "json_schema"})),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}),
        *(("structured_outputs", value) for value in ({}, {"json_object": False}, {"regex": "a", "choice": ["a"]})),
        *(("structured_outputs", {name: ["x"]}) for name in ("json", "json_object", "regex", "grammar")),
        *(("structured_outputs", {"choice": value}) for value in ([], [""], "a", ["a"] * 1001)),
        *(("structured_outputs", {"json": value}) for value in ("{", "[]", "{'type': 'object'}", {"type": "nothing"})),
        *(("structured_outputs", {"regex": value}) for value in ("(?=a)", "(", r"(a)\1")),
        *(("structured_outputs", {"grammar": value}) for value in ("", "start: nosuch", "root ::= nosuch")),
        ("structured_outputs", {"choice": ["a"], "structural_tag": {"type": "x"}}),
        ("structured_outputs", {"json": {}, "disable_additional_properties": True}),
        ("structured_outputs", {"json": {}, "whitespace_pattern": "("}),
        *((f"guided_{name}", "x") for name in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")),
        *((name, ["x"]) for name in ("logits_processors", "prompt_embeds")),
        *((name, {"x": 1}) for name in ("repetition_detection", "kv_transfer_params")),
        ("thinking_token_budget", 5),
    ],
    ids=str,
)
def test_what_is_refused_is_named(server: RunningServer, field: str, value: Any) -> None:
    error = post(server, {field: value}, 400)["error"]
    assert (error["param"] or "").partition("[")[0].partition(".")[0] == field, error
    assert len(error["message"]) < 500


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, json_grammar({"type": "object"}, param="response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": False, "schema": SCHEMA}}},
            json_grammar(SCHEMA, param="response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            json_grammar({"type": "object"}, param="response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, json_grammar(SCHEMA, param="structured_outputs.json")),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_grammar(SCHEMA, param="structured_outputs.json")),
        ({"structured_outputs": {"json": True}}, json_grammar({}, param="structured_outputs.json")),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "disable_any_whitespace": True}},
            json_grammar(SCHEMA, param="structured_outputs.json", whitespace=" ?"),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": False}},
            json_grammar({"type": "object"}, param="structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, regex_grammar("a+", param="structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, choice_grammar(["a", "b"], param="structured_outputs.choice")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, lark_grammar('start: "a"', param="structured_outputs.grammar")),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}},
            choice_grammar(["a"], param="structured_outputs.choice"),
        ),
    ],
    ids=str,
)
def test_forms_of_text_reach_the_engine(server: RunningServer, body: dict[str, Any], grammar: Grammar) -> None:
    assert params(server, **body) == structs.replace(NEUTRAL, grammar=checked_grammar(grammar))


def test_one_form_of_text(server: RunningServer) -> None:
    error = post(server, {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, 400)["error"]
    assert (error["param"], "send one" in error["message"]) == ("structured_outputs", True)


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar", "whitespace_pattern"])
def test_older_names_say_what_they_are_called_now(server: RunningServer, name: str) -> None:
    error = post(server, {f"guided_{name}": "x"}, 400)["error"]
    assert error["message"] == f"guided_{name} is not served; send structured_outputs.{name}."


def test_fields_of_streams(server: RunningServer) -> None:
    assert post(server, {"stream": True, "prompt_logprobs": 1}, 400)["error"]["param"] == "prompt_logprobs"
    assert post(server, {"stream": True, "stream_options": {"include_usage": 1}}, 400)["error"]["param"] == "stream_options.include_usage"
    with server.client() as client:
        answer = client.post("/text", json={"stream": True, "stream_options": {}})
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_models_own_defaults() -> None:
    own: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 3}
    with make_server(TextEndpoint(), engine=FakeEngine(sampling=own)) as server:
        assert params(server) == SamplingParams(**own)
        asked = {"temperature": 1, "top_k": -1, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 7}
        assert params(server, **asked) == NEUTRAL


def test_a_maximum_that_nobody_asked_for_gives_way(server: RunningServer) -> None:
    text = "x" * 60  # with the tokens around it 62 of 64
    assert post(server, {"text": text, "max_tokens": 2})["texts"] == ["x"]
    assert post(server, {"text": text})["texts"] != []
    assert post(server, {"text": text, "max_tokens": 3}, 400)["error"]["param"] == "max_tokens"
    assert post(server, {"text": "x" * 62}, 400)["error"]["param"] == "text"


def test_truncation_leaves_room(server: RunningServer) -> None:
    assert server.engine is not None
    for more, length in (({}, 57), ({"max_tokens": 10}, 54), ({"max_tokens": 63}, 1)):
        post(server, {"text": "x" * 100, "truncate_prompt_tokens": -1, **more})
        assert len(server.engine.requests[-1].token_ids[0]) == 4 * length


def test_what_the_engine_is_told_beside(server: RunningServer) -> None:
    post(server, {"priority": -2, "cache_salt": "s"})
    assert server.engine is not None
    assert (server.engine.requests[-1].priority, server.engine.requests[-1].cache_salt) == (-2, "s")
