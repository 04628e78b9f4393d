"""Calls of each family, as its models write them, whole and cut at every place."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jackfield import CallArguments, CallStart, Dialect, ReasoningText, ToolParser, ToolParserRegistry, ToolPiece
from jackfield_chat import jackfield_tool_parsers

REGISTRY = ToolParserRegistry()
jackfield_tool_parsers(REGISTRY)
ENTRIES = {entry.name: entry for entry in REGISTRY.entries}

# As Qwen's models write, in transformers' description of it (the keys are those of its documentation).
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def templated() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


DIALECTS = {"response_template": Dialect(template="{{ messages }}", tokenizer=templated())}
PARSERS: dict[str, ToolParser] = {name: entry.make(DIALECTS.get(name, Dialect(template=""))) for name, entry in ENTRIES.items()}

Told = list[str | tuple[str, str]]


def joined(pieces: list[ToolPiece]) -> Told:
    """Pieces that belong together as one: content, and names with their arguments."""
    told: Told = []
    for piece in pieces:
        last = told[-1] if told else None
        if isinstance(piece, CallStart):
            told.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert isinstance(last, tuple)
            told[-1] = (last[0], last[1] + piece.text)
        elif isinstance(piece, ReasoningText):
            told.append(("reasoning", piece.text))
        elif isinstance(last, str):
            told[-1] = last + piece
        else:
            told.append(piece)
    return told


def read(family: str, pieces: list[str], *, sure: bool = False) -> Told:
    stream = PARSERS[family].stream(sure=sure)
    return joined([told for piece in pieces for told in stream.feed(piece)] + stream.finish())


ADD = ("add", '{"a": 2, "b": 2}')
NESTED = ("find", '{"where": {"q": "}</tool_call>\\" [", "n": [1, -2.5e3, true, null, {}]}, "é": "\\u00e9 ü"}')


def hermes(call: tuple[str, str], key: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{call[0]}", "{key}": {call[1]}}}\n</tool_call>'


def plain(call: tuple[str, str], key: str = "parameters") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


NO_NAME, NO_OBJECT = hermes(ADD).replace('"add"', "3"), hermes(("add", '"2 and 2"'))
CUT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b"'
JSON_OUTSIDE = 'Like this: {"name": "add", "parameters": {}}'
V11 = "[TOOL_CALLS]add[CALL_ID]Ab1[ARGS]" + ADD[1]

# family, what the model writes, what it is
CASES: list[tuple[str, str, Told]] = [
    ("hermes", "It is 4.\n", ["It is 4.\n"]),
    ("hermes", "", []),
    ("hermes", hermes(ADD), [ADD]),
    ("hermes", f"{hermes(ADD)}\n{hermes(NESTED)}", [ADD, NESTED]),
    ("hermes", f" Let me see.\n\n{hermes(ADD)}\nAnd \n{hermes(ADD, 'parameters')}\n Done.\n", [" Let me see.", ADD, "And", ADD, "Done.\n"]),
    ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f","id":7}</tool_call>', [("f", '{"a":1}')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}', [("add", "{}")]),
    ("hermes", f"a {NO_NAME} b", [f"a {NO_NAME} b"]),
    ("hermes", NO_OBJECT, [NO_OBJECT]),
    ("hermes", f"So:\n{CUT}", [f"So:\n{CUT}"]),
    ("hermes", f"<tool_call>{hermes(ADD)}", ["<tool_call>", ADD]),
    ("hermes", "<tool_call>\nno JSON</tool_call> \n", ["<tool_call>\nno JSON</tool_call> \n"]),
    ("hermes", hermes(("add", "{'a': 2}")), [hermes(("add", "{'a': 2}"))]),
    ("hermes", "a < b <tool", ["a < b <tool"]),
    ("llama3_json", plain(ADD), [ADD]),
    ("llama3_json", f"\n{plain(ADD)}; {plain(NESTED)}", [ADD, NESTED]),
    ("llama3_json", f"{plain(ADD, 'arguments')}\n{plain(ADD)} done", [ADD, ADD, "done"]),
    ("llama3_json", f"I add.<|python_tag|>{plain(ADD)}", ["I add.", ADD]),
    ("llama3_json", JSON_OUTSIDE, [JSON_OUTSIDE]),
    ("llama3_json", '{"name": "Bob", "age": 3}\n', ['{"name": "Bob", "age": 3}\n']),
    ("llama3_json", f'{plain(ADD)}; {{"name"', [ADD, '; {"name"']),
    ("llama3_json", '<|python_tag|>search(query="x")', ['<|python_tag|>search(query="x")']),
    ("mistral", f"[TOOL_CALLS] [{plain(ADD, 'arguments')}]", [ADD]),
    ("mistral", f"So.\n[TOOL_CALLS][{plain(ADD, 'arguments')}, {plain(NESTED)}]", ["So.", ADD, NESTED]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]find[ARGS]{NESTED[1]}", [ADD, NESTED]),
    ("mistral", V11, [ADD]),
    ("mistral", f"[TOOL_CALLS]add{ADD[1]} ", [ADD]),
    ("mistral", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("mistral", "[TOOL_CALLS] none at all", ["[TOOL_CALLS] none at all"]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arg', ['[TOOL_CALLS][{"name": "add", "arg']),
    ("mistral", "a list [1, 2] [TOOL", ["a list [1, 2] [TOOL"]),
    ("response_template", f"Let me see.\n{hermes(ADD)}\n{hermes(ADD)}\nDone.<|im_end|>", ["Let me see.", ADD, ADD, "Done."]),
    ("response_template", "It is 4.", ["It is 4."]),
    ("response_template", f"a {NO_NAME} b", [f"a {NO_NAME} b"]),
    ("response_template", f"So:\n{CUT}", [f"So:\n{CUT}"]),
    ("response_template", f"<tool_call>no JSON</tool_call> and {hermes(ADD)}", ["<tool_call>no JSON</tool_call> and", ADD]),
]


@pytest.mark.parametrize(("family", "text", "told"), CASES)
def test_wherever_it_is_cut(family: str, text: str, told: Told) -> None:
    assert read(family, [text]) == told
    assert read(family, list(text)) == told
    places = range(len(text) + 1)
    cuts = itertools.combinations_with_replacement(places, 2) if len(text) < 90 else ((place, place) for place in places)
    for first, second in cuts:
        assert read(family, [text[:first], text[first:second], text[second:]]) == told, (first, second)


# What is told of an answer that is constrained, and of one that is cut off or wrong all the same.
SURE: list[tuple[str, str, Told]] = [
    ("hermes", f"So: {hermes(ADD)}\n{hermes(NESTED)}\n", ["So:", ADD, NESTED]),
    ("hermes", CUT, [("add", '{"a": 2, "b"')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 12', [("add", '{"a": 12')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": "x\\u00', [("add", '{"a": "x\\u00')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {}', [("add", "{}")]),
    ("hermes", '<tool_call>\n{"name": "ad', ['<tool_call>\n{"name": "ad']),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": !}}', [("f", '{"a": '), "!}}"]),
    ("llama3_json", f"{plain(ADD)}; {plain(ADD)[:-5]}", [ADD, ("add", '{"a": 2, "b"')]),
    ("mistral", f"[TOOL_CALLS][{plain(ADD, 'arguments')}, {plain(ADD)[:-5]}", [ADD, ("add", '{"a": 2, "b"')]),
    ("mistral", "[TOOL_CALLS]add[ARGS]" + ADD[1][:9], [("add", ADD[1][:9])]),
]


@pytest.mark.parametrize(("family", "text", "told"), SURE)
def test_a_sure_answer_wherever_it_is_cut(family: str, text: str, told: Told) -> None:
    assert read(family, [text], sure=True) == told
    assert read(family, list(text), sure=True) == told
    for place in range(len(text)):
        assert read(family, [text[:place], text[place:]], sure=True) == told, place


def test_a_sure_call_is_told_while_it_is_written() -> None:
    stream = PARSERS["hermes"].stream(sure=True)
    assert stream.feed('<tool_call>\n{"name": "add", "arg') == []
    assert stream.feed('uments": {"a": ') == [CallStart("add"), CallArguments('{"a": ')]
    assert stream.feed('"two') == [CallArguments('"two')]
    assert stream.feed('"}') == [CallArguments('"}')]
    assert stream.feed("}\n</tool_call>") == []
    assert stream.finish() == []


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    stream = PARSERS["hermes"].stream()
    assert stream.feed("It is <b") == ["It is <b"]
    assert stream.feed(" <tool_") == []
    assert stream.feed("box") == [" <tool_box"]
    assert stream.feed('<tool_call>{"name": [') == []
    assert joined(stream.feed("!")) == ['<tool_call>{"name": [!']


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|im_end|>"),
    *('{"name": "a"', ', "arguments": ', '"parameters":', '{"x": 1', '{"name": "f", "arguments": {}}', '"\\ud800"', "\\", "\\u12"),
    *("{", "}", "[", "]", '"', ",", ";", " ", "\n", "1", "-", "tru", "e", "é", "name"),
]


@settings(max_examples=400)
@given(family=st.sampled_from(sorted(PARSERS)), sure=st.booleans(), pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_any_text(family: str, sure: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    told = read(family, pieces, sure=sure)
    assert told == read(family, [text], sure=sure) == read(family, list(text), sure=sure)
    if not sure:
        assert all(isinstance(json.loads(part[1]), dict) for part in told if isinstance(part, tuple))
    if family != "response_template" and all(isinstance(part, str) for part in told):
        assert "".join(map(str, told)) == text


def test_deep_objects_are_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000
    assert read("hermes", [text]) == [text]


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        (Dialect(template='{{ tools }}<tool_call>\\n{"name": ...}\\n</tool_call>'), "hermes"),
        (Dialect(template="<tool_call>\\n<function=name>"), None),
        (Dialect(template='<|start_header_id|>{{ tools }} {"name": ..., "parameters": ...}'), "llama3_json"),
        (Dialect(template="<|start_header_id|>{{ messages }}"), None),
        (Dialect(template="[TOOL_CALLS]"), "mistral"),
        (Dialect(template="{{ messages }}", special_tokens=frozenset({"[TOOL_CALLS]"})), "mistral"),
        (Dialect(template="<tool_call>", tokenizer=templated()), "response_template"),
        (Dialect(template="{{ messages }}"), None),
    ],
)
def test_fits(dialect: Dialect, name: str | None) -> None:
    assert next((entry.name for entry in REGISTRY.entries if entry.fits(dialect)), None) == name
