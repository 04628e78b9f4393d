"""Around endpoints that know nothing of it, over a real socket."""

from __future__ import annotations

import re

import httpx
import pytest

from jackfield import Context, Endpoint, Request, Route
from jackfield.testing import FakeEngine, make_client, tiny_model
from jackfield_embed import EmbedEndpoint
from jackfield_timing import TimingPlugin, TimingSettings
from jackfield_tokenize import TokenizeEndpoint


def entries(answer: httpx.Response, header: str = "server-timing") -> dict[str, float]:
    """The header's entries, in its order."""
    assert answer.status_code == 200, answer.text
    found = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers[header]))
    return {name: float(milliseconds) for name, milliseconds in found.items()}


def test_where_the_time_went() -> None:
    with make_client(EmbedEndpoint(), TimingPlugin(TimingSettings()), engine=FakeEngine(latency_s=0.05)) as client:
        told = entries(client.post("/v1/embeddings", json={"input": "hello"}))
    assert list(told) == ["preprocess", "tokenize", "engine", "build_response", "total"]
    assert 50 <= told["engine"] <= told["total"]
    assert sum(milliseconds for name, milliseconds in told.items() if name != "total") <= told["total"] + 0.1


def test_a_route_without_an_engine() -> None:
    with make_client(TokenizeEndpoint(), TimingPlugin(TimingSettings(header="X-Time"))) as client:
        told = entries(client.post("/tokenize", json={"prompt": "hello"}), "x-time")
    assert "engine" not in told
    assert told["total"] > 0


def test_with_a_real_model() -> None:
    with make_client(EmbedEndpoint(), TimingPlugin(TimingSettings()), models={"m": {"source": tiny_model("bert")}}, real=True) as client:
        assert entries(client.post("/v1/embeddings", json={"input": "hello"}))["engine"] > 0


def test_an_error_has_its_answer() -> None:
    with make_client(EmbedEndpoint(), TimingPlugin(TimingSettings())) as client:
        answer = client.post("/v1/embeddings", json={"input": []})
    assert answer.status_code == 400
    assert "server-timing" not in answer.headers


class Failing(Endpoint[Request, dict[str, int]]):
    """Raises where the plugin waits."""

    name = id_prefix = "failing"
    routes = (Route(method="POST", paths=("/failing",), request=Request, response=dict[str, int]),)

    def build_response(self, ctx: Context[Request]) -> dict[str, int]:
        raise ValueError("a bug")


@pytest.mark.parametrize("with_plugin", [True, False])
def test_what_a_stage_raises_goes_through(with_plugin: bool) -> None:
    plugins = (TimingPlugin(TimingSettings()),) if with_plugin else ()
    with make_client(Failing(), *plugins) as client:
        assert client.post("/failing", json={}).status_code == 500
