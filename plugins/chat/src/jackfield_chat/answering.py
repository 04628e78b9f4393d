"""What an answer is kept to, and how it is read: reasoning first, then calls of tools and content."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from jackfield import (
    CallStart,
    Grammar,
    Model,
    ReasoningParser,
    ReasoningStream,
    ReasoningText,
    ToolParser,
    ToolPiece,
    ToolStream,
    compose_grammar,
)
from jackfield_chat.answer import CallDelta, FunctionDelta
from jackfield_chat.calling import GENERIC, Calling
from jackfield_chat.tools.lark import ANY, without

__all__ = ["AnswerReader", "Plan", "Said", "plan_answer"]

_WHITE = r"/[ \t\r\n]*/"


class Plan(Struct, frozen=True, kw_only=True):
    """How the answers to a request are made and read.

    grammar: what they match. tools: who reads their calls, if they may have any; sure: the grammar holds them to it; several: there may be
    more than one. reasoning: who reads theirs. tail: the end of the prompt.
    """

    grammar: Grammar | None
    tools: ToolParser | None
    sure: bool
    several: bool
    reasoning: ReasoningParser | None
    tail: str

    @property
    def visible(self) -> tuple[str, ...]:
        """Special tokens that the readers have to see."""
        return (*(self.tools.visible if self.tools else ()), *(self.reasoning.visible if self.reasoning else ()))

    def reader(self) -> AnswerReader:
        """Of one answer."""
        return AnswerReader(
            self.reasoning.stream(self.tail) if self.reasoning else None,
            self.tools.stream(sure=self.sure) if self.tools else None,
            several=self.several,
        )


def plan_answer(calling: Calling, model: Model, form: Grammar | None, tail: str) -> Plan:
    """form: of the content, if the request says one; with tools, an answer is either of that form or calls. tail: the end of the prompt."""
    tools = calling.parser if calling.offers else None
    calls: Grammar | None = None
    if tools is not None:
        required = calling.forced or form is not None
        calls = calling.grammar(tools, model, required=required)
        if calls is None and required:  # a response template can be read, and no more
            tools = GENERIC
            calls = calling.grammar(tools, model, required=required)
    grammar = form if calls is None else calls
    if calls is not None and form is not None and not calling.forced:
        grammar = compose_grammar("start: @form | @calls", param=form.param, parts={"form": form, "calls": calls})
    reasoning = model.reasoning_parser
    if grammar is not None and reasoning is not None:
        grammar = _after_reasoning(grammar, reasoning, model, tail)
    return Plan(grammar=grammar, tools=tools, sure=calls is not None, several=calling.parallel, reasoning=reasoning, tail=tail)


def _after_reasoning(grammar: Grammar, parser: ReasoningParser, model: Model, tail: str) -> Grammar:
    """The grammar begins after the reasoning, which is any text up to its end mark."""
    begun = parser.begun(tail)
    if begun is False:
        return grammar
    end = model.literal(parser.end)
    is_text = end.startswith('"')  # then a lazy terminal ends with it as soon as it is there
    # Spelt out, the mark ends the reasoning for who reads it, be it a token or not.
    thought = f"thought: WITHOUT\nWITHOUT: {ANY} & {without(parser.end)}"
    rest = f"rest: ended {_WHITE}\nended[lazy]: {ANY} {end}" if is_text else f"rest: thought {end} {_WHITE}\n{thought}"
    start = "rest" if begun else f"({model.literal(parser.start)} rest)?"
    return compose_grammar(f"start: {start} @answer\n{rest}", param=grammar.param, parts={"answer": grammar})


class Said(Struct):
    """What is new of an answer. calls: one entry a call."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []


class AnswerReader:
    """Reads one answer as it grows; what it tells is the same wherever the text was cut. several: it may have more than one call."""

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None, *, several: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._several = several
        self._arguments: list[str] = []  # of the calls so far

    @property
    def has_called(self) -> bool:
        """Whether it has called a tool, with arguments that are whole."""
        if not self._arguments:
            return False
        try:
            msgspec.json.decode(self._arguments[-1], type=msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True

    def read(self, text: str, *, ends: bool) -> Said:
        """The next piece of text. ends: it is the last."""
        said = Said(calls=[])
        if self._reasoning is None:
            self._answer(text, said)
        else:
            pieces = self._reasoning.feed(text)
            for piece in [*pieces, *(self._reasoning.finish() if ends else ())]:
                if isinstance(piece, ReasoningText):
                    said.reasoning += piece.text
                else:
                    self._answer(piece, said)
        if ends and self._tools is not None:
            self._tell(self._tools.finish(), said)
        return said

    def _answer(self, text: str, said: Said) -> None:
        self._tell([text] if self._tools is None else self._tools.feed(text), said)

    def _tell(self, pieces: Sequence[ToolPiece], said: Said) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                said.content += piece
                continue
            if isinstance(piece, ReasoningText):
                said.reasoning += piece.text
                continue
            if isinstance(piece, CallStart):
                self._arguments.append("")
            else:
                self._arguments[-1] += piece.text
            index = len(self._arguments) - 1
            if index and not self._several:
                continue
            if isinstance(piece, CallStart):
                function = FunctionDelta(name=piece.name, arguments="")
                said.calls.append(CallDelta(index=index, id=f"call_{secrets.token_hex(12)}", type="function", function=function))
            elif said.calls and said.calls[-1].index == index:
                said.calls[-1].function.arguments += piece.text
            else:
                said.calls.append(CallDelta(index=index, function=FunctionDelta(arguments=piece.text)))
