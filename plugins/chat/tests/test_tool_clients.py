"""Tools by clients as people have them, unmodified, of models of random weights that a grammar holds to valid calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from jsonschema_rs import validator_for
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

import jackfield_chat
from jackfield.testing import RunningServer, make_server
from tests.chat_families import TEMPLATES, write_real

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
# Of the tiny model: three special tokens, the bytes, and these.
VOCABULARY = [*("<s>", "</s>", "<pad>"), *map(str, range(256)), *MARKS]
# With the marks as tokens, and as text.
SERVED = {"plain": (), "hermes": (), "hermes tokens": MARKS, "llama3_json tokens": MARKS, "mistral tokens": MARKS, "thinking tokens": MARKS}
# So that weights that mean nothing come to the end of their reasoning; elsewhere the grammar bars that token.
BIAS: dict[str, int] = {str(VOCABULARY.index("</think>")): 6}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=14)


class Add(BaseModel):
    """Adds."""

    a: int = Field(ge=-99, le=99)
    b: int = Field(ge=-99, le=99)


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Add)]
VALIDATORS = {entry["function"]["name"]: validator_for(entry["function"]["parameters"]) for entry in TOOLS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    models = {name: {"source": write_real(root / name, TEMPLATES[name.split()[0]], special=special)} for name, special in SERVED.items()}
    with make_server(jackfield_chat, models=models, real=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def check(calls: list[Any] | None, *, least: int = 1) -> None:
    """That all of a message's calls are valid."""
    assert calls is not None
    assert len(calls) >= least
    for call in calls:
        assert VALIDATORS[call.function.name].is_valid(json.loads(call.function.arguments)), call


@pytest.mark.parametrize("model", SERVED)
def test_calls_are_valid(client: openai.OpenAI, model: str) -> None:
    """At temperature 1, whatever the weights."""
    for seed in range(4):
        answer = client.chat.completions.create(
            model=model,
            messages=ASKED,
            tools=TOOLS,
            tool_choice="required",
            temperature=1,
            seed=seed,
            parallel_tool_calls=bool(seed % 2),
            logit_bias=BIAS,
        )
        [choice] = answer.choices
        if choice.finish_reason == "length":
            assert seed % 2, "one call ends in far fewer tokens"
            continue
        assert choice.finish_reason == "tool_calls"
        check(choice.message.tool_calls)
        if not seed % 2:
            assert len(choice.message.tool_calls or ()) == 1
    named: Any = {"type": "function", "function": {"name": "Add"}}
    [choice] = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, tool_choice=named, seed=1, logit_bias=BIAS).choices
    assert [call.function.name for call in choice.message.tool_calls or () if call.type == "function"] == ["Add"]
    check(choice.message.tool_calls)


def test_the_loop(client: openai.OpenAI) -> None:
    """Call, result, and the conversation goes on."""
    messages: list[Any] = [*ASKED]
    for turn in range(3):
        answer = client.chat.completions.create(
            model="hermes", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=turn
        )
        message = answer.choices[0].message
        check(message.tool_calls)
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in message.tool_calls or ()]
    last = client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5)
    assert (last.choices[0].finish_reason, last.choices[0].message.tool_calls) == ("length", None)
    assert last.usage is not None
    assert last.usage.prompt_tokens > 3 * len("21 degrees")


def test_parse(client: openai.OpenAI) -> None:
    """openai's own reading of arguments, into pydantic's objects."""
    answer = client.chat.completions.parse(
        model="hermes", messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=5
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather | Add)


@pytest.mark.parametrize("model", SERVED)
def test_streamed(client: openai.OpenAI, model: str) -> None:
    """The helper that puts deltas together, and the same call that is given whole."""
    body: dict[str, Any] = {"model": model, "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 7}
    body |= {"parallel_tool_calls": False, "logit_bias": BIAS}
    with client.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1
    [streamed] = final.choices[0].message.tool_calls or []
    [whole] = client.chat.completions.parse(**body).choices[0].message.tool_calls or []
    assert streamed.function.arguments == whole.function.arguments
    assert streamed.function.name == whole.function.name
    assert isinstance(streamed.function.parsed_arguments, Weather | Add)


def test_content_of_a_form_or_calls(client: openai.OpenAI) -> None:
    """With both, an answer is one of them."""
    seen = set()
    for seed in range(12):
        [choice] = client.chat.completions.parse(
            model="thinking tokens",
            messages=ASKED,
            tools=[openai.pydantic_function_tool(Add)],
            response_format=Weather,
            parallel_tool_calls=False,
            temperature=1,
            seed=seed,
            logit_bias=BIAS,
        ).choices
        assert choice.finish_reason in ("stop", "tool_calls")
        if choice.message.tool_calls:
            check(choice.message.tool_calls)
            assert choice.message.content is None
        else:
            assert isinstance(choice.message.parsed, Weather)
        seen.add(choice.finish_reason)
    assert seen == {"stop", "tool_calls"}


def chat(server: RunningServer, model: str = "hermes", **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key="unused", temperature=1, seed=3, **more)  # type: ignore[arg-type]


@tool
def weather(city: Literal["Paris", "Rome"], days: int) -> str:
    """The weather of a city for some days."""
    return f"{city}: sun for {days} days"


def test_langchain_binds_tools(server: RunningServer) -> None:
    model = chat(server).bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    asked = HumanMessage("What is the weather?")
    answer = model.invoke([asked])
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    assert (call["name"], answer.invalid_tool_calls) == ("weather", [])
    assert call["args"]["city"] in ("Paris", "Rome")
    assert isinstance(call["args"]["days"], int)
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    again = model.invoke([asked, answer, result])
    assert isinstance(again, AIMessage)
    assert len(again.tool_calls) == 1
    whole: AIMessageChunk | None = None
    for chunk in model.stream([asked]):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structured_output(server: RunningServer, method: Any) -> None:
    for include_raw in (False, True):
        made = chat(server).with_structured_output(Weather, method=method, include_raw=include_raw, strict=True).invoke("Paris?")
        assert isinstance(made["parsed"] if isinstance(made, dict) else made, Weather)


def test_langchain_shows_reasoning(server: RunningServer) -> None:
    """What it has no field for stays out of the content."""
    answer = chat(server, "thinking tokens", max_tokens=20).invoke("Hi")
    assert answer.content == ""
    assert answer.response_metadata["finish_reason"] == "length"
