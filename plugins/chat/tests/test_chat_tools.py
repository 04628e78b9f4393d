"""Calls of tools over a real socket: what a model says, and what its client gets. How each family writes them: test_tool_parsers.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jackfield import SamplingParams
from tests.chat_families import ADD, NOW, TEMPLATES, Families, deltas, flat, serve_families

CALLS = {"a": 2, "b": 2}, {"a": 3, "b": -4}
ARGUMENTS = [json.dumps(call) for call in CALLS]
BODY: dict[str, Any] = {"tools": [ADD, NOW], "temperature": 0}


def written(model: str, count: int) -> str:
    """Calls as the family's models write them."""
    key = "parameters" if model == "llama3_json" else "arguments"
    objects = [f'{{"name": "add", "{key}": {arguments}}}' for arguments in ARGUMENTS[:count]]
    if model == "llama3_json":
        return "; ".join(objects)
    return (
        f"[TOOL_CALLS][{', '.join(objects)}]" if model == "mistral" else "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    with serve_families(tmp_path_factory.mktemp("families"), TEMPLATES) as made:
        yield made


@pytest.fixture
def families(served: Families) -> Families:
    served.engine.says = None
    return served


def params(families: Families) -> SamplingParams:
    """What the engine was last asked to do."""
    given = families.engine.requests[-1].params
    assert isinstance(given, SamplingParams)
    return given


@pytest.mark.parametrize(("count", "step"), [(1, 1), (2, 5)])
@pytest.mark.parametrize("model", ["plain", "hermes", "llama3_json", "mistral", "response_template"])
def test_calls_wherever_the_text_is_cut(families: Families, model: str, count: int, step: int) -> None:
    text = written(model, count)
    expected = {
        "content": "",
        "reasoning": "",
        "calls": [("add", arguments) for arguments in ARGUMENTS[:count]],
        "finish_reason": "tool_calls",
    }
    for pieces in deltas(text, step):
        families.will_say(*pieces)
        assert families.stream(model, **BODY) == expected, pieces
    families.will_say(text)
    assert flat(families.choice(model, **BODY)) == expected


def test_text_before_and_between(families: Families) -> None:
    text = f"I add. {written('hermes', 1)}\nAnd: {written('hermes', 1)} Done."
    families.will_say(text)
    whole = flat(families.choice("hermes", **BODY))
    assert whole["content"] == "I add.And:Done."
    assert whole["calls"] == [("add", ARGUMENTS[0])] * 2
    for pieces in deltas(text):
        families.will_say(*pieces)
        assert families.stream("hermes", **BODY) == whole, pieces


@pytest.mark.parametrize("choices", [1, 3])
def test_each_choice_has_its_own_calls(families: Families, choices: int) -> None:
    families.will_say(written("hermes", 2))
    answer = families.post("hermes", **BODY, n=choices)
    told = [flat(choice) for choice in answer["choices"]]
    assert [one["calls"] for one in told] == [[("add", arguments) for arguments in ARGUMENTS]] * choices
    assert len({call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}) == 2 * choices


def test_no_call_is_text(families: Families) -> None:
    """Of what no grammar holds to valid calls."""
    for text in ("Four.", "<tool_call>\n{not JSON}\n</tool_call>", '<tool_call>{"name": 3}</tool_call>', "a <tool_call", '{"name": "add"}'):
        families.will_say(text)
        whole = flat(families.choice("response_template", **BODY))
        assert (whole["content"], whole["calls"], whole["finish_reason"]) == (text, [], "stop")
        assert params(families).grammar is None
        families.will_say(*text)
        assert families.stream("response_template", **BODY) == whole


def test_a_message_with_calls_alone_has_no_content(families: Families) -> None:
    families.will_say(written("plain", 1))
    message = families.choice("plain", **BODY)["message"]
    assert message["content"] is None
    assert list(message) == [
        *("role", "content", "refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning"),
    ]
    families.will_say("Four.")
    assert "tool_calls" not in families.choice("plain", **BODY)["message"]


def test_a_named_function(families: Families) -> None:
    """What the request has named is no reason of its own to end, as in OpenAI's interface."""
    named = {"type": "function", "function": {"name": "add"}}
    families.will_say(written("plain", 1))
    choice = flat(families.choice("plain", **BODY, tool_choice=named))
    assert (choice["calls"], choice["finish_reason"]) == ([("add", ARGUMENTS[0])], "stop")
    assert '"now"' not in families.prompt
    grammar = params(families).grammar
    assert grammar is not None
    assert '"now\\"' not in grammar.source


def test_some_tools_are_allowed(families: Families) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool]}}
    families.will_say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    told = flat(families.choice("plain", **BODY, tool_choice=choice))
    assert (told["calls"], told["finish_reason"]) == ([("now", "{}")], "tool_calls")
    assert '"add"' not in families.prompt
    choice["allowed_tools"]["mode"] = "auto"
    families.will_say("No.")
    assert flat(families.choice("plain", **BODY, tool_choice=choice))["content"] == "No."


