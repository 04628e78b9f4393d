"""Chat templates: a conversation becomes text, in transformers' sandbox. What a client wrote never becomes a token that has a meaning."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from msgspec import UNSET, Struct
from tokenizers import Tokenizer

from jackfield.errors import BadRequest
from jackfield.history import PROBE_TOOLS, CallForm, filled_tools, find_form, has_calls, in_form, tools_in_form
from jackfield.prompts import ChatPrompt

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

__all__ = ["ChatRenderer", "GuardedTokens", "Rendered", "TemplateTraits", "template_traits"]

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

# In names such as <|this|>; DeepSeek's are wide ones.
_BARS = frozenset("|\uff5c")


class TemplateTraits(Struct, frozen=True, kw_only=True):
    """What a template expects of messages. takes_parts: it goes through a content's parts. takes_strings: it also asks whether a content is
    a string. knows_developer: it names that role. knows_tools, knows_calls: it looks at a request's tools, at a message's calls."""

    takes_parts: bool = False
    takes_strings: bool = True
    knows_developer: bool = False
    knows_tools: bool = False
    knows_calls: bool = False


class Rendered(Struct, frozen=True, kw_only=True):
    """A conversation as text. kept: characters in it that stand for the name of a guarded token which a client wrote as text."""

    text: str
    kept: Mapping[str, str] = {}

    def restore(self, text: str) -> str:
        """A part of the text, with what the client wrote in the place of what stands for it."""
        return re.sub(f"[{''.join(self.kept)}]", lambda match: self.kept[match[0]], text) if self.kept else text

    def tail(self, size: int) -> str:
        """The last characters, with U+FFFD for what stands for a name: it is no special token here."""
        return "".join("\ufffd" if character in self.kept else character for character in self.text[-size:])


class GuardedTokens:
    """The added tokens of a tokenizer that a client's text never becomes, and how such text is encoded.

    These are the special ones, and marks: what is written `<|so|>`, and what one of the templates names (`<think>`, `</tool_call>`) or has
    the counterpart of. Other added tokens are words to the model (Gemma's `<h1>`) and stay tokens. ids: by name. marks: those of the names
    that are not special; what an assistant has said keeps them, since templates look for them there.
    """

    def __init__(self, tokenizer: Tokenizer, serialized: str, templates: Iterable[str]) -> None:
        written = "\n".join(templates)
        guarded = {
            token_id: token
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content and (token.special or _is_mark(token.content, written))
        }
        self.ids = {token.content: token_id for token_id, token in guarded.items()}
        self.marks = frozenset(token.content for token in guarded.values() if not token.special)
        self._pattern = _tokens_pattern(guarded.values())
        self._serialized = serialized
        self._lock = threading.Lock()
        self._plain: Tokenizer | None = None

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The texts before, between and after the guarded tokens of a text, and the ids of these."""
        pieces = self._pattern.split(text)
        return pieces[::2], [self.ids[name if name in self.ids else name.strip()] for name in pieces[1::2]]

    @contextmanager
    def as_text(self, own: Tokenizer) -> Iterator[Tokenizer]:
        """While the block runs, a tokenizer to which the guarded names are text. own: the thread's; where there are marks it will not do,
        and threads take turns with another, which is made when it is first needed: few conversations have such names."""
        if not self.marks:
            own.encode_special_tokens = True
            try:
                yield own
            finally:
                own.encode_special_tokens = False
            return
        with self._lock:
            if self._plain is None:
                self._plain = _with_special(self._serialized, self.marks)
                self._plain.encode_special_tokens = True
            yield self._plain


class ChatRenderer:
    """Renders the conversations of one model. control_tokens: texts that its tokenizer takes for special tokens. marks: for tokens that are
    not special, and that no text but what an assistant has said may have."""

    def __init__(self, model: str, source: PreTrainedTokenizerFast, control_tokens: Iterable[str], marks: Iterable[str] = ()) -> None:
        self._model = model
        self._source = source
        control = set(control_tokens)
        self._control = _names_pattern(control)
        self._guarded = _names_pattern(control.union(marks))
        self._lock = threading.Lock()
        self._form = lru_cache(maxsize=64)(self._find_form)
        templates = source.chat_template.values() if isinstance(source.chat_template, dict) else [source.chat_template]
        for template in filter(None, templates):  # now, since it takes up to a quarter of a second
            self._form(template)

    def __call__(self, prompt: ChatPrompt) -> Rendered:
        """Raises: BadRequest for a conversation that the template refuses, or that there is no template for."""
        template = self._template(prompt)
        kwargs = {} if prompt.template_kwargs is UNSET else prompt.template_kwargs
        reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
        if reserved:
            raise BadRequest(
                f"chat_template_kwargs may not set {reserved[0]!r}, an argument of the server's own.", param="chat_template_kwargs"
            )
        messages = prompt.messages
        if prompt.continue_final_message:  # its content is gone on with, and what a template writes after that is cut off
            messages = [*messages[:-1], {key: value for key, value in messages[-1].items() if key != "tool_calls"}]
        form = self._form(template) if prompt.tools or _has_calls(prompt) else CallForm()
        given: dict[str, Any] = {
            "messages": _template_messages(messages, template_traits(template), form),
            "tools": tools_in_form(prompt.tools, form),
            "documents": prompt.documents,
            "kwargs": kwargs,
        }
        texts = list(_texts(given))
        fresh = _unused(itertools.chain([template], texts))
        kept: dict[str, str] = {}
        if any(map(self._guarded.search, texts)):
            given = self._protected(given, _Placeholders(fresh, kept))
        end = ""
        if prompt.continue_final_message:
            end = next(fresh)
            _append(given["messages"][-1], end)
        text = self._render(template, prompt, given, form)
        if end:
            if end not in text:
                raise BadRequest("The chat template leaves the last message out, so it cannot be continued.", param=prompt.param)
            text = text[: text.rindex(end)]
        return Rendered(text=text, kept=kept)

    def _protected(self, given: Mapping[str, Any], hide: _Placeholders) -> dict[str, Any]:
        """With a character in the place of each guarded name. What an assistant has said keeps marks: a template may cut its reasoning."""
        guarded, control = partial(hide, self._guarded), partial(hide, self._control)

        def message(fields: dict[str, Any]) -> dict[str, Any]:
            said = control if fields.get("role") == "assistant" else guarded
            return {key: _changed(value, said if key == "content" else guarded) for key, value in fields.items()}

        changed = {key: _changed(value, guarded) for key, value in given.items() if key != "messages"}
        return {**changed, "messages": [message(fields) for fields in given["messages"]]}

    def _template(self, prompt: ChatPrompt) -> str:
        if not self._source.chat_template and prompt.chat_template is None:
            raise BadRequest(f"Model `{self._model}` has no chat template, so it takes no messages; send text instead.", param=prompt.param)
        if not prompt.messages:
            raise BadRequest("The conversation is empty; at least one message is needed.", param=prompt.param)
        try:
            # Of several templates that of tools shows past calls; the default leaves them out.
            tools = [] if prompt.tools is None and _has_calls(prompt) else prompt.tools
            return str(self._source.get_chat_template(prompt.chat_template, tools))
        except ValueError as error:  # of several templates none is the default
            raise BadRequest(f"Model `{self._model}` has no default chat template: {str(error)[:200]}", param=prompt.param) from None

    def _render(self, template: str, prompt: ChatPrompt, given: Mapping[str, Any], form: CallForm) -> str:
        try:
            return self._apply(template, given, form, add_generation_prompt=prompt.add_generation_prompt)
        except Exception as error:  # a template is a program of the model's: it raises what it likes, on what the client sent
            refused = BadRequest(f"The chat template refused the messages: {str(error)[:200]}", param=prompt.param)
            filled = filled_tools(given["tools"] or [])  # where there are none, a template may go through them all the same
            if filled == given["tools"]:
                raise refused from error
        try:
            return self._apply(template, {**given, "tools": filled}, form, add_generation_prompt=prompt.add_generation_prompt)
        except Exception as error:  # as before
            raise refused from error

    def _apply(self, template: str, given: Mapping[str, Any], form: CallForm, *, add_generation_prompt: bool) -> str:
        options = {"chat_template": template, "add_generation_prompt": add_generation_prompt}
        options |= {"tools": given["tools"], "documents": given["documents"], **given["kwargs"]}
        with self._lock:  # transformers compiles into a cache that it does not lock
            if not form.apart:
                return cast("str", self._source.apply_chat_template(given["messages"], tokenize=False, **options))
            from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415  (after hide_torch)

            # The other door takes what is None out of the messages.
            [text], _ = render_jinja_template([given["messages"]], **{**self._source.special_tokens_map, **options})
            return cast("str", text)

    def _find_form(self, template: str) -> CallForm:
        """How the template takes calls, and their results."""
        traits = template_traits(template)

        def render(messages: list[dict[str, Any]], form: CallForm) -> str:
            given: dict[str, Any] = {"messages": _template_messages(messages, traits, form), "tools": tools_in_form(PROBE_TOOLS, form)}
            return self._apply(template, {**given, "documents": None, "kwargs": {}}, form, add_generation_prompt=True)

        return find_form(render) if "tool_calls" in template else CallForm()


def _has_calls(prompt: ChatPrompt) -> bool:
    """Whether the conversation has calls, or results of some."""
    return any(has_calls(message) or message.get("role") == "tool" for message in prompt.messages)


class _Placeholders:
    """Puts a private character in the place of each name that a pattern finds."""

    def __init__(self, fresh: Iterator[str], kept: dict[str, str]) -> None:
        self._fresh = fresh
        self._kept = kept
        self._placeholders: dict[str, str] = {}

    def __call__(self, names: re.Pattern[str], text: str) -> str:
        return names.sub(self._placeholder, text)

    def _placeholder(self, match: re.Match[str]) -> str:
        name = match[0]
        if name not in self._placeholders:
            placeholder = self._placeholders[name] = next(self._fresh)
            self._kept[placeholder] = name
        return self._placeholders[name]


def _is_mark(name: str, templates: str) -> bool:
    """Whether an added token has a meaning: by its look, or since it, or its counterpart, is in the templates."""
    if len(name) < 3 or name[0] + name[-1] not in ("<>", "[]"):  # white space, or a word
        return False
    other = f"{name[0]}{name[2:]}" if name[1] == "/" else f"{name[0]}/{name[1:]}"
    return not _BARS.isdisjoint(name[1] + name[-2]) or name in templates or other in templates


def _with_special(serialized: str, names: Iterable[str]) -> Tokenizer:
    """A copy of a tokenizer to which these added tokens are special: those alone it can be told to take for text."""
    settings = json.loads(serialized)
    for token in settings["added_tokens"]:
        token["special"] = token["special"] or token["content"] in names
    return Tokenizer.from_str(json.dumps(settings))


def _tokens_pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Finds added tokens in a text, each with the white space that the tokenizer takes as a part of it."""
    left: dict[str, str] = {}
    right: dict[str, str] = {}
    for token in tokens:
        (left if token.lstrip else right)[token.content] = r"\s*" if token.rstrip else ""
    # White space that a token takes begins where no other is before it: else each place of it would be tried.
    patterns = ([rf"(?<!\s)\s*{_alternatives(left)}"] if left else []) + ([_alternatives(right)] if right else [])
    return re.compile(f"({'|'.join(patterns)})" if patterns else "(?!)()")


def _names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    found = dict.fromkeys(filter(None, names), "")
    return re.compile(_alternatives(found) if found else "(?!)")


def _alternatives(ends: Mapping[str, str]) -> str:
    """A pattern of any of the names, the longest that fits, each with what follows it. What names have in common is looked at once: there
    are tokenizers with a thousand of one beginning, and texts with as many brackets."""
    first, last = min(ends), max(ends)
    start = first[: next((place for place, letters in enumerate(zip(first, last, strict=False)) if len(set(letters)) > 1), len(first))]
    groups: dict[str, dict[str, str]] = {}
    for name, end in ends.items():
        rest = name[len(start) :]
        groups.setdefault(rest[:1], {})[rest] = end
    shortest = list(groups.pop("", {}).values())
    parts = [*map(_alternatives, groups.values()), *shortest]
    return re.escape(start) + (parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})")


def _unused(texts: Iterable[str]) -> Iterator[str]:
    """Private characters that are in none of the texts, which are looked through when the first is wanted."""
    used = set().union(*texts)
    yield from (character for area in _PRIVATE for character in map(chr, area) if character not in used)


def _texts(value: Any) -> Iterator[str]:
    """Every string in it, at any depth, names of fields as well: a client wrote those of arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every string changed, names of fields as well."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list | tuple) else value


def _append(message: dict[str, Any], text: str) -> None:
    content = message["content"]
    if content is None or isinstance(content, str):
        message["content"] = (content or "") + text
    elif content:
        content[-1]["text"] += text
    else:
        content.append({"type": "text", "text": text})


def _template_messages(messages: list[dict[str, Any]], traits: TemplateTraits, form: CallForm) -> list[dict[str, Any]]:
    """Copies in the form that a template expects; the given ones stay as they are."""
    converted: list[dict[str, Any]] = []
    for message in in_form(messages, form):
        changed = dict(message)
        if changed.get("role") == "developer" and not traits.knows_developer:
            changed["role"] = "system"
        if not (form.apart and has_calls(changed)):  # its null content is what the template looks for
            changed["content"] = _content(changed.get("content"), traits)
        converted.append(changed)
    return converted


def _content(content: Any, traits: TemplateTraits) -> Any:
    if content is None:
        content = ""  # what is missing has no text to a template, which would else write None, or fail
    if isinstance(content, str):
        return content if traits.takes_strings or not traits.takes_parts else [{"type": "text", "text": content}]
    return [dict(part) for part in content] if traits.takes_parts else "\n".join(part["text"] for part in content)


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
    return TemplateTraits(
        takes_parts=takes_parts,
        takes_strings=takes_strings or not takes_parts,
        knows_developer="developer" in template,
        knows_tools=any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name)),
        knows_calls="tool_calls" in template,
    )


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
