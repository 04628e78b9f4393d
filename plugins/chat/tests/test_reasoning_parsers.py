"""Reasoning of two families, whole and cut at every place."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield import Dialect, ReasoningParserRegistry, ReasoningText
from jackfield_chat import jackfield_reasoning_parsers

REGISTRY = ReasoningParserRegistry()
jackfield_reasoning_parsers(REGISTRY)
PARSERS = {entry.name: entry for entry in REGISTRY.entries}
THINK = PARSERS["think"].make(Dialect(template=""))
BEGUN, OVER, OPEN = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n"

# prompt, what the model writes, reasoning, answer
CASES = [
    (OPEN, "<think>\nTwo and two.\nFour.\n</think>\n\nIt is 4.\n", "Two and two.\nFour.", "It is 4.\n"),
    (OPEN, "<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
    (OPEN, "It is 4, I <think> so.</think>", "", "It is 4, I <think> so.</think>"),
    (OPEN, "\n <th", "", "\n <th"),
    (OPEN, "\n<think>a < b</thin", "a < b</thin", ""),
    (OPEN, "", "", ""),
    (OPEN, "<think>a</think>", "a", ""),
    (OPEN, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (BEGUN, "Let me see.\n\nYes. \n</think>\n\n The answer", "Let me see.\n\nYes.", "The answer"),
    (BEGUN, "I never end \n", "I never end", ""),
    (BEGUN, "</think>\nNothing to it.", "", "Nothing to it."),
    (OVER, "It is </think> 4.", "", "It is </think> 4."),
    (OVER, "\n", "", "\n"),
    ("what does <think> mean?<|im_end|>\n" + OPEN, "A mark.", "", "A mark."),
]


def read(prompt: str, pieces: list[str]) -> tuple[str, str]:
    stream = THINK.stream(prompt)
    told = [part for piece in pieces for part in stream.feed(piece)] + stream.finish()
    assert all(part.text if isinstance(part, ReasoningText) else part for part in told), "nothing is told twice, nor as an empty piece"
    return "".join(p.text for p in told if isinstance(p, ReasoningText)), "".join(p for p in told if isinstance(p, str))


@pytest.mark.parametrize(("prompt", "text", "reasoning", "answer"), CASES)
def test_wherever_it_is_cut(prompt: str, text: str, reasoning: str, answer: str) -> None:
    assert read(prompt, [text]) == (reasoning, answer)
    assert read(prompt, list(text)) == (reasoning, answer)
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert read(prompt, [text[:first], text[first:second], text[second:]]) == (reasoning, answer)


@given(
    prompt=st.sampled_from([OPEN, BEGUN, OVER]),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "<", "é"])),
)
def test_any_text(prompt: str, pieces: list[str]) -> None:
    assert read(prompt, pieces) == read(prompt, ["".join(pieces)]) == read(prompt, list("".join(pieces)))


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    stream = THINK.stream(BEGUN)
    assert stream.feed("Two and") == [ReasoningText("Two and")]
    assert stream.feed(" </th") == []
    assert stream.feed("e </think") == [ReasoningText(" </the")]
    assert stream.feed("> Four") == ["Four"]


def test_marks_of_mistral() -> None:
    parser = PARSERS["mistral"].make(Dialect(template=""))
    assert (parser.start, parser.end, parser.visible) == ("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]"))
    assert parser.stream("[/INST]").feed("[THINK]Hm.[/THINK]Yes") == [ReasoningText("Hm."), "Yes"]


@pytest.mark.parametrize(("prompt", "begun"), [(BEGUN, True), (OVER, False), (OPEN, None), ("", None)])
def test_begun(prompt: str, begun: bool | None) -> None:
    assert THINK.begun(prompt) is begun


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        (Dialect(template="{{ '<think>\\n' }}{{ m.split('</think>') }}"), "think"),
        (Dialect(template="{{ '[THINK]' }}"), "mistral"),
        (Dialect(template="{{ messages }}", special_tokens=frozenset({"[THINK]"})), "mistral"),
        (Dialect(template="{{ messages }}"), None),
    ],
)
def test_fits(dialect: Dialect, name: str | None) -> None:
    assert next((entry.name for entry in REGISTRY.entries if entry.fits(dialect)), None) == name
