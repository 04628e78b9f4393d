"""Chat templates: a conversation becomes text, in transformers' sandbox. What a client wrote never becomes a special token."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from msgspec import UNSET, Struct

from jackfield.errors import BadRequest
from jackfield.prompts import ChatPrompt

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from transformers import PreTrainedTokenizerFast

__all__ = ["ChatRenderer", "Rendered", "TemplateTraits", "template_traits"]

# Arguments of the template call that belong to the server; a request's template_kwargs may not name them.
_RESERVED_KWARGS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens"),
    }
)
# Unicode's private use areas: no text has a meaning for these characters, and no template looks for them.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class TemplateTraits(Struct, frozen=True, kw_only=True):
    """What a template expects of messages. takes_parts: it goes through a content's parts. takes_strings: it also asks whether a content is
    a string. knows_developer: it names that role."""

    takes_parts: bool = False
    takes_strings: bool = True
    knows_developer: bool = False


class Rendered(Struct, frozen=True, kw_only=True):
    """A conversation as text. kept: characters in it that stand for the name of a special token which a client wrote as text."""

    text: str
    kept: Mapping[str, str] = {}

    def restore(self, text: str) -> str:
        """A part of the text, with what the client wrote in the place of what stands for it."""
        for placeholder, name in self.kept.items():
            text = text.replace(placeholder, name)
        return text


class ChatRenderer:
    """Renders the conversations of one model. control_tokens: texts that its tokenizer takes for special tokens."""

    def __init__(self, model: str, source: PreTrainedTokenizerFast, control_tokens: Iterable[str]) -> None:
        self._model = model
        self._source = source
        names = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else None
        self._lock = threading.Lock()

    def __call__(self, prompt: ChatPrompt) -> Rendered:
        """Raises: BadRequest for a conversation that the template refuses, or that there is no template for."""
        template = self._template(prompt)
        kwargs = {} if prompt.template_kwargs is UNSET else prompt.template_kwargs
        reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
        if reserved:
            raise BadRequest(
                f"chat_template_kwargs may not set {reserved[0]!r}, an argument of the server's own.", param="chat_template_kwargs"
            )
        given: dict[str, Any] = {
            "messages": _template_messages(prompt.messages, template_traits(template)),
            "tools": prompt.tools,
            "documents": prompt.documents,
            "kwargs": kwargs,
        }
        texts = list(_texts(given))
        fresh = _unused(itertools.chain([template], texts))
        kept: dict[str, str] = {}
        if self._control is not None and any(map(self._control.search, texts)):
            given = _changed(given, _Placeholders(self._control, fresh, kept))
        end = ""
        if prompt.continue_final_message:
            end = next(fresh)
            _append(given["messages"][-1], end)
        text = self._render(template, prompt, given)
        if end:
            if end not in text:
                raise BadRequest("The chat template leaves the last message out, so it cannot be continued.", param=prompt.param)
            text = text[: text.rindex(end)]
        return Rendered(text=text, kept=kept)

    def _template(self, prompt: ChatPrompt) -> str:
        if not self._source.chat_template and prompt.chat_template is None:
            raise BadRequest(f"Model `{self._model}` has no chat template, so it takes no messages; send text instead.", param=prompt.param)
        if not prompt.messages:
            raise BadRequest("The conversation is empty; at least one message is needed.", param=prompt.param)
        try:
            return str(self._source.get_chat_template(prompt.chat_template, prompt.tools))
        except ValueError as error:  # of several templates none is the default
            raise BadRequest(f"Model `{self._model}` has no default chat template: {str(error)[:200]}", param=prompt.param) from None

    def _render(self, template: str, prompt: ChatPrompt, given: Mapping[str, Any]) -> str:
        try:
            with self._lock:  # transformers compiles into a cache that it does not lock
                text = self._source.apply_chat_template(
                    given["messages"],
                    tools=given["tools"],
                    documents=given["documents"],
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=prompt.add_generation_prompt,
                    **given["kwargs"],
                )
        except Exception as error:  # a template is a program of the model's: it raises what it likes, on what the client sent
            raise BadRequest(f"The chat template refused the messages: {str(error)[:200]}", param=prompt.param) from error
        return cast("str", text)


class _Placeholders:
    """Puts a private character in the place of each special token's name."""

    def __init__(self, control: re.Pattern[str], fresh: Iterator[str], kept: dict[str, str]) -> None:
        self._control = control
        self._fresh = fresh
        self._kept = kept
        self._placeholders: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        return self._control.sub(self._placeholder, text)

    def _placeholder(self, match: re.Match[str]) -> str:
        name = match[0]
        if name not in self._placeholders:
            placeholder = self._placeholders[name] = next(self._fresh)
            self._kept[placeholder] = name
        return self._placeholders[name]


def _unused(texts: Iterable[str]) -> Iterator[str]:
    """Private characters that are in none of the texts, which are looked through when the first is wanted."""
    used = set().union(*texts)
    yield from (character for area in _PRIVATE for character in map(chr, area) if character not in used)


def _texts(value: Any) -> Iterator[str]:
    """Every string in it, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every string changed, the names of its fields left as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list | tuple) else value


def _append(message: dict[str, Any], text: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + text
    elif content:
        content[-1]["text"] += text
    else:
        content.append({"type": "text", "text": text})


def _template_messages(messages: list[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Copies in the form that a template expects; the given ones stay as they are."""
    converted: list[dict[str, Any]] = []
    for message in messages:
        changed = dict(message)
        if changed.get("role") == "developer" and not traits.knows_developer:
            changed["role"] = "system"
        changed["content"] = _content(changed.get("content"), traits)
        if changed.get("tool_calls"):
            changed["tool_calls"] = [_tool_call(call) for call in changed["tool_calls"]]
        converted.append(changed)
    return converted


def _content(content: Any, traits: TemplateTraits) -> Any:
    if content is None:
        content = ""  # what is missing has no text to a template, which would else write None, or fail
    if isinstance(content, str):
        return content if traits.takes_strings or not traits.takes_parts else [{"type": "text", "text": content}]
    return [dict(part) for part in content] if traits.takes_parts else "\n".join(part["text"] for part in content)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """With its arguments as an object, as templates take them, where a client sent them as the text of one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # a model may have written it
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


@lru_cache(maxsize=64)
def template_traits(template: str) -> TemplateTraits:
    """What a template expects, told from its syntax tree."""
    try:
        tree = _environment.parse(template)
    except TemplateSyntaxError:
        return TemplateTraits()  # it fails when it is rendered, which tells the client
    names = _content_names(tree)
    takes_parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    takes_strings = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return TemplateTraits(takes_parts=takes_parts, takes_strings=takes_strings or not takes_parts, knows_developer="developer" in template)


class _Generation(Extension):
    """The block of transformers that marks what an assistant said; here its body alone matters."""

    tags = {"generation"}  # noqa: RUF012  (the form of jinja's own)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])  # noqa: S701  (it renders nothing)


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables that hold a message's content: set from it, or parameters of a macro that is called with it."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    size = -1
    while len(names) > size:  # one may be set from another
        size = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                names |= {param.name for param, given in zip(macro.args, call.args, strict=False) if _is_content(given, names)}
    return names


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is a message's content, perhaps filtered or cut."""
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        key = node.arg
        return _is_content(node.node, names) if isinstance(key, nodes.Slice) else isinstance(key, nodes.Const) and key.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
