"""Parsers of what models write besides plain text: calls of tools, and reasoning. Plugins bring them, by family of models.

A parser reads a text as it grows, piece by piece, and says what each part of it is; a whole text is read by the same code in one piece.
What it cannot make sense of is text: a parser raises nothing, whatever a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

__all__ = [
    "CallArguments",
    "CallStart",
    "Dialect",
    "ParserEntry",
    "ReasoningParser",
    "ReasoningParserRegistry",
    "ReasoningStream",
    "ReasoningText",
    "Tool",
    "ToolParser",
    "ToolParserRegistry",
    "ToolPiece",
    "ToolStream",
]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# What an operator may write in the place of a name.
_WORDS = ("auto", "none")


class Tool(Struct, frozen=True, kw_only=True):
    """A tool that a request offers. parameters: the JSON schema of its arguments, an object."""

    name: str
    parameters: dict[str, Any] = {}


class Dialect(Struct, frozen=True, kw_only=True):
    """What can be known of how a model writes. template: its chat template. special_tokens: names of its tokenizer's special tokens, which
    the text of an answer leaves out unless a parser wants them. tokenizer: transformers' own object of it, for what else its files say."""

    template: str
    special_tokens: frozenset[str] = frozenset()
    tokenizer: Any = None


class CallStart(Struct, frozen=True):
    """A call begins."""

    name: str


class CallArguments(Struct, frozen=True):
    """The next piece of the arguments of the call that has begun last: JSON, as the model wrote it. A call may have none."""

    text: str


class ReasoningText(Struct, frozen=True):
    """The next piece of the reasoning."""

    text: str


# A string is content. Reasoning is told by what cannot leave it to a parser of its own.
ToolPiece = str | ReasoningText | CallStart | CallArguments


class ToolStream(Protocol):
    """Reads one answer. Pieces that are put together are the same wherever the text was cut."""

    def feed(self, text: str) -> list[ToolPiece]:
        """What is certain by now of the text so far and not told yet."""
        ...

    def finish(self) -> list[ToolPiece]:
        """The rest: the text has ended, in the midst of a call perhaps."""
        ...


@runtime_checkable
class ToolParser(Protocol):
    """Calls as one family of models writes them.

    visible: special tokens that are part of how it writes them. id_length: letters and digits of a call's id, if the family's templates
    insist on a number of them.
    """

    visible: tuple[str, ...]
    id_length: int | None

    def stream(self, *, sure: bool = False) -> ToolStream:
        """A reader of one answer. sure: the answer is constrained by `grammar`, so that a call is told while it is written; else it is told
        when it has ended and is seen to be one, and what is none is content."""
        ...

    def grammar(self, tools: Sequence[Tool], literal: Callable[[str], str], *, required: bool, parallel: bool) -> str | None:
        """A Lark grammar (llguidance's dialect, with a rule `start`) of answers whose calls are all valid ones of these tools; None where
        the family's answers cannot be constrained.

        tools: one at least; in the rules `@schema_0` stands for JSON of the first one's schema, and so on. literal: how a text is written
        in the grammar: quoted, or as the token that it is. required: a call comes at once, and nothing but calls; else any text may come
        before the first. parallel: there may be more than one.
        """
        ...


class ReasoningStream(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[ReasoningText | str]:
        """What is certain by now of the text so far and not told yet; a string is the answer after the reasoning."""
        ...

    def finish(self) -> list[ReasoningText | str]:
        """The rest: the text has ended, in the midst of the reasoning perhaps."""
        ...


@runtime_checkable
class ReasoningParser(Protocol):
    """Reasoning as one family of models marks it. visible: special tokens that are part of that. start, end: the marks."""

    visible: tuple[str, ...]
    start: str
    end: str

    def stream(self, prompt: str) -> ReasoningStream:
        """A reader of one answer. prompt: the end of what the model was given: a template may have begun the reasoning, or ended it."""
        ...

    def begun(self, prompt: str) -> bool | None:
        """Whether the answer starts within the reasoning; None if the model may begin it by itself; False if it is over."""
        ...


class ParserEntry(Struct, frozen=True, kw_only=True):
    """A parser, and the models that it fits."""

    name: str
    make: Callable[[Dialect], Any]
    fits: Callable[[Dialect], bool]


class _Registry:
    def __init__(self) -> None:
        self._entries: dict[str, ParserEntry] = {}

    def _add(self, name: str, make: Callable[[Dialect], Any], fits: Callable[[Dialect], bool]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the parser's name {name!r} is not of small letters, digits and _")
        if name in _WORDS:
            raise ValueError(f"{name!r} is no name for a parser: it has a meaning in the configuration")
        if name in self._entries:
            raise ValueError(f"a parser named {name!r} is there already")
        if not all(map(callable, (make, fits))):
            raise TypeError(f"of the parser {name!r}, `make` and `fits` have to be functions of a Dialect")
        self._entries[name] = ParserEntry(name=name, make=make, fits=fits)

    @property
    def entries(self) -> tuple[ParserEntry, ...]:
        """In the order in which they were added."""
        return tuple(self._entries.values())


class ToolParserRegistry(_Registry):
    """Handed to `jackfield_tool_parsers`; collects what plugins add."""

    def add(self, name: str, make: Callable[[Dialect], ToolParser], *, fits: Callable[[Dialect], bool]) -> None:
        """Add a family. name: what an operator chooses it by. fits: whether a model is of it; the first that fits is taken, in the order of
        the plugins' names and then of the additions.

        Raises: ValueError for a name that is taken or none; TypeError for what cannot be called.
        """
        self._add(name, make, fits)


class ReasoningParserRegistry(_Registry):
    """Handed to `jackfield_reasoning_parsers`; collects what plugins add."""

    def add(self, name: str, make: Callable[[Dialect], ReasoningParser], *, fits: Callable[[Dialect], bool]) -> None:
        """As that of tools."""
        self._add(name, make, fits)
