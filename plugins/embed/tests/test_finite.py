"""A vector with a number that is none is refused in every form: integers and bits would hide it, null and text would pass it on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jackfield import Context, EngineRequest, PoolingOutputs, Submit, hookimpl
from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_embed import EmbedEndpoint

COHERE_TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
# Name of the form -> path and body of a request for it.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/embeddings", {"input": ["a", "b"]}),
    "openai-float": ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
    "openai-base64": ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    "openai-raw": ("/v1/embeddings", {"input": ["a", "b"], "normalize": False}),
    "cohere": ("/v2/embed", {"texts": ["a", "b"]}),
    **{f"cohere-{kind}": ("/v2/embed", {"texts": ["a", "b"], "embedding_types": [kind]}) for kind in COHERE_TYPES},
    "cohere-all": ("/v2/embed", {"texts": ["a", "b"], "embedding_types": COHERE_TYPES}),
}


class Spoil:
    """Puts a number that is none into the last place of a request's last vector, as a broken model would: `user` says which, if any."""

    @hookimpl
    def jackfield_wrap_submit(self, submit: Submit) -> Submit:
        async def spoiling(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            outputs = await submit(ctx, request)
            if ctx.request.user is not None:
                outputs.values["embed"][-1][-1] = float(ctx.request.user)
            return outputs

        return spoiling


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(EmbedEndpoint(), Spoil()) as running:
        yield running


def check_refusal(answer: httpx.Response) -> None:
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert "non-finite" in error.pop("message")
    assert error == {"type": "InternalServerError", "param": None, "code": 500}


def numbers(answer: httpx.Response) -> Any:
    """What must not depend on anything but the texts."""
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return content["data"] if "data" in content else content["embeddings"]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_is_none_is_refused_and_its_neighbours_are_served(server: RunningServer, form: str, number: str) -> None:
    """All of them are in the engine at once."""
    path, body = FORMS[form]
    engine = server.engine
    assert engine is not None
    with server.client() as client, ThreadPoolExecutor(6) as pool:
        expected = numbers(client.post(path, json=body))
        before = len(engine.requests)
        engine.hold()
        users = [None, number, None, number, None, None]
        waiting = [pool.submit(client.post, path, json={**body, "user": user}) for user in users]
        until_in(engine, before + len(users))
        engine.go()
        for user, future in zip(users, waiting, strict=True):
            if user is None:
                assert numbers(future.result(10)) == expected
            else:
                check_refusal(future.result(10))


def test_it_is_counted_by_its_name() -> None:
    with make_server(EmbedEndpoint(), engine=FakeEngine(nan=True)) as server, server.client() as client:
        for path, body in FORMS.values():
            check_refusal(client.post(path, json=body))
        text = client.get("/metrics").text
        assert f'jackfield_endpoint_requests_total{{endpoint="embed",model="fake",outcome="NonFiniteOutput"}} {len(FORMS)}.0' in text
        assert 'outcome="ok"' not in text
        assert f'path="/v2/embed",status="500"}} {len(COHERE_TYPES) + 2}.0' in text


def until_in(engine: FakeEngine, count: int) -> None:
    """Wait until so many requests have met the engine, 10 s at most."""
    pause = threading.Event()
    for _ in range(1000):
        if len(engine.requests) == count:
            return
        pause.wait(0.01)
    pytest.fail(f"{len(engine.requests)} of {count} requests in the engine after 10 s")
