"""Reasoning between two marks: `<think>` and `</think>` (DeepSeek R1, Qwen 3, SmolLM3), or Mistral's `[THINK]` and `[/THINK]`.

A template may have begun it at the end of the prompt, or begun and ended it (no reasoning is wanted then); else the model begins it, as the
first thing that it writes. White space around the reasoning, and between it and the answer, belongs to neither.
"""

from __future__ import annotations

from jackfield import Dialect, ReasoningStream, ReasoningText
from jackfield_chat.marks import WHITE, overlap

__all__ = ["MarkedReasoning", "fits_mistral", "fits_think", "mistral", "think"]

Piece = ReasoningText | str


def fits_think(dialect: Dialect) -> bool:
    """Whether the template knows of one of these marks: some only take the reasoning out of what was said before, or only begin it."""
    return "<think>" in dialect.template or "</think>" in dialect.template


def fits_mistral(dialect: Dialect) -> bool:
    """Whether the template or the tokenizer has the mark."""
    return "[THINK]" in dialect.template or "[THINK]" in dialect.special_tokens


class MarkedReasoning:
    """A `ReasoningParser`."""

    def __init__(self, start: str, end: str) -> None:
        self.start = start
        self.end = end
        self.visible: tuple[str, ...] = (start, end)

    def begun(self, prompt: str) -> bool | None:
        """By the mark that the prompt ends with: one further in is of an earlier message, or of what a user wrote."""
        prompt = prompt.rstrip(WHITE)
        return True if prompt.endswith(self.start) else False if prompt.endswith(self.end) else None

    def stream(self, prompt: str) -> ReasoningStream:
        """Reads an answer."""
        return _Stream(self.start, self.end, self.begun(prompt))


class _Stream:
    """Where it is: before the reasoning, in it, after it (white space is left out), or in the answer."""

    def __init__(self, start: str, end: str, begun: bool | None) -> None:
        self._start = start
        self._end = end
        self._state = {None: "before", True: "within", False: "answer"}[begun]
        self._text = ""
        self._said = False  # of the reasoning

    def feed(self, text: str) -> list[Piece]:
        """What is certain by now and not told yet."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The rest. White space at the end of a reasoning that is cut off is left out as well."""
        text, self._text = self._text, ""
        if self._state in ("before", "answer"):
            return [text] if text else []
        text = text.rstrip(WHITE) if self._said else text.strip(WHITE)
        return [ReasoningText(text)] if text and self._state == "within" else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Tell a part; False if nothing more is certain."""
        text = self._text
        if self._state == "before":
            bare = text.lstrip(WHITE)
            if bare.startswith(self._start):
                self._state, self._text = "within", bare[len(self._start) :]
            elif not self._start.startswith(bare):
                self._state = "answer"
            else:
                return False
            return True
        if self._state == "within":
            return self._reason(pieces)
        self._text = ""
        if self._state == "after":
            text = text.lstrip(WHITE)
        if text:
            self._state = "answer"
            pieces.append(text)
        return False

    def _reason(self, pieces: list[Piece]) -> bool:
        text = self._text if self._said else self._text.lstrip(WHITE)
        found = text.find(self._end)
        certain = found if found >= 0 else len(text) - overlap(text, self._end)
        said = text[:certain].rstrip(WHITE)
        if said:
            pieces.append(ReasoningText(said))
            self._said = True
        self._text = text[len(said) :] if found < 0 else text[found + len(self._end) :]
        if found >= 0:
            self._state = "after"
        return found >= 0


def think(dialect: Dialect) -> MarkedReasoning:
    """Whatever the dialect."""
    return MarkedReasoning("<think>", "</think>")


def mistral(dialect: Dialect) -> MarkedReasoning:
    """Likewise."""
    return MarkedReasoning("[THINK]", "[/THINK]")
