"""Hermes' calls, which Qwen 2.5 and 3 and SmolLM3 write too: a JSON object between `<tool_call>` and `</tool_call>`.

The format is that of NousResearch/Hermes-Function-Calling and of the chat templates of these models. A call is whole with its object: some
models leave the closing tag out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jackfield import Dialect, Tool, ToolStream
from jackfield_chat.tools.lark import call_rules, with_text
from jackfield_chat.tools.reader import Reader, Reading

__all__ = ["HermesTools", "fits"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# The tag, and an object with a name, whatever a template's syntax puts between them. Others put something else between the same tags: a
# list (Falcon 3), a name before the object (Hunyuan), marks of their own (MiniMax M3).
_JSON = re.compile(r'''<tool_call>(?:\\n|[\s'"+~{}%-])*\{\\*"name\\*"''')
# A template may show both: its examples are then of these, as those of Qwen 3 Coder and 3.5, and GLM 4.5.
_OTHERS = ("<function=", "<arg_key>")


def fits(dialect: Dialect) -> bool:
    """Whether the template shows these tags, with JSON in them."""
    return _JSON.search(dialect.template) is not None and not any(mark in dialect.template for mark in _OTHERS)


class HermesTools:
    """A `ToolParser`."""

    visible: tuple[str, ...] = (OPEN, CLOSE)
    id_length: int | None = None

    def __init__(self, dialect: Dialect) -> None:
        """dialect: says nothing that would change it."""

    def stream(self, *, sure: bool = False) -> ToolStream:
        """Reads an answer."""
        return _Stream(sure=sure)

    def grammar(self, tools: Sequence[Tool], literal: Callable[[str], str], *, required: bool, parallel: bool) -> str:
        """Each call on a line of its own between its tags, as the templates write them."""
        block = f'"\\n" call "\\n" {literal(CLOSE)}'
        rules = [f'more: ("\\n" {literal(OPEN)} {block})*'] if parallel else []
        more = " more" if parallel else ""
        start = [f"start: {literal(OPEN)} {block}{more}"] if required else with_text(OPEN, literal, block, again=parallel)
        return "\n".join([*start, *rules, *call_rules(tools, "arguments")])


class _Stream(Reader):
    def read(self) -> Reading[None]:
        while (yield from self.content_until(OPEN)):
            at = yield from self.space(len(OPEN))
            end = yield from self.call(at)
            if end is None:
                self.say(len(OPEN))
                continue
            at = yield from self.space(end)
            self.drop(at + len(CLOSE) if (yield from self.has(CLOSE, at)) else end)
