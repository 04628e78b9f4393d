"""What a template makes of a conversation by jinja alone, in each form in which messages may be given to it, and what a text lacks.

Nothing of jackfield is used here, so that it can be compared with this.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ADAPTATIONS", "CONVERSATIONS", "SPECIAL", "TOOLS", "lacks", "plain_texts"]

Message = dict[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


def _calls(*calls: tuple[str, str, dict[str, Any]]) -> Message:
    made = [{"id": known, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}} for known, name, given in calls]
    return {"role": "assistant", "content": None, "tool_calls": made}


TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("get_time", zone="string")]
_SYSTEM: list[Message] = [{"role": "system", "content": "SYSTEM-TEXT"}]
_ONE: list[Message] = [
    {"role": "user", "content": "QUESTION-ONE"},
    _calls(("callAAAA1", "get_weather", {"city": "Lyonzeile", "days": 37})),
    {"role": "tool", "tool_call_id": "callAAAA1", "content": "RESULT-ONE"},
    {"role": "assistant", "content": "ANSWER-ONE"},
]
_TWO: list[Message] = [
    {"role": "user", "content": "QUESTION-TWO"},
    _calls(("callAAAA2", "get_weather", {"city": "Oslobucht", "days": 41}), ("callAAAA3", "get_time", {"zone": "Kairo-Zone"})),
    {"role": "tool", "tool_call_id": "callAAAA2", "content": "RESULT-TWO"},
    {"role": "tool", "tool_call_id": "callAAAA3", "content": "RESULT-THREE"},
]
_ANSWER: list[Message] = [{"role": "assistant", "content": "ANSWER-TWO"}]
_LAST: list[Message] = [{"role": "user", "content": "QUESTION-THREE"}]
# The second is for templates that want users and assistants in turn, the third for those that take no system message.
CONVERSATIONS = [[*_SYSTEM, *_ONE, *_TWO, *_LAST], [*_SYSTEM, *_ONE, *_TWO, *_ANSWER, *_LAST], [*_ONE, *_TWO, *_ANSWER, *_LAST]]
# In order; the arguments of a call may be sorted, and a result may come before the next call.
_WORDS = [
    *("QUESTION-ONE", "get_weather", {"Lyonzeile", "37"}, "RESULT-ONE", "ANSWER-ONE"),
    *("QUESTION-TWO", "get_weather", {"Oslobucht", "41"}, "get_time", {"Kairo-Zone"}, "RESULT-TWO", "RESULT-THREE", "QUESTION-THREE"),
]
_SINGLE = [*_WORDS[:8], "RESULT-TWO", *_WORDS[8:10], *_WORDS[11:]]


def lacks(text: str, template: str, conversation: list[Message]) -> list[str]:
    """What of the conversation is not in the text, or not in its place, and what is written wrong."""
    found = min((list(_missing(text, words)) for words in (_WORDS, _SINGLE)), key=len)
    if conversation[0]["role"] == "system" and "SYSTEM-TEXT" not in text:
        found.append("SYSTEM-TEXT")
    if re.search(r'\\+"(?:city|zone)', text):
        found.append("(arguments are a string in JSON)")
    if re.search(r"'(?:city|zone)': *'(?:Lyon|Oslo|Kairo)", text):
        found.append("(arguments are Python)")
    if re.search(r"\bNone\b|Undefined", text) and "None" not in template:
        found.append("(None is written)")
    return found


def _missing(text: str, words: list[Any]) -> Iterator[str]:
    place = 0
    for word in words:
        group = word if isinstance(word, set) else {word}
        places = {each: text.find(each, place) for each in group}
        yield from (each for each, found in places.items() if found < 0)
        place = max(place, *(found + len(each) for each, found in places.items() if found >= 0), place)


def one_by_one(conversation: list[Message]) -> list[Message]:
    """Each call before its result: of the only message with two, whose results follow."""
    place = next(place for place, message in enumerate(conversation) if len(message.get("tool_calls", ())) == 2)
    both, first, second, *rest = conversation[place:]
    one, two = ({**both, "tool_calls": [call]} for call in both["tool_calls"])
    return [*conversation[:place], one, first, two, second, *rest]


def with_names(conversation: list[Message]) -> list[Message]:
    """Results with the function's name."""
    names = {"callAAAA1": "get_weather", "callAAAA2": "get_weather", "callAAAA3": "get_time"}
    return [{**message, "name": names[message["tool_call_id"]]} if message["role"] == "tool" else message for message in conversation]


def with_numbers(conversation: list[Message]) -> list[Message]:
    """Ids as Kimi K2 has them."""
    text = json.dumps(conversation)
    ids = {"callAAAA1": "functions.get_weather:0", "callAAAA2": "functions.get_weather:1", "callAAAA3": "functions.get_time:2"}
    for given, known in ids.items():
        text = text.replace(given, known)
    changed: list[Message] = json.loads(text)
    return changed


# Ways in which a conversation, and tools, are adapted to a template that does not take them as they are.
ADAPTATIONS: list[tuple[str, Callable[[list[Message]], list[Message]], list[dict[str, Any]]]] = [
    ("calls one by one", one_by_one, TOOLS),
    ("results with names", with_names, TOOLS),
    ("ids with names", with_numbers, TOOLS),
    ("tools as functions", list, [tool["function"] for tool in TOOLS]),
]


def plain_texts(template: str, conversation: list[Message], tools: list[dict[str, Any]] = TOOLS) -> dict[str, str]:
    """Texts by the form of the messages, in which the template does not raise; the most usual form first."""
    texts: dict[str, str] = {}
    for form in itertools.product(("object", "text"), ("string", "parts"), ("", None, "missing")):
        messages = [_formed(message, *form) for message in conversation]
        try:
            made = _environment.from_string(template).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **SPECIAL
            )
        except Exception:  # a template raises what it likes
            continue
        texts[f"arguments as {form[0]}, content as {form[1]}, empty content {form[2]!r}"] = made
    return texts


def _formed(message: Message, arguments: str, content: str, empty: str | None) -> Message:
    formed = copy.deepcopy(message)
    if formed["content"] is None:
        formed["content"] = empty
    if empty == "missing" and message["content"] is None:
        del formed["content"]
    elif content == "parts" and formed["content"] is not None:
        formed["content"] = [{"type": "text", "text": formed["content"]}]
    for call in formed.get("tool_calls", ()):
        if arguments == "object":
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return formed


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  (the form of jinja's own)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


_environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
_environment.filters["tojson"] = _to_json
_environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now(UTC).strftime(form)}
