"""Chat on a real server with a real model, by the clients that people have; and what happens to it when things go wrong."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from langchain_openai import ChatOpenAI

from tests.servers import Served, served

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
RIGHT = "The capital of France is Paris."
LONG = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, smollm2: Path, minilm: str) -> str:
    path = tmp_path_factory.mktemp("chat") / "server.toml"
    path.write_text(
        f'[models.smollm2]\nsource = "{smollm2}"\naliases = ["gpt-4o-mini"]\n[models.minilm]\nsource = "{minilm}"\n'
        '[endpoints.chat]\nmodels = ["smollm2"]\n[endpoints.completions]\nmodels = ["smollm2"]\n'
        '[endpoints.embed]\nmodels = ["minilm", "smollm2"]\n[endpoints.rerank]\nmodels = ["minilm"]\n[engine]\nheartbeat_s = 0.2\n'
    )
    return str(path)


@pytest.fixture(scope="module")
def server(config: str) -> Iterator[Served]:
    with served(config) as running:
        yield running


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def metric(client: httpx.Client, name: str) -> float:
    return float(client.get("/metrics").text.partition(f"\n{name} ")[2].split()[0])


def idle(client: httpx.Client) -> bool:
    names = ('jackfield_generation_running{engine="torch"}', 'jackfield_cache_blocks{engine="torch",state="used"}')
    return all(metric(client, name) == 0 for name in names)


def test_openai(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=FRANCE, temperature=0)
    assert answer.choices[0].message.content == RIGHT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)
    chunks = list(
        client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == RIGHT
    assert chunks[-1].usage == answer.usage or chunks[-1].usage is not None
    text = client.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=2, temperature=0)
    assert text.choices[0].text == " Paris."
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=3)
    assert error.value.param == "temperature"


async def test_openai_async(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        answer = await client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0)
        stream = await client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert answer.choices[0].message.content == text == RIGHT


def test_langchain(server: Served) -> None:
    model = ChatOpenAI(model="smollm2", base_url=f"{server.url}/v1", api_key="unused", temperature=0)  # type: ignore[arg-type]
    assert model.invoke("What is the capital of France?").content == RIGHT
    assert "".join(str(chunk.content) for chunk in model.stream("What is the capital of France?")) == RIGHT


def test_one_server_embeds_ranks_and_chats_at_once(server: Served) -> None:
    """Each answer is what it is alone."""
    documents = ["Cats sleep in the sun.", "Bread is made of flour."]
    work: list[tuple[str, dict[str, Any]]] = [
        (PATH, {"model": "smollm2", "messages": FRANCE, "temperature": 0}),
        ("/v1/embeddings", {"model": "minilm", "input": documents}),
        ("/v1/embeddings", {"model": "smollm2", "input": documents}),
        ("/v1/rerank", {"model": "minilm", "query": "Where do cats sleep?", "documents": documents}),
        ("/v1/completions", {"model": "smollm2", "prompt": "1, 2, 3, 4,", "max_tokens": 12, "temperature": 0}),
    ]

    def ask(client: httpx.Client, number: int) -> list[float] | str:
        path, body = work[number % len(work)]
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if "choices" in found:
            choice = found["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        return [value for entry in found.get("data", ()) for value in entry["embedding"]] or [
            entry["relevance_score"] for entry in found["results"]
        ]

    with server.client() as client, ThreadPoolExecutor(10) as pool:
        alone = [ask(client, number) for number in range(len(work))]
        together = list(pool.map(lambda number: ask(client, number), range(30)))
    assert alone[0] == RIGHT
    for number, got in enumerate(together):
        right = alone[number % len(work)]
        assert got == right if isinstance(right, str) else got == pytest.approx(right, abs=1e-5)


def test_a_prompt_that_is_known(server: Served) -> None:
    body = {"model": "smollm2", "prompt": " ".join(map(str, range(300))), "max_tokens": 1, "temperature": 0}
    with server.client() as client:
        first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 16
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_overload_is_told_before_anything_runs(config: str) -> None:
    with served(config, "--set", "server.max_queue_requests=2") as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.post, PATH, json={**LONG, "max_tokens": 80}) for _ in range(2)]
        until(lambda: metric(client, 'jackfield_queue{unit="requests"}') == 2)
        refused = client.post(PATH, json=LONG)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in waiting] == [200, 200]


def test_an_engine_that_dies_ends_streams_with_an_error(config: str) -> None:
    with served(config) as server, server.client() as client:
        engine = next(child for child in psutil.Process(server.process.pid).children() if "jackfield.worker" in child.cmdline())
        lines: list[str] = []

        def read() -> None:
            with client.stream("POST", PATH, json={**LONG, "stream": True}) as answer:
                lines.extend(answer.iter_lines())  # one by one, as they come

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: len(lines) > 6)
        engine.send_signal(signal.SIGKILL)
        reader.join(30)
        *_, failed, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(failed.removeprefix("data: "))["error"]["code"] == 503
        until(lambda: client.get("/ready").status_code == 200)
        assert client.post(PATH, json={"messages": FRANCE, "temperature": 0}).json()["choices"][0]["message"]["content"] == RIGHT


def test_a_deadline_ends_what_is_generated(server: Served) -> None:
    with server.client() as client:
        late = client.post(PATH, json=LONG, headers={"x-request-timeout": "0.5"})
        assert late.status_code == 504
        until(lambda: idle(client))