def test_no_tool_may_be_called(families: Families) -> None:
    """Then none is shown either, and what looks like a call is text."""
    text = written("hermes", 1)
    for model in ("plain", "hermes"):
        families.will_say(text)
        choice = flat(families.choice(model, **BODY, tool_choice="none"))
        assert (choice["content"], choice["calls"], choice["finish_reason"]) == (text, [], "stop")
        assert "adds" not in families.prompt
        assert params(families).grammar is None


def test_one_call_at_most(families: Families) -> None:
    families.will_say(written("hermes", 2))
    told = flat(families.choice("hermes", **BODY, parallel_tool_calls=False))
    assert told["calls"] == [("add", ARGUMENTS[0])]
    assert families.stream("hermes", **BODY, parallel_tool_calls=False) == told


def test_cut_by_length(families: Families) -> None:
    text = written("plain", 1)
    families.will_say(*text)
    body = {**BODY, "tool_choice": "required", "max_tokens": text.index("2")}
    told = flat(families.choice("plain", **body))
    assert told == {"content": "", "reasoning": "", "calls": [("add", '{"a": ')], "finish_reason": "length"}
    assert families.stream("plain", **body) == told


def test_cut_by_a_stop_text(families: Families) -> None:
    """A call that is not whole is no reason to end."""
    families.will_say(*written("plain", 1))
    told = flat(families.choice("plain", **BODY, stop=', "b"'))
    assert (told["calls"], told["finish_reason"]) == ([("add", '{"a": 2')], "stop")
    assert families.stream("plain", **BODY, stop=', "b"') == told


def test_tools_are_shown(families: Families) -> None:
    """By the template, or, where it knows none, in the system message."""
    families.will_say("x")
    for model in ("hermes", "plain"):
        families.post(model, **BODY)
        assert '"description": "adds"' in families.prompt
        assert '"name": "now"' in families.prompt
    prompt = families.prompt
    assert prompt.startswith("[system]You can call functions.")
    assert prompt.endswith("[user]2+2?[assistant]")
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        families.post("plain", **BODY, messages=[{"role": "system", "content": content}, {"role": "user", "content": "Hi"}])
        assert families.prompt.startswith("[system]Be brief.\n\nYou can call functions.")
        assert families.prompt.count("[system]") == 1


def test_tools_are_shown_without_a_system_message(families: Families) -> None:
    families.will_say("x")
    families.post("turns", **BODY)
    assert families.prompt.startswith("[user]You can call functions.")
    assert families.prompt.endswith("</tool_call>\n\n2+2?[assistant]")
    first, calls, one, other, *_ = history("call_1")
    families.post("turns", **BODY, messages=[first, calls, one, other, {"role": "user", "content": "And?"}])
    assert families.prompt.count("[user]") == 2
    assert families.prompt.endswith("noon\n</tool_response>\n\nAnd?[assistant]")


def history(call_id: str) -> list[dict[str, Any]]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}},
        {"id": f"{call_id}b", "type": "function", "function": {"name": "now", "arguments": ""}},
    ]
    return [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "4"},
        {"role": "tool", "tool_call_id": f"{call_id}b", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Thanks"},
    ]


def test_history_in_words(families: Families) -> None:
    families.will_say("x")
    families.post("plain", messages=history("call_1"), temperature=0)
    assert families.prompt == (
        '[user]2+2?[assistant]<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\n4\n</tool_response>\n<tool_response>\nnoon\n</tool_response>[assistant]Four.[user]Thanks[assistant]"
    )


def test_history_by_the_template(families: Families) -> None:
    families.will_say("x")
    families.post("hermes", messages=history("call_1"), temperature=0)
    assert families.prompt == (
        '[user]2+2?[assistant]<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>[tool]4[tool]noon[assistant]Four.[user]Thanks[assistant]'
    )


