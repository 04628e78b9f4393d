"""Reasoning over a real socket. Its marks: test_reasoning_parsers.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jackfield import SamplingParams
from tests.chat_families import ADD, TEMPLATES, Families, deltas, flat, serve_families

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module", params=[(), ("<think>", "</think>", "<tool_call>", "</tool_call>")], ids=["text", "tokens"])
def families(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Families]:
    """The marks are text, or special tokens, which an answer's text leaves out."""
    templates = {name: TEMPLATES[name] for name in ("plain", "think", "thinking")}
    with serve_families(tmp_path_factory.mktemp("families"), templates, special=request.param) as made:
        yield made


@pytest.mark.parametrize("model", ["think", "thinking"])
def test_reasoning_wherever_the_text_is_cut(families: Families, model: str) -> None:
    """Begun by the model, or by its template."""
    text = ("<think>\n" if model == "think" else "") + "Two and two.\n</think>\n\nFour."
    expected = {"content": "Four.", "reasoning": "Two and two.", "calls": [], "finish_reason": "stop"}
    families.will_say(text)
    choice = families.choice(model)
    assert flat(choice) == expected
    assert choice["message"]["reasoning_content"] == "Two and two."
    for pieces in deltas(text):
        families.will_say(*pieces)
        assert families.stream(model) == expected, pieces


def test_reasoning_and_then_a_call(families: Families) -> None:
    text = f"I add.\n</think>\n\n{CALL}"
    expected = {"content": "", "reasoning": "I add.", "calls": [("add", '{"a": 1, "b": 2}')], "finish_reason": "tool_calls"}
    families.will_say(text)
    choice = families.choice("thinking", tools=[ADD])
    assert flat(choice) == expected
    assert choice["message"]["content"] is None
    for pieces in deltas(text):
        families.will_say(*pieces)
        assert families.stream("thinking", tools=[ADD]) == expected, pieces


def test_a_call_within_the_reasoning_is_none(families: Families) -> None:
    families.will_say(f"Perhaps {CALL}?</think>No.")
    told = flat(families.choice("thinking", tools=[ADD]))
    assert (told["content"], told["calls"]) == ("No.", [])
    assert told["reasoning"] == f"Perhaps {CALL}?"


def test_reasoning_alone(families: Families) -> None:
    families.will_say(*"Two and two")
    choice = families.choice("thinking", max_tokens=7)
    assert choice["message"]["content"] is None
    told = flat(choice)
    assert told == {"content": "", "reasoning": "Two and", "calls": [], "finish_reason": "length"}
    assert families.stream("thinking", max_tokens=7) == told


def test_without_reasoning(families: Families) -> None:
    """The template ends it, a model begins with none, or knows none."""
    for model, kwargs in (("think", {"enable_thinking": False}), ("think", {}), ("plain", {})):
        families.will_say("Four.")
        choice = families.choice(model, chat_template_kwargs=kwargs)
        assert flat(choice) == {"content": "Four.", "reasoning": "", "calls": [], "finish_reason": "stop"}
        assert "reasoning_content" not in choice["message"]
    families.will_say("It is </think> here.")
    assert flat(families.choice("think", chat_template_kwargs={"enable_thinking": False}))["content"].startswith("It is")


def test_reasoning_that_is_not_wanted(families: Families) -> None:
    families.will_say("Two and two.</think>Four.")
    body = {"include_reasoning": False}
    choice = families.choice("thinking", **body)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Four.", None)
    assert "reasoning_content" not in choice["message"]
    families.will_say(*"Two and two.", "</think>", "Four.")
    assert families.stream("thinking", **body) == {"content": "Four.", "reasoning": "", "calls": [], "finish_reason": "stop"}


def test_a_grammar_begins_after_it(families: Families) -> None:
    """Where the template has ended the reasoning, or knows none, it begins at once."""
    grammars = []
    for model, kwargs in (("think", {}), ("thinking", {}), ("think", {"enable_thinking": False}), ("plain", {})):
        families.will_say("{}")
        families.choice(model, response_format={"type": "json_object"}, chat_template_kwargs=kwargs)
        params = families.engine.requests[-1].params
        assert isinstance(params, SamplingParams)
        assert params.grammar is not None
        grammars.append(params.grammar.source)
    begins, begun, ended, none = grammars
    assert "rest" in begins
    assert "rest" in begun
    assert begins != begun
    assert ended == none
    assert "rest" not in none


def test_a_message_that_is_gone_on_with(families: Families) -> None:
    """Its own marks tell whether it has come to its answer."""
    body = {"continue_final_message": True, "add_generation_prompt": False}
    for begun, rest, told in (
        ("<think>\nLet me", " see.</think>Four.", ("see.", "Four.")),
        ("<think>\nHm.\n</think>\nFo", "ur.", ("", "ur.")),
        ("Fo", "ur.", ("", "ur.")),
    ):
        messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": begun}]
        families.will_say(*rest)
        streamed = families.stream("think", messages=messages, **body)
        assert (streamed["reasoning"], streamed["content"]) == told
        assert flat(families.choice("think", messages=messages, **body)) == streamed
