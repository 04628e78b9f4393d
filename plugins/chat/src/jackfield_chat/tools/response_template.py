"""Calls by the response template that a tokenizer ships: transformers' own description of how its model writes.

transformers reads it (`get_response_parser`, 5.24), and raises for what a model has written wrong. It is given one character after another,
so that what it tells, and where it fails, is the same wherever the text was cut; where it fails, the text is content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jackfield import Dialect, Tool, ToolStream
from jackfield_chat.tools.reader import Reader, Reading

__all__ = ["TemplateTools", "fits"]

_FIELD = "tool_calls"
# Names of the field that has the reasoning.
_THOUGHTS = ("thinking", "reasoning", "reasoning_content")


def fits(dialect: Dialect) -> bool:
    """Whether the tokenizer has a response template with calls in it."""
    template = getattr(dialect.tokenizer, "response_template", None)
    return isinstance(template, dict) and _FIELD in (template.get("fields") or {})


class TemplateTools:
    """A `ToolParser`. Its answers are not constrained."""

    id_length: int | None = None

    def __init__(self, dialect: Dialect) -> None:
        """Raises: ValueError for a response template that transformers refuses."""
        described = json.dumps(dialect.tokenizer.response_template, ensure_ascii=False).replace("\\", "")  # without a pattern's escapes
        self.visible: tuple[str, ...] = tuple(sorted(name for name in dialect.special_tokens if name in described))
        self._make: Callable[[], Any] = lambda: dialect.tokenizer.get_response_parser(prefix="")
        self._make()

    def stream(self, *, sure: bool = False) -> ToolStream:
        """Reads an answer. A call is told when it has ended, in any case."""
        return _Stream(self._make)

    def grammar(self, tools: Sequence[Tool], literal: Callable[[str], str], *, required: bool, parallel: bool) -> None:
        """None: a response template says how to read, not what may be written."""
        return


class _Stream(Reader):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(sure=False)
        self._make = make

    def read(self) -> Reading[None]:
        """`text` begins after what was told; the reader of transformers is `seen` characters further."""
        parser, seen = self._make(), 0
        while True:
            try:
                while seen < len(self.text):
                    character = self.text[seen]
                    seen += 1
                    seen = self._take(parser.feed(character), seen)
                if self.ended:
                    self._take(parser.finalize()[1], seen)
                    self.text = ""  # an end that the template knows, and is no content
                    return
            except Exception:  # whatever transformers raises on what a model wrote: it is text then
                self.say(seen)
                parser, seen = self._make(), 0
                if self.ended and not self.text:
                    return
            if not self.ended:
                yield

    def _take(self, events: list[dict[str, Any]], seen: int) -> int:
        """How many characters, of those that the parser has seen, are still to be told."""
        for event in events:
            called = event["field"] == _FIELD
            if event["type"] == "region_close" and called:
                for name, arguments in _calls(event["value"]):
                    self.tell(name, arguments)
                self.drop(seen)
                seen = 0
            elif event["type"] == "region_chunk" and not called:
                place = self.text.rfind(event["text"], 0, seen)
                told = place + len(event["text"]) if place >= 0 else 0
                (self.think if event["field"] in _THOUGHTS else self.write)(event["text"])
                self.drop(told)
                seen -= told
        return seen


def _calls(value: Any) -> list[tuple[str, str]]:
    """Names and arguments of what a region has in it. Raises: ValueError if it is no call."""
    calls: list[tuple[str, str]] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", function.get("parameters")) if isinstance(function, dict) else None
        if not name or not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("no name and arguments")
        name.encode()
        calls.append((name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    return calls
