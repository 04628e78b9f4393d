"""Clients as people have them, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI

from jackfield import InternalError
from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_chat import ChatEndpoint

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SAID = "[user]Hi[assistant]"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(ChatEndpoint()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_openai(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, temperature=0, logprobs=True, top_logprobs=1)
    [choice] = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (SAID, "assistant", "stop")
    assert not choice.message.tool_calls
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content[:3]] == ["[", "u", "s"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (39, 0)
    raw = client.chat.completions.with_raw_response.create(model="fake", messages=HI, temperature=0)
    assert raw.headers["x-request-id"] in raw.parse().id
    extra = client.chat.completions.create(model="fake", messages=HI, temperature=0, extra_body={"top_k": 1, "stop_token_ids": [5]})
    assert extra.choices[0].message.content == SAID


def test_openai_streams(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model="fake", messages=HI, temperature=0, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 20)
    with client.chat.completions.stream(model="fake", messages=HI, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == SAID


async def test_openai_async(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        answer = await client.chat.completions.create(model="fake", messages=HI, temperature=0)
        assert answer.choices[0].message.content == SAID
        stream = await client.chat.completions.create(model="fake", messages=HI, temperature=0, n=2, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [SAID, SAID]


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="Two tools"):
        client.chat.completions.create(model="fake", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}] * 2)
    engine = FakeEngine(fault=lambda request: InternalError("a fault on demand"), fault_after=2)
    with make_server(ChatEndpoint(), engine=engine) as faulty:
        other = openai.OpenAI(base_url=f"{faulty.url}/v1", api_key="unused", max_retries=0)
        with pytest.raises(openai.APIError, match="a fault on demand"):
            list(other.chat.completions.create(model="fake", messages=HI, stream=True))


def test_langchain(server: RunningServer) -> None:
    model = ChatOpenAI(model="fake", base_url=f"{server.url}/v1", api_key="unused", temperature=0)  # type: ignore[arg-type]
    answer = model.invoke("Hi")
    assert answer.content == SAID
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == 39
    assert answer.response_metadata["finish_reason"] == "stop"
    streaming = ChatOpenAI(model="fake", base_url=f"{server.url}/v1", api_key="unused", temperature=0, stream_usage=True)  # type: ignore[arg-type]
    whole: AIMessageChunk | None = None
    for chunk in streaming.stream("Hi"):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == SAID
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 20
    assert whole.response_metadata["model_name"] == "fake"
