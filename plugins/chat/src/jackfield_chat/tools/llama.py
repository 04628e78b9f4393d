"""Calls of Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, which is all of the answer, or follows `<|python_tag|>`.

The format is that of Meta's prompt_format.md of these models. Several calls are separated by `; `, or by white space alone. An object
anywhere else is text: an answer may well show one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jackfield import Dialect, Tool, ToolStream
from jackfield_chat.tools.lark import call_rules, with_text
from jackfield_chat.tools.reader import Reader, Reading

__all__ = ["LlamaTools", "fits"]

TAG = "<|python_tag|>"
# Text that is not read as a call: it begins with another character than that of an object.
_TEXT = r"/[ \t\r\n]*([^{ \t\r\n](?s:.*))?/"
# An object with these two fields, as the template asks for it or writes it; that of a tool has a description between them.
_CALL = re.compile(r""""name\\*":(?:(?!description)[^{}]){0,60}"parameters\\*":""")


def fits(dialect: Dialect) -> bool:
    """Whether the template is of Llama 3 and shows a call with a name and parameters. Others of its descendants write other calls."""
    return "<|start_header_id|>" in dialect.template and _CALL.search(dialect.template) is not None


class LlamaTools:
    """A `ToolParser`."""

    visible: tuple[str, ...] = (TAG,)
    id_length: int | None = None

    def __init__(self, dialect: Dialect) -> None:
        """dialect: says nothing that would change it."""

    def stream(self, *, sure: bool = False) -> ToolStream:
        """Reads an answer."""
        return _Stream(sure=sure)

    def grammar(self, tools: Sequence[Tool], literal: Callable[[str], str], *, required: bool, parallel: bool) -> str:
        """Calls on one line; text before them ends with the tag, and text without calls begins with no brace."""
        calls = 'call ("; " call)*' if parallel else "call"
        rules = [f"calls: {calls}", *call_rules(tools, "parameters")]
        if required:
            return "\n".join([f"start: {literal(TAG)}? calls", *rules])
        first, *others = with_text(TAG, literal, "calls", text=_TEXT)
        return "\n".join([f"{first} | calls", *others, *rules])


class _Stream(Reader):
    def read(self) -> Reading[None]:
        yield from self._calls((yield from self.space(0)))
        while (yield from self.content_until(TAG)):
            if not (yield from self._calls((yield from self.space(len(TAG))))):
                self.say(len(TAG))

    def _calls(self, at: int) -> Reading[bool]:
        """Calls that begin there, taken from the text; False if there is none."""
        end = yield from self.call(at)
        if end is None:
            return False
        while end is not None:
            last = end
            at = yield from self.space(end)
            if (yield from self.has(";", at)):
                at = yield from self.space(at + 1)
            end = yield from self.call(at)
        self.drop(last)
        return True
