"""Conversations with tools, as a model's template takes them; for one that knows no tools, they are told in words.

These are the words of NousResearch/Hermes-Function-Calling, which most models have seen: tools in the system message, a call as a JSON
object between `<tool_call>` tags, a result between `<tool_response>` tags in a message of the user's.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jackfield_chat.calling import Calling

__all__ = ["prepare_messages"]

Message = dict[str, Any]

_SYSTEM = """You can call functions. They are, as JSON schemas:
<tools>
{tools}
</tools>
To call one, write its name and arguments as a JSON object between these tags:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def prepare_messages(messages: list[Message], calling: Calling) -> list[Message]:
    """What the template is given; the messages themselves stay as they are."""
    if calling.native:
        length = calling.parser.id_length
        return messages if length is None else [_with_ids(message, length) for message in messages]
    told: list[Message] = []
    results: list[Message] = []
    ids: list[str] = []  # of the last calls
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        if results:
            told.append({"role": "user", "content": _results(results, ids)})
            results = []
            if message["role"] == "user":  # many templates let user and assistant take turns
                told[-1]["content"] += f"\n\n{_text(message)}"
                continue
        ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
        told.append(_with_calls(message) if ids else message)
    if results:
        told.append({"role": "user", "content": _results(results, ids)})
    return _with_tools(told, calling) if calling.offers else told


def _results(messages: list[Message], ids: list[str]) -> str:
    """In the order of the calls, which the text has no ids for."""
    places = {known: place for place, known in enumerate(ids)}
    ordered = sorted(messages, key=lambda message: places.get(str(message.get("tool_call_id")), len(ids)))
    return "\n".join(f"<tool_response>\n{_text(message)}\n</tool_response>" for message in ordered)


def _with_tools(messages: list[Message], calling: Calling) -> list[Message]:
    """With the tools in the system message, or before what the user says first, for a template that takes none."""
    words = _SYSTEM.format(tools="\n".join(json.dumps(offer.shown["function"], ensure_ascii=False) for offer in calling.offers))
    if not calling.in_system:
        place = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
        changed = {**messages[place], "content": f"{words}\n\n{_text(messages[place])}"}
        return [*messages[:place], changed, *messages[place + 1 :]]
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": words}, *messages]
    return [{**first, "content": f"{_text(first)}\n\n{words}".lstrip()}, *messages[1:]]


def _with_calls(message: Message) -> Message:
    """With its calls in the text."""
    calls = [_call(call) for call in message["tool_calls"]]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [_text(message), *calls]))}


def _call(call: dict[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"), ensure_ascii=False)}, "arguments": {written}}}\n</tool_call>'


def _text(message: Message) -> str:
    content = message.get("content")
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _with_ids(message: Message, length: int) -> Message:
    """With ids of calls in the form that the template insists on: their last letters and digits."""
    changed = dict(message)
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _id(message["tool_call_id"], length)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _id(str(call.get("id", "")), length)} for call in message["tool_calls"]]
    return changed


def _id(given: str, length: int) -> str:
    return re.sub("[^A-Za-z0-9]", "", given)[-length:].rjust(length, "0")
