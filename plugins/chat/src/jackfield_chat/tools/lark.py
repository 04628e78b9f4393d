"""Grammars of calls, in llguidance's dialect of Lark.

JSON is written without freedom in its white space, so that much of a call is forced and costs no choice of the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from jackfield import Tool

__all__ = ["ANY", "arguments", "call_rules", "quoted", "with_text", "without"]

# Any text; of special tokens it holds none, since they are no text to llguidance.
ANY = r"/(?s:.*)/"


def quoted(text: str) -> str:
    """A text as the grammar's string."""
    return json.dumps(text, ensure_ascii=False)


def arguments(number: int) -> str:
    """What the arguments of the tool of that number match."""
    return f"@schema_{number}"


def call_rules(tools: Sequence[Tool], key: str) -> list[str]:
    """A rule `call`: an object with the name of a tool, and its arguments under the key."""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        head = f'{{"name": {quoted(tool.name)}, "{key}": '
        rules.append(f'call_{number}: {quoted(head)} {arguments(number)} "}}"')
    return rules


def with_text(mark: str, literal: Callable[[str], str], calls: str, *, text: str = ANY, again: bool = False) -> list[str]:
    """Rules of an answer that may be text alone, or text and then calls; `start` is one of them, and `calls` what follows the mark.

    text: a regular expression of what may come before the mark. Spelt out, the mark is in neither text, be it a token or not: who reads the
    answer sees its letters alone. again: after the calls there may be the mark and calls again, by a rule `more` of the caller's.
    """
    more = " more" if again else ""
    atom = literal(mark)
    rules = ["plain: WITHOUT", f"WITHOUT: {text} & {without(mark)}"]
    if atom.startswith('"'):  # a lazy terminal ends with the mark as soon as it is there
        return [f"start: plain | head {calls}{more}", f"head[lazy]: BEFORE {atom}", f"BEFORE: {text}", *rules]
    return [f"start: plain | plain {atom} {calls}{more}", *rules]


def without(mark: str) -> str:
    """A terminal of any text that has the mark nowhere."""
    return f"~/(?s:.*){_regex(mark)}(?s:.*)/"


def _regex(text: str) -> str:
    # Only what has a meaning there: of a letter or `<` the backslash would make something else.
    return "".join(f"\\{character}" if character in r"\/.+*?()|[]{}^$" else character for character in text)
