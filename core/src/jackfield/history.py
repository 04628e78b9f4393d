"""Calls of tools that a conversation already has, in the form that a template takes.

Templates differ in it: one writes the arguments as they are, another makes JSON of them; one shows calls where the content is null alone,
another refuses two calls in a message. Which form is right is found by rendering a small conversation in each, once a template.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from jackfield.encoding import MAX_DEPTH, is_deep

__all__ = ["PROBE_TOOLS", "CallForm", "filled_tools", "find_form", "has_calls", "in_form", "tools_in_form"]

Message = dict[str, Any]


class CallForm(Struct, frozen=True):
    """How calls and their results are given to a template, where it is not as OpenAI's clients send them, with arguments as an object.

    text: the arguments are the text of an object. apart: a message with calls has no content; what it says is a message before. named: a
    result has the function's name. single: a message has one call, and its result follows. bare: the tools offered are their functions
    alone. numbered: a call's id is `functions.NAME:NUMBER`, for templates that write no other name (Kimi K2).
    """

    text: bool = False
    apart: bool = False
    named: bool = False
    single: bool = False
    bare: bool = False
    numbered: bool = False


_EMPTY: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
# The fewest changes first.
_FORMS = [CallForm(*flags) for flags in sorted(itertools.product((True, False), repeat=6), key=sum)]


def in_form(messages: list[Message], form: CallForm) -> list[Message]:
    """Copies of the messages in that form; the given ones stay as they are. A message whose calls stand apart has None as its content."""
    converted: list[Message] = []
    known: dict[str, tuple[str, Any]] = {}  # by id: the function's name, and the id in this form; a client may use an id again
    count = 0
    for message in _one_by_one(messages) if form.single else messages:
        changed = dict(message)
        if functions := _functions(message):
            for call in functions:
                name, given = str(call["function"].get("name")), call.get("id")
                renamed = form.numbered and not str(given).startswith(f"functions.{name}:")
                known[str(given)] = name, f"functions.{name}:{count}" if renamed else given
                count += 1
            changed["tool_calls"] = [_call(call, form, known) for call in message["tool_calls"]]
            if form.apart:
                said = {key: value for key, value in changed.items() if key != "tool_calls"}
                converted += [said] if said.get("content") else []
                changed["content"] = None
        elif message.get("role") == "tool" and str(message.get("tool_call_id")) in known:
            name, changed["tool_call_id"] = known[str(message.get("tool_call_id"))]
            if form.named and not message.get("name"):
                changed["name"] = name
        converted.append(changed)
    return converted


def has_calls(message: Message) -> bool:
    """Whether it has calls of functions: the one kind there is."""
    return bool(_functions(message))


def tools_in_form(tools: list[dict[str, Any]] | None, form: CallForm) -> list[dict[str, Any]] | None:
    """The tools in that form, and without what is null in them, which is no more than missing."""
    if not tools:
        return tools
    given = [_of_function(tool, lambda function: {key: value for key, value in function.items() if value is not None}) for tool in tools]
    return [tool.get("function", tool) for tool in given] if form.bare else given


def filled_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools with an empty description and no parameters where these are missing, for templates that fail without."""
    return [_of_function(tool, lambda function: {**_EMPTY, **function}) for tool in tools]


def find_form(render: Callable[[list[Message], CallForm], str]) -> CallForm:
    """The form in which a template shows a conversation's calls and results best. render: what the template makes of messages in a form,
    offered `PROBE_TOOLS`; it may raise what it likes."""
    faults: dict[CallForm, int] = {}
    for form in _FORMS:
        try:
            faults[form] = _faults(render(PROBE, form))
        except Exception:  # noqa: S112  (a template is a program of the model's; this form is none that it takes)
            continue
        if not faults[form]:
            return form
    return min(faults, key=faults.__getitem__, default=CallForm())


