"""Calls and their results in a conversation, as templates of each family write them, and the parsers that are chosen from the template."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from jackfield import (
    BadRequest,
    CallArguments,
    CallStart,
    ChatPrompt,
    Dialect,
    ModelCard,
    ReasoningParserRegistry,
    ToolParserRegistry,
)
from jackfield.history import CallForm, in_form
from jackfield.testing import tiny_model
from jackfield.tokenization import ModelTokenizer
from jackfield_chat import jackfield_reasoning_parsers, jackfield_tool_parsers
from tests.templates.written import CONVERSATION, FAMILIES, HERMES, LLAMA, MISTRAL, NAMED, NUMBERED, R1, TOOLS, make_call

TOOL_PARSERS, REASONING_PARSERS = ToolParserRegistry(), ReasoningParserRegistry()
jackfield_tool_parsers(TOOL_PARSERS)
jackfield_reasoning_parsers(REASONING_PARSERS)
QUESTION = {"role": "user", "content": "One?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """Single bytes as tokens, and a special one."""
    folder = tmp_path_factory.mktemp("templates")
    shutil.copytree(tiny_model("bert"), folder, dirs_exist_ok=True)
    base = Tokenizer.from_file(str(folder / "tokenizer.json"))
    base.add_special_tokens([AddedToken("<|end|>", special=True)])
    base.save(str(folder / "tokenizer.json"))
    return make_tokenizer(folder)


def make_tokenizer(folder: Path) -> ModelTokenizer:
    card = ModelCard(id="m", path=str(folder), architecture="Model", operations=("generate",), max_length=100_000, vocab_size=400)
    return ModelTokenizer(card)


def render(tokenizer: ModelTokenizer, template: str, *messages: dict[str, Any], tools: bool = True, **options: Any) -> str:
    """What the model would see."""
    prompt = ChatPrompt(
        messages=list(messages), tools=TOOLS if tools else None, chat_template=template, param="messages", with_text=True, **options
    )
    [tokenized] = tokenizer([prompt])
    assert tokenized.text is not None
    return tokenized.text


def calls(*given: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(given), **fields}


def result(known: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": known, "content": content}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_with_calls(tokenizer: ModelTokenizer, name: str) -> None:
    given = json.dumps(CONVERSATION)
    assert render(tokenizer, FAMILIES[name].template, *CONVERSATION) == FAMILIES[name].text
    assert json.dumps(CONVERSATION) == given, "what was given stays as it is"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_content_of_a_call_may_be_empty_or_missing(tokenizer: ModelTokenizer, name: str) -> None:
    empty = [{**message, "content": message["content"] or ""} for message in CONVERSATION]
    missing = [{key: value for key, value in message.items() if value is not None} for message in CONVERSATION]
    for messages in (empty, missing):
        assert render(tokenizer, FAMILIES[name].template, *messages) == FAMILIES[name].text


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_may_be_objects(tokenizer: ModelTokenizer, name: str) -> None:
    messages = json.loads(json.dumps(CONVERSATION))
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert render(tokenizer, FAMILIES[name].template, *messages) == FAMILIES[name].text


@pytest.mark.parametrize("name", FAMILIES)
def test_parsers_are_chosen_from_the_template(name: str) -> None:
    dialect = Dialect(template=FAMILIES[name].template)
    assert next((entry.name for entry in TOOL_PARSERS.entries if entry.fits(dialect)), None) == FAMILIES[name].tools
    assert next((entry.name for entry in REASONING_PARSERS.entries if entry.fits(dialect)), None) == FAMILIES[name].reasoning


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].tools])
def test_the_chosen_parser_reads_what_the_template_writes(tokenizer: ModelTokenizer, name: str) -> None:
    template = FAMILIES[name].template
    messages = CONVERSATION[:3]
    before = render(tokenizer, template, *messages[:2], add_generation_prompt=False)
    answer = render(tokenizer, template, *messages, add_generation_prompt=False).removeprefix(before)
    if name == "llama":  # a call is all of its answer, which begins after the header
        answer = answer.partition("<|end_header_id|>")[2]
    entry = next(entry for entry in TOOL_PARSERS.entries if entry.name == FAMILIES[name].tools)
    stream = entry.make(Dialect(template=template)).stream()
    pieces = [*stream.feed(answer), *stream.finish()]
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["weather"]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(arguments) == {"city": "Paris", "days": 21}


@pytest.mark.parametrize(
    "template",
    [
        "{{ '<tool_call>\\n[' }}{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}{{ ']\\n</tool_call>' }}",
        "{{ '<tool_call>' + call.name + '\\n```json\\n' + call.arguments | tojson }}",
        'Calls as a list in <tool_calls>[{"name": NAME, "arguments": OBJECT}]</tool_calls>, not as <tool_call>s',
        "<|start_header_id|>{{ tools | tojson }} with their parameters: <function=NAME>{...}</function>",
        '<|start_header_id|>{"name": "x", "description": "of a tool", "parameters": {}} [{"name": NAME, "arguments": {}}]',
    ],
)
def test_near_relatives_are_of_no_family(template: str) -> None:
    assert not any(entry.fits(Dialect(template=template)) for entry in TOOL_PARSERS.entries)


@pytest.mark.parametrize("template", ["{{ '<think>\\n' }}", "{{ content.split('</think>')[-1] }}"], ids=["begins it", "takes it out"])
def test_one_mark_of_reasoning_is_enough(template: str) -> None:
    assert next(entry.name for entry in REASONING_PARSERS.entries if entry.fits(Dialect(template=template))) == "think"


def test_what_is_said_with_calls_stands_before_them(tokenizer: ModelTokenizer) -> None:
    message = calls(make_call("a", "weather", city="Rome"), content="Let me see.")
    assert render(tokenizer, R1, QUESTION, message) == (
        '<user>One?<bot>Let me see.<call>function<sep>weather {"city": "Rome"}</call><bot><think>'
    )
    assert "Let me see." in render(tokenizer, HERMES, QUESTION, message)


def test_calls_one_by_one_keep_their_results(tokenizer: ModelTokenizer) -> None:
    """Also where results come in another order, are missing, or answer no call."""
    message = calls(make_call("a", "weather", city="Rome"), make_call("b", "time", zone="UTC"), make_call("c", "time", zone="CET"))
    text = render(tokenizer, LLAMA, QUESTION, message, result("c", "third"), result("a", "first"), result("x", "stray"), QUESTION)
    order = ["One?", "Rome", "first", "UTC", "CET", "third", "stray", "One?"]
    places = [text.find(word) for word in order[:-1]] + [text.rfind("One?")]
    assert places == sorted(places) and -1 not in places  # noqa: PT018
    assert text.count("assistant<|end_header_id|>") == 3


def test_results_of_calls_without_number(tokenizer: ModelTokenizer) -> None:
    """Each call is followed by all of its results; those of no call stay in their order, at the end."""
    message = calls(*(make_call(str(n), "time", zone=f"Z{n};") for n in range(3)))
    results = [result(known, f"R{n};") for n, known in enumerate(["1", "x", "0", "y", "1", "x"])]
    text = render(tokenizer, LLAMA, QUESTION, message, *results, QUESTION)
    assert re.findall(r"[RZ]\d", text) == ["Z0", "R2", "Z1", "R0", "R4", "Z2", "R1", "R3", "R5"]


def test_many_calls_without_a_result() -> None:
    message = calls(*(make_call(str(n), "time") for n in range(4000)))
    given = [QUESTION, message, *(result(f"x{n}", "") for n in range(4000))]
    assert len(in_form(given, CallForm(single=True))) == 2 * 4000 + 1


def test_an_id_may_come_again(tokenizer: ModelTokenizer) -> None:
    messages = [
        *(
            QUESTION,
            calls(make_call("call_0", "weather", city="Rome")),
            result("call_0", "sunny"),
            {"role": "assistant", "content": "Sun."},
        ),
        *(QUESTION, calls(make_call("call_0", "time", zone="UTC")), result("call_0", "noon")),
    ]
    numbered, named = (render(tokenizer, template, *messages) for template in (NUMBERED, NAMED))
    assert "sunny of functions.weather:0" in numbered
    assert "noon of functions.time:1" in numbered
    assert "<response:weather>sunny" in named
    assert "<response:time>noon" in named


def test_ids_and_names_of_the_model_stay(tokenizer: ModelTokenizer) -> None:
    messages = [QUESTION, calls(make_call("functions.weather:7", "weather", city="Rome")), result("functions.weather:7", "sunny")]
    assert render(tokenizer, NUMBERED, *messages).count("functions.weather:7") == 2
    assert "<response:own>sunny" in render(tokenizer, NAMED, *messages[:2], {**messages[2], "name": "own"})


@pytest.mark.parametrize("arguments", ["", None], ids=["empty", "null"])
@pytest.mark.parametrize("template", [HERMES, R1], ids=["object", "text"])
def test_no_arguments_are_an_empty_object(tokenizer: ModelTokenizer, template: str, arguments: str | None) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}
    missing = {"id": "a", "type": "function", "function": {"name": "time"}}
    expected = render(tokenizer, template, QUESTION, calls(make_call("a", "time")))
    assert "{}" in expected
    assert render(tokenizer, template, QUESTION, calls(call)) == render(tokenizer, template, QUESTION, calls(missing)) == expected


@pytest.mark.parametrize("arguments", ["no JSON", "[1]", '{"a":' * 5000 + "1" + "}" * 5000], ids=["none", "list", "deep"])
@pytest.mark.parametrize("template", [HERMES, R1], ids=["object", "text"])
def test_arguments_that_are_no_object_stay_text(tokenizer: ModelTokenizer, template: str, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}
    expected = arguments if template == R1 else json.dumps(arguments)
    assert expected in render(tokenizer, template, QUESTION, calls(call))


def test_names_of_special_tokens_in_arguments_stay_text(tokenizer: ModelTokenizer) -> None:
    """In their names too, which a client writes as it does their values."""
    call = make_call("a", "weather", **{"<|end|>": "<|end|>"})
    for template in (HERMES, R1):
        prompt = ChatPrompt(messages=[QUESTION, calls(call)], tools=TOOLS, chat_template=template, with_text=True)
        [tokenized] = tokenizer([prompt])
        assert tokenized.text is not None
        assert '{"<|end|>": "<|end|>"}' in tokenized.text
        assert "<|end|>" not in [tokenizer.token(token_id)[0] for token_id in tokenized.token_ids]


def test_what_a_template_cannot_take_is_refused(tokenizer: ModelTokenizer) -> None:
    for message, template in ((calls(make_call("short", "time")), MISTRAL), (QUESTION, MISTRAL)):
        with pytest.raises(BadRequest, match="refused the messages"):
            render(tokenizer, template, CONVERSATION[0], QUESTION, message, QUESTION)


def test_a_last_message_with_calls_can_be_continued(tokenizer: ModelTokenizer) -> None:
    message = calls(make_call("a", "weather", city="Rome"), content="Let me see")
    text = render(tokenizer, HERMES, QUESTION, message, tools=False, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nLet me see")


def test_tools_are_given_as_the_template_takes_them(tokenizer: ModelTokenizer) -> None:
    """In the first turn as well."""
    assert render(tokenizer, FAMILIES["bare"].template, QUESTION) == "// Of weather.weather;// Of time.time;<user>One?"
    assert "weather time" in render(tokenizer, HERMES, {"role": "system", "content": "Be kind."}, QUESTION)


@pytest.mark.parametrize("function", [{"name": "ping"}, {"name": "ping", "description": None, "parameters": None}], ids=["missing", "null"])
def test_a_tool_may_have_a_name_alone(tokenizer: ModelTokenizer, function: dict[str, Any]) -> None:
    """What is missing or null is written by no template, and is empty where a template fails without."""
    tool = {"type": "function", "function": function}

    def shown(template: str) -> str:
        prompt = ChatPrompt(messages=[QUESTION], tools=[tool], chat_template=template, param="messages", with_text=True)
        [tokenized] = tokenizer([prompt])
        assert tokenized.text is not None
        return tokenized.text

    assert shown("{{ tools | tojson }}") == '[{"type": "function", "function": {"name": "ping"}}]'
    assert shown("{{ 'Of ' + tools[0].function.description }}") == "Of "
    assert shown(FAMILIES["bare"].template) == "// ping;<user>One?"
    assert shown("{{ tools[0].function.parameters.properties | tojson }}") == "{}"
    assert tool == {"type": "function", "function": function}, "what was given stays as it is"
    with pytest.raises(BadRequest, match="no such thing"):
        shown("{{ raise_exception('no such thing') }}")
