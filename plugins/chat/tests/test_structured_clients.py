"""Structured output by clients as people have them, unmodified, of a model of random weights: what it says is theirs to parse.

Texts and lists have bounds, since such a model may go on with one for as long as it is let.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from jackfield.testing import RunningServer, make_server, tiny_model
from jackfield_chat import ChatEndpoint

HI: list[Any] = [{"role": "user", "content": "Hi"}]


class Colour(Enum):
    RED = "red"
    GREEN = "grün"


class Stop(BaseModel):
    """Nested, and so a reference."""

    place: str = Field(description="Where it is.", max_length=8)
    minutes: int = Field(ge=0, le=59)


class Line(BaseModel):
    """A line of trams."""

    number: int = Field(ge=1, le=99)
    colour: Colour
    kind: Literal["tram", "bus"]
    stops: list[Stop] = Field(min_length=1, max_length=2)
    since: datetime.date
    note: str | None = Field(max_length=5)
    night: bool


class Small(BaseModel):
    """With a default, which a strict schema asks for all the same."""

    size: Literal["s", "m", "l"] = "m"
    rating: float = Field(default=1.0, ge=0, le=5)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(ChatEndpoint(), models={"tiny": {"source": "tiny:llama"}}, real=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def langchain(server: RunningServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="unused", temperature=1, max_retries=0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Line, Small])
def test_openai_parses(client: openai.OpenAI, kind: type[BaseModel]) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=kind, temperature=1, n=4, max_tokens=480)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, kind)
        assert set(json.loads(choice.message.content or "")) == set(kind.model_fields), "a strict schema requires all of them"


def test_openai_streams(client: openai.OpenAI) -> None:
    """The helper tells the text as it comes, and what it is when it has."""
    kinds: set[str] = set()
    text = ""
    with client.chat.completions.stream(model="tiny", messages=HI, response_format=Line, temperature=1, max_tokens=480) as stream:
        for event in stream:
            kinds.add(event.type)
            if event.type == "content.delta":
                text += event.delta
            if event.type == "content.done":
                assert isinstance(event.parsed, Line)
        final: ParsedChatCompletion[Line] = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Line)
    assert Line.model_validate_json(text) == final.choices[0].message.parsed


def test_openai_is_told_of_what_is_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HI, response_format=Line, max_tokens=20)


def test_openai_is_told_what_is_refused(client: openai.OpenAI) -> None:
    schema = {"name": "a", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(model="tiny", messages=HI, response_format={"type": "json_schema", "json_schema": schema})  # type: ignore[call-overload]
    assert refused.value.param == "response_format.json_schema.schema"


def test_openai_asks_as_vllm_does(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["positive", "negative"]}}
    answer = client.chat.completions.create(model="tiny", messages=HI, extra_body=body)
    assert answer.choices[0].message.content in ("positive", "negative")
    completion = client.chat.completions.create(model="tiny", messages=HI, response_format={"type": "json_object"}, max_tokens=300, seed=1)
    assert (completion.choices[0].message.content or "").startswith("{")


async def test_openai_async(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        answer = await client.chat.completions.parse(model="tiny", messages=HI, response_format=Line, max_tokens=480)
        assert isinstance(answer.choices[0].message.parsed, Line)


@pytest.mark.parametrize("strict", [None, True, False])
def test_langchain_by_schema(server: RunningServer, strict: bool | None) -> None:
    model = langchain(server, max_tokens=480).with_structured_output(Line, method="json_schema", strict=strict)
    assert isinstance(model.invoke("Hi"), Line)


def test_langchain_gives_the_message_too(server: RunningServer) -> None:
    model = langchain(server, max_tokens=480).with_structured_output(Line, method="json_schema", include_raw=True)
    told = model.invoke("Hi")
    assert isinstance(told, dict)
    assert told["parsing_error"] is None
    assert isinstance(told["raw"], AIMessage)
    assert Line.model_validate_json(str(told["raw"].content)) == told["parsed"]


def test_langchain_streams(server: RunningServer) -> None:
    model = langchain(server, max_tokens=480).with_structured_output(Line, method="json_schema")
    assert isinstance(list(model.stream("Hi"))[-1], Line)


def test_langchain_by_a_schema_of_json(server: RunningServer) -> None:
    schema = {
        "title": "size",
        "description": "A size.",
        "type": "object",
        "properties": {"size": {"enum": ["s", "m"]}},
        "required": ["size"],
    }
    model = langchain(server, max_tokens=300, seed=1).with_structured_output(
        {**schema, "additionalProperties": False}, method="json_schema"
    )
    told = model.invoke("Hi")
    assert isinstance(told, dict)
    assert told["size"] in ("s", "m")


def test_langchain_by_json_alone(server: RunningServer) -> None:
    """Any object: its fields are for the prompt to ask for, which a model of random weights does not heed. It is talked into an end."""
    tokenizer = Tokenizer.from_file(f"{tiny_model('llama')}/tokenizer.json")
    ends = {tokenizer.token_to_id(letter): 10 for letter in ('"', "}")}
    model = langchain(server, max_tokens=400, seed=1, logit_bias=ends).with_structured_output(None, method="json_mode", include_raw=True)
    told = model.invoke("Hi, as JSON")
    assert isinstance(told, dict)
    assert told["parsing_error"] is None
    assert isinstance(told["parsed"], dict)
    assert told["parsed"] == json.loads(told["raw"].content)