def _of_function(tool: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A tool, or a function that is one by itself, with the function changed."""
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return tool
    return {**tool, "function": change(function)} if "function" in tool else change(tool)


def _functions(message: Message) -> list[dict[str, Any]]:
    """The calls of a message that are of functions."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict) and isinstance(call.get("function"), dict)] if isinstance(calls, list) else []


def _call(call: Any, form: CallForm, known: Mapping[str, tuple[str, Any]]) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    arguments = _arguments(call["function"].get("arguments"), text=form.text)
    changed = {**call, "function": {**call["function"], "arguments": arguments}}
    return {**changed, "id": known[str(call["id"])][1]} if "id" in call else changed


def _arguments(given: Any, *, text: bool) -> Any:
    """What is no object, or one that no body may have, stays text as it is: a model may have written it."""
    if given is None or given == "":
        given = {}
    if text:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if not isinstance(given, str):
        return given
    try:
        arguments = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return arguments if isinstance(arguments, dict) and not is_deep(arguments, MAX_DEPTH) else given


def _one_by_one(messages: list[Message]) -> Iterator[Message]:
    """Each call in a message of its own, before its result; what was said is in the first."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = _functions(message)
        if len(calls) < 2:
            yield message
            continue
        begin = place
        results: dict[str, list[Message]] = {}
        while place < len(messages) and messages[place].get("role") == "tool":
            results.setdefault(str(messages[place].get("tool_call_id")), []).append(messages[place])
            place += 1
        silent = _silent(message)
        for number, call in enumerate(calls):
            yield {**(silent if number else message), "tool_calls": [call]}
            yield from results.pop(str(call.get("id")), ())
        yield from (result for result in messages[begin:place] if str(result.get("tool_call_id")) in results)


def _silent(message: Message) -> Message:
    """Without what it says and thinks, which was told once."""
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")} | {"content": None}


def _tool(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": "A word."}, "count": {"type": "integer", "description": "A number."}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": f"Looks for {name[-5:]}.", "parameters": parameters}}


def _probe_call(known: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": known, "type": "function", "function": {"name": name, "arguments": arguments}}


PROBE_TOOLS = [_tool("find_amber", "hue"), _tool("find_birch", "leaf")]
PROBE: list[Message] = [
    {"role": "user", "content": "First."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [_probe_call("a1b2c3d4e", "find_amber", '{"hue": "ochre", "count": 8173}')],
    },
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "resin"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Second."},
    {
        "role": "assistant",
        "content": "Looking.",
        "tool_calls": [
            _probe_call("f5g6h7i8j", "find_birch", '{"leaf": "serrate"}'),
            _probe_call("k9l0m1n2o", "find_amber", '{"hue": "sienna"}'),
        ],
    },
    {"role": "tool", "tool_call_id": "f5g6h7i8j", "content": "catkin"},
    {"role": "tool", "tool_call_id": "k9l0m1n2o", "content": "copal"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Third."},
]
# What the text has to have, one call after another: its name, then its arguments, then its result, where other calls may come before.
_SHOWN = [
    ("find_amber", ("ochre", "8173"), "resin"),
    ("find_birch", ("serrate",), "catkin"),
    ("find_amber", ("sienna",), "copal"),
]
# Arguments as JSON in JSON, or as Python writes a dict, and a content that is none.
_MISWRITTEN = re.compile(r"\\+\"(?:hue|leaf|count)\\|'(?:hue|leaf|count)'\s*:|\bNone\b")


# What a template that shows tools says of them.
_OFFERED = ("Looks for amber.", "Looks for birch.")


def _faults(text: str) -> int:
    """How much of the probe the text lacks or has wrong."""
    place = max(text.find("First."), 0)
    faults = len(_MISWRITTEN.findall(text, place)) + sum(word not in text for word in _OFFERED)
    for name, words, result in _SHOWN:
        places = [text.find(name, place)]
        places += [text.find(word, max(places[0], place)) for word in words]  # a template may sort them
        place = max(place, *places)
        faults += sum(found < 0 for found in [*places, text.find(result, place)])
    return faults