def test_ids_of_nine_letters(families: Families) -> None:
    """Mistral's templates raise for others, and clients bring what another server made."""
    families.will_say("x")
    for more in ({"tools": [ADD]}, {}, {"tools": [ADD], "tool_choice": "none"}):
        families.post("mistral", messages=history("call_0123-456789abcdef"), temperature=0, **more)
        assert "[TOOL_CALLS]789abcdef{" in families.prompt
        assert "[TOOL_CALLS]89abcdefb{" in families.prompt


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list(tools)}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "has none"),
        ({"tool_choice": chosen("add")}, "tool_choice", "has none"),
        ({"tool_choice": allowed(chosen("add"))}, "tool_choice", "has none"),
        ({"tools": [ADD], "tool_choice": allowed({"type": "mcp"})}, "tool_choice.allowed_tools.tools[0]", "mcp"),
        ({"tools": [ADD], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools", "no function"),
        ({"tools": [function(parameters={"x-guidance": 5})], "tool_choice": "required"}, "tools[0].function.parameters", "x-guidance"),
        ({"tools": [ADD], "tool_choice": chosen("sub")}, "tool_choice", "'sub'"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.function", "function"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice", "always"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "custom"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "without a function"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name", "Two tools"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "'a b'"),
        ({"tools": [NOW] * 1001}, "tools", "1001"),
        ({"tools": [ADD, function(strict=True, parameters={"not": {}})]}, "tools[1].function.parameters", "not"),
        ({"tools": [function(parameters={"uniqueItems": True})], "tool_choice": "required"}, "tools[0].function.parameters", "uniqueItems"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters", "array"),
        ({"functions": [ADD["function"]]}, "functions", "functions"),
        ({"tools": [ADD], "function_call": {"name": "add"}}, "function_call", "function_call"),
    ],
    ids=str,
)
def test_refused(families: Families, body: dict[str, Any], param: str, words: str) -> None:
    for model in ("plain", "hermes"):
        error = families.post(model, 400, **body)["error"]
        assert error["param"] == param
        assert words in error["message"]


@pytest.mark.parametrize("depth", [150, 300, 450, 900, 5000])
@pytest.mark.parametrize("strict", [False, True])
def test_nested_deeply(families: Families, depth: int, strict: bool) -> None:
    """Served, or refused; never a fault of the server."""
    families.will_say("Four.")
    for model in ("plain", "hermes"):
        for path in ("properties", "$defs"):
            nested = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
            body = {"model": model, "messages": [{"role": "user", "content": "x"}], "tools": [function(strict=strict, parameters="$")]}
            parameters = f'{{"type": "object", "{path}": {{"a": {nested}}}}}'
            answer = families.send(json.dumps(body).replace('"$"', parameters))
            assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)", "format": "odd"}}, "dependentRequired": {}},
        {"properties": {"a": {"type": "string", "pattern": r"\\bfoo\\b"}, "b": {"pattern": "["}}},
        {"properties": {"a": {"type": "any"}, "b": {"$ref": "http://127.0.0.1:9/none"}}, "$schema": "odd"},
        {"properties": None, "required": None, "additionalProperties": None},
        {"properties": {"a": {"type": "number", "multipleOf": 0}}, "x-guidance": 5},
        {"properties": {"a": True}, "required": ["b"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}},
        {"properties": {"a": {"minimum": 5, "maximum": 2}}, "required": ["a"]},
    ],
    ids=str,
)
def test_what_is_not_strict_is_lenient(families: Families, schema: dict[str, Any]) -> None:
    """A schema that cannot be kept to is no reason to refuse a tool that may well not be called."""
    families.will_say("Four.")
    for model in ("plain", "hermes"):
        told = flat(families.choice(model, tools=[function(parameters=schema), ADD]))
        assert told["content"] == "Four."
        grammar = params(families).grammar
        assert grammar is not None
        assert "schema_1" in grammar.source


def test_names_that_are_required_and_not_named(families: Families) -> None:
    """Nothing says that others are not allowed, so the schema is not closed to them."""
    families.will_say("x")
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["b"]}
    assert families.choice("plain", tools=[function(parameters=schema)], tool_choice="required")
    grammar = params(families).grammar
    assert grammar is not None
    assert "additionalProperties" not in grammar.source


def test_many_tools(families: Families) -> None:
    families.will_say("Four.")
    tools = [
        {"type": "function", "function": {**ADD["function"], "name": f"add_{number}", "description": "x" * 200}} for number in range(300)
    ]
    assert flat(families.choice("think", tools=tools, max_tokens=5, truncate_prompt_tokens=100))["content"] == "Four."
    assert '"add_299' in str(params(families).grammar).replace("\\", "")


def test_results_go_with_what_follows(families: Families) -> None:
    """User and assistant take turns, and results stand in the order of their calls."""
    first, calls, one, other, *_ = history("call_1")
    families.will_say("x")
    families.post("plain", messages=[first, calls, other, one, {"role": "user", "content": "And?"}], temperature=0)
    assert families.prompt.endswith(
        "</tool_call>[user]<tool_response>\n4\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n\nAnd?[assistant]"
    )
