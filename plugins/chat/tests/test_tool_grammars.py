"""The grammars of calls, by llguidance's own matcher: what they let pass is what the parsers read as calls of the tools."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from jackfield import CallStart, Dialect, Tool, ToolParser, ToolParserRegistry, json_grammar
from jackfield_chat import jackfield_tool_parsers

REGISTRY = ToolParserRegistry()
jackfield_tool_parsers(REGISTRY)
ENTRIES = {entry.name: entry for entry in REGISTRY.entries}
NAMED = Dialect(template="[TOOL_CALLS][ARGS]")
PARSERS: dict[str, ToolParser] = {
    **{name: ENTRIES[name].make(Dialect(template="")) for name in ("hermes", "llama3_json", "mistral")},
    "mistral named": ENTRIES["mistral"].make(NAMED),
}
MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
NUMBER = {"type": "integer"}
TOOLS = [
    Tool(
        name="add",
        parameters={"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"], "additionalProperties": False},
    ),
    Tool(name="add_words", parameters={"properties": {"words": {"type": "array", "items": {"type": "string"}}}, "required": ["words"]}),
    Tool(name="now"),
]
ADD, WORDS, NOW = ("add", '{"a": 2, "b": -2}'), ("add_words", '{"words": ["a }\\" b", "é"]}'), ("now", "{}")


class Vocabulary:
    """Bytes, with the marks as special tokens or as text."""

    def __init__(self, *, special: bool) -> None:
        letters = sorted(ByteLevel.alphabet())
        tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        tokenizer.add_special_tokens(["<eos>", *(MARKS if special else [])])
        self._tokenizer = tokenizer
        self._special = special
        self._guide = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<eos>"))

    def literal(self, text: str) -> str:
        return f"<[{self._tokenizer.token_to_id(text)}]>" if self._special else json.dumps(text)

    def accepts(self, grammar: str, text: str, *, spelt: bool = False) -> bool:
        """Whether it passes, token by token, and may end there. spelt: the marks in it are letters."""
        matcher = LLMatcher(self._guide, grammar)
        assert not matcher.is_error(), matcher.get_error()
        if spelt:
            ids = [token_id for letter in text for token_id in self._tokenizer.encode(letter, add_special_tokens=False).ids]
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def forced(self, grammar: str, text: str) -> str:
        """What the grammar leaves no choice about, after a text."""
        matcher = LLMatcher(self._guide, grammar)
        matcher.consume_tokens(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return self._tokenizer.decode(matcher.compute_ff_tokens(), skip_special_tokens=False)


VOCABULARIES = {special: Vocabulary(special=special) for special in (True, False)}


def grammar_of(family: str, tools: list[Tool], vocabulary: Vocabulary, *, required: bool, parallel: bool) -> str:
    """With the tools' schemas, as an endpoint gives it to the core."""
    rules = PARSERS[family].grammar(tools, vocabulary.literal, required=required, parallel=parallel)
    assert rules is not None
    schemas = [json_grammar({"type": "object", **tool.parameters}, param="tools") for tool in tools]
    parts = [{"name": f"schema_{number}", **schema.rule} for number, schema in enumerate(schemas)]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})


def written(family: str, *calls: tuple[str, str]) -> str:
    """Calls as the family's models write them."""
    if family == "mistral named":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    key = "parameters" if family == "llama3_json" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return "; ".join(objects) if family == "llama3_json" else f"[TOOL_CALLS][{', '.join(objects)}]"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("family", PARSERS)
def test_what_passes(family: str, required: bool, parallel: bool, special: bool) -> None:
    vocabulary = VOCABULARIES[special]
    grammar = grammar_of(family, TOOLS, vocabulary, required=required, parallel=parallel)

    def passes(text: str) -> bool:
        return vocabulary.accepts(grammar, text)

    before = "Let me see {.\n" + ("<|python_tag|>" if family == "llama3_json" else "")
    for call in (ADD, WORDS, NOW):
        assert passes(written(family, call))
        assert passes(before + written(family, call)) is not required
        assert [piece for piece in PARSERS[family].stream(sure=True).feed(written(family, call)) if isinstance(piece, CallStart)]
    assert passes(written(family, ADD, WORDS, ADD)) is parallel
    assert passes(before + written(family, ADD, NOW)) is (parallel and not required)
    for wrong in [("sub", ADD[1]), ("add", '{"a": "2", "b": 2}'), ("add", '{"a": 2}'), ("add", '{"a":2,"b":2}'), ("add_words", ADD[1])]:
        assert not passes(written(family, wrong))
        assert not passes(before + written(family, wrong))
    spelt = {"hermes": "<tool_call>", "llama3_json": "a <|python_tag|>"}.get(family, "[TOOL_CALLS]")
    assert not vocabulary.accepts(grammar, f"a {spelt} is no text", spelt=True)
    for text in ("It is 4.", "a < b, <tool, [TOOL], {}\n", "é" * 50):
        assert passes(text) is not required
    assert not passes(written(family, ADD)[:-1])


def test_most_of_a_call_is_forced() -> None:
    vocabulary = VOCABULARIES[True]
    grammar = grammar_of("hermes", TOOLS[:1], vocabulary, required=True, parallel=False)
    assert vocabulary.forced(grammar, "") == '<tool_call>\n{"name": "add", "arguments": {"a": '


def test_names_and_schemas_are_no_grammar() -> None:
    tool = Tool(name='a"\\ %json\n', parameters={"properties": {"x y": {"const": '"} start: /.*/'}}, "required": ["x y"]})
    vocabulary = VOCABULARIES[False]
    grammar = grammar_of("hermes", [tool], vocabulary, required=True, parallel=False)
    call = json.dumps({"name": tool.name, "arguments": {"x y": '"} start: /.*/'}})
    assert vocabulary.accepts(grammar, f"<tool_call>\n{call}\n</tool_call>")


def test_a_response_template_constrains_nothing() -> None:
    class Tokenizer:
        response_template: ClassVar[dict[str, str]] = {"open_pattern": r"<\|call>"}

        def get_response_parser(self, *, prefix: str) -> None: ...

    specials = frozenset({"<|call>", "<pad>"})
    parser = ENTRIES["response_template"].make(Dialect(template="", special_tokens=specials, tokenizer=Tokenizer()))
    assert parser.visible == ("<|call>",)
    assert parser.grammar(TOOLS, json.dumps, required=True, parallel=False) is None
