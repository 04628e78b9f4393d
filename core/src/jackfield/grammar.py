"""Grammars: what a generated text has to match. Made here from schemas, patterns and rules, in the form of llguidance, and tried."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from jackfield.errors import BadRequest
from jackfield.params import GRAMMAR_FUEL, Grammar
from jackfield.trial import do

__all__ = [
    "Job",
    "Steps",
    "checked_grammar",
    "checking",
    "choice_grammar",
    "compose_grammar",
    "json_grammar",
    "lark_grammar",
    "regex_grammar",
]

# No freedom in white space: a weak model fills its length with it, and what is not free need not be computed.
JSON_STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of all of it as JSON: 200 KB of schema take 0.1 s to compile.
MAX_GRAMMAR_BYTES = 512 * 1024
MAX_CHOICES = 1000
# To convert GBNF takes a microsecond a character, and for chains of rules the square of their number.
MAX_GBNF_CHARS = 32 * 1024
MAX_GBNF_RULES = 500
# llguidance's own way to tell takes the square of the number of empty lines.
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)


def json_grammar(schema: dict[str, Any] | bool, *, param: str, whitespace: str | None = None) -> Grammar:
    """JSON of a schema, on one line. whitespace: a pattern of what may be between its parts instead.

    Raises: BadRequest for a schema whose `x-guidance`, options of llguidance, is no object.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise BadRequest(f"{param} has an x-guidance that is no object.", param=param)
    style = JSON_STYLE if whitespace is None else {"whitespace_flexible": True, "whitespace_pattern": whitespace}
    return Grammar(rule={"json_schema": {**schema, "x-guidance": {**style, **options}}}, param=param)


def regex_grammar(pattern: str, *, param: str) -> Grammar:
    """A whole text that matches a pattern of Rust's regex crate: no look-around, no back-references."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # which the converter leaves out
        raise BadRequest(f"{param} ends with a backslash, which has nothing to escape.", param=param)
    try:
        return lark_grammar(f"start: /{regex_to_lark(pattern, 'dws')}/", param=param)
    except ValueError as error:
        raise BadRequest(f"{param}: {str(error)[:300]}", param=param) from None


def choice_grammar(texts: Sequence[str], *, param: str) -> Grammar:
    """One of several texts. Raises: BadRequest for none, too many, or an empty one."""
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise BadRequest(f"{param} takes 1 to {MAX_CHOICES} texts, none of them empty.", param=param)
    return lark_grammar(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts), param=param
    )


def lark_grammar(rules: str, *, param: str) -> Grammar:
    """A text of rules in llguidance's dialect of Lark, with a rule `start`, or in GBNF. Raises: BadRequest."""
    if _LARK.search(rules):
        return Grammar(rule={"lark_grammar": rules}, param=param)
    count = rules.count("::=")
    if len(rules) > MAX_GBNF_CHARS or count > MAX_GBNF_RULES:
        raise BadRequest(
            f"{param} has {len(rules)} characters and {count} rules; of GBNF {MAX_GBNF_CHARS} and {MAX_GBNF_RULES} are taken.", param=param
        )
    return Grammar(rule={"gbnf": rules}, param=param)


def compose_grammar(rules: str, *, param: str, parts: Mapping[str, Grammar]) -> Grammar:
    """Rules in llguidance's dialect of Lark, with a rule `start`, in which `@name` is the part of that name.

    A part may be composed itself, of parts by other names. An error within one names its own field.
    """
    return Grammar(rule={"lark_grammar": rules}, param=param, parts=dict(parts))


Job = tuple[str, str]
# Gives jobs of `trial.do`, gets what came of each, and ends with the grammar.
Steps = Generator[Job, tuple[bool, str], Grammar]


def checking(grammar: Grammar) -> Steps:
    """Whether a grammar can be honoured, in steps; it ends with the same and its source, or with what is to hold instead.

    Raises: BadRequest naming its field, or that of a part, and what is wrong.
    """
    try:
        size = len(msgspec.json.encode(grammar))
    except RecursionError:
        raise BadRequest(f"{grammar.param} is nested too deeply.", param=grammar.param) from None
    if size > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{grammar.param} makes a grammar of {size} bytes; {MAX_GRAMMAR_BYTES} are taken.", param=grammar.param)
    return Grammar(param=grammar.param, source=_source((yield from _resolved(grammar))))


def checked_grammar(grammar: Grammar) -> Grammar:
    """The same in this process, for tests and benchmarks: what a client sends may take for ever, or end it (`checker.py`)."""
    steps = checking(grammar)
    job = next(steps)
    try:
        while True:
            job = steps.send(do(*job, GRAMMAR_FUEL))
    except StopIteration as end:
        checked: Grammar = end.value
        return checked


def _resolved(grammar: Grammar) -> Generator[Job, tuple[bool, str], list[dict[str, Any]]]:
    """llguidance's list of grammars."""
    try:
        grammars = [grammar.rule]
        if "gbnf" in grammar.rule:
            grammars = [{"lark_grammar": _good((yield "gbnf", grammar.rule["gbnf"]), grammar.param)}]
        for name, part in grammar.parts.items():
            first, *others = yield from _resolved(part)
            grammars += [{**first, "name": name}, *others]
        _good((yield "try", _source(grammars)), grammar.param)
    except BadRequest:
        if grammar.instead is None:
            raise
        return (yield from _resolved(grammar.instead))
    return grammars


def _good(result: tuple[bool, str], param: str) -> str:
    went_well, text = result
    if not went_well:
        raise BadRequest(f"{param} cannot be honoured: {text}", param=param)
    return text


def _source(grammars: list[dict[str, Any]]) -> str:
    return msgspec.json.encode({"grammars": grammars}).decode()
