"""Mistral's calls: `[TOOL_CALLS]` and a JSON list of them, or, in newer models, a name, `[ARGS]` and an object for each.

The formats are those of mistral-common's tokenizers, versions 3 (the list), 11 (`name[CALL_ID]id[ARGS]{...}`) and 13 (without the id).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jackfield import Dialect, Tool, ToolStream
from jackfield_chat.tools.lark import arguments, call_rules, quoted, with_text
from jackfield_chat.tools.reader import Reader, Reading

__all__ = ["MistralTools", "fits"]

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_WORD = re.compile(r"[A-Za-z0-9_.-]*")


def fits(dialect: Dialect) -> bool:
    """Whether the template or the tokenizer has the mark."""
    return CALLS in dialect.template or CALLS in dialect.special_tokens


class MistralTools:
    """A `ToolParser`. Both formats are read; calls are constrained to the one that the model's files know."""

    visible: tuple[str, ...] = (CALLS, ARGS, CALL_ID)
    id_length: int | None = 9

    def __init__(self, dialect: Dialect) -> None:
        """dialect: whether it has `[ARGS]` tells the format."""
        self._named = ARGS in dialect.template or ARGS in dialect.special_tokens

    def stream(self, *, sure: bool = False) -> ToolStream:
        """Reads an answer."""
        return _Stream(sure=sure)

    def grammar(self, tools: Sequence[Tool], literal: Callable[[str], str], *, required: bool, parallel: bool) -> str:
        """A list after the mark, or the mark before each name."""
        if self._named:
            rules = [f"named: {' | '.join(f'named_{number}' for number in range(len(tools)))}"]
            rules += [f"named_{number}: {quoted(tool.name)} {literal(ARGS)} {arguments(number)}" for number, tool in enumerate(tools)]
            calls, again = "named", parallel
            rules += [f"more: ({literal(CALLS)} named)*"] if again else []
        else:
            listed = 'call (", " call)*' if parallel else "call"
            rules = [f"calls: {listed}", *call_rules(tools, "arguments")]
            calls, again = '" "? "[" calls "]"', False
        more = " more" if again else ""
        start = [f"start: {literal(CALLS)} {calls}{more}"] if required else with_text(CALLS, literal, calls, again=again)
        return "\n".join([*start, *rules])


class _Stream(Reader):
    def read(self) -> Reading[None]:
        while (yield from self.content_until(CALLS)):
            at = yield from self.space(len(CALLS))
            listed = yield from self.has("[", at)
            end = yield from (self._list(at + 1) if listed else self._named(at))
            if end is None:
                self.say(len(CALLS))
            else:
                self.drop(end)

    def _list(self, at: int) -> Reading[int | None]:
        """The place after the calls of a list; the first decides whether it is one."""
        end = yield from self.call((yield from self.space(at)))
        if end is None:
            return None
        while True:
            at = yield from self.space(end)
            if (yield from self.has("]", at)):
                return at + 1
            if not (yield from self.has(",", at)):
                return end
            following = yield from self.call((yield from self.space(at + 1)))
            if following is None:
                return end
            end = following

    def _named(self, at: int) -> Reading[int | None]:
        end = yield from self.run(_WORD, at)
        name = self.text[at:end]
        if (yield from self.has(CALL_ID, end)):
            end = yield from self.run(_WORD, end + len(CALL_ID))
        if (yield from self.has(ARGS, end)):
            end += len(ARGS)
        return (yield from self.call((yield from self.space(end)), name)) if name else None
