"""Behind a proxy, and before browsers and caches: the prefix, the origin, the content type of every kind of answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jackfield.testing import make_client
from jackfield.testing.server import write_model
from jackfield_embed import EmbedEndpoint
from tests.http.raw import BODY, check_error, sample
from tests.plugins.test_stages import Talk

PAGE = "https://page.example"
SYSTEM = ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/fake", "/openapi.json", "/docs"]


# The prefix


@pytest.mark.parametrize("given", ["/api", "/api/"])
def test_the_prefix_is_stripped_once(given: str) -> None:
    with make_client(EmbedEndpoint(), server={"root_path": given}) as client:
        assert client.get("/api/v1/models").json()["data"][0]["id"] == "fake"
        assert client.post("/api/v1/embeddings", json=BODY).status_code == 200
        for path in ("/api/api/v1/models", "/api/api/api/v1/models", "/api", "/api/", "/apis/v1/models", "/apiv1/models", "/v1/api/models"):
            check_error(client.get(path), 404)
        check_error(client.post("/api/api/v1/embeddings", json=BODY), 404)


def test_without_the_prefix_routes_answer_too() -> None:
    """A proxy may cut its prefix off before it passes a request on."""
    with make_client(EmbedEndpoint(), server={"root_path": "/api"}) as client:
        assert client.post("/v1/embeddings", json=BODY).json()["data"] == client.post("/api/v1/embeddings", json=BODY).json()["data"]
        for path in SYSTEM:
            assert client.get(path).status_code == client.get(f"/api{path}").status_code == 200
        assert sample(client, 'jackfield_requests_total{method="POST",path="/v1/embeddings",status="200"}') == 2


def test_a_prefix_that_a_route_begins_with() -> None:
    """`/v1` is the proxy's; what it passes on is `/v1/v1/models`."""
    with make_client(EmbedEndpoint(), server={"root_path": "/v1"}) as client:
        assert client.get("/v1/v1/models").status_code == 200
        assert client.post("/v1/v1/embeddings", json=BODY).status_code == 200
        assert client.get("/v1/health").status_code == 200
        check_error(client.get("/v1/models"), 404)
        check_error(client.get("/v1/v1/v1/models"), 404)


def test_a_prefix_that_stands_elsewhere_in_a_path_stays(tmp_path: Path) -> None:
    """In a model's id, here."""
    models = {"api/fake": {"source": write_model(tmp_path)}}
    with make_client(EmbedEndpoint(), models=models, server={"root_path": "/api"}) as client:
        for path in ("/v1/models/api/fake", "/api/v1/models/api/fake", "/api/v1/models/api%2Ffake"):
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert answer.json()["id"] == "api/fake"
        check_error(client.get("/api/v1/models/fake"), 404)


def test_a_prefix_in_other_letters() -> None:
    """Not ASCII, and escaped on the wire."""
    with make_client(EmbedEndpoint(), server={"root_path": "/né e"}) as client:
        assert client.get("/né e/v1/models").status_code == 200
        assert client.get("/n%C3%A9%20e/v1/models/fake").json()["id"] == "fake"
        assert client.post("/n%C3%A9%20e/v1/embeddings", json=BODY).status_code == 200
        check_error(client.get("/né e/né e/v1/models"), 404)


# The origin


def answers(client: httpx.Client, origin: dict[str, str]) -> list[tuple[int, httpx.Response]]:
    """One of every kind, with the status that is due."""
    key = {"authorization": "Bearer secret", **origin}
    preflight = {**origin, "access-control-request-method": "POST"}
    answers = [
        (200, client.get("/health", headers=origin)),
        (401, client.get("/v1/models", headers=origin)),
        (200, client.get("/metrics", headers=key)),
        (404, client.get("/nope", headers=key)),
        (405, client.get("/v1/embeddings", headers=key)),
        (400, client.post("/v1/embeddings", json={}, headers=key)),
        (200, client.post("/v1/embeddings", json=BODY, headers=key)),
        (200, client.post("/talk", json={"text": "a", "stream": True}, headers=key)),
    ]
    if origin:
        answers.append((204, client.options("/v1/embeddings", headers=preflight)))
    return answers


@pytest.fixture(scope="module")
def restricted() -> Iterator[httpx.Client]:
    """Two pages may read its answers."""
    options = {"api_keys": ["secret"], "cors": {"allow_origins": [PAGE, "https://b.example"]}}
    with make_client(EmbedEndpoint(), Talk(), server=options) as client:
        yield client


@pytest.mark.parametrize(
    ("origin", "allowed"), [(PAGE, True), ("https://b.example", True), ("https://evil.example", False), ("null", False), (None, False)]
)
def test_caches_are_told_that_answers_differ_by_origin(restricted: httpx.Client, origin: str | None, allowed: bool) -> None:
    """Of every answer, also one without permission or to no page at all: else a cache hands it to the page that has one."""
    for status, answer in answers(restricted, {"origin": origin} if origin else {}):
        assert answer.status_code == status
        assert [name.strip().lower() for name in answer.headers["vary"].split(",")] == ["origin"]
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


@pytest.mark.parametrize("cors", [{}, {"allow_origins": ["*"]}], ids=["no origin", "any origin"])
def test_answers_that_do_not_differ_may_be_shared(cors: dict[str, list[str]]) -> None:
    with make_client(EmbedEndpoint(), Talk(), server={"api_keys": ["secret"], "cors": cors}) as client:
        for origin in ({}, {"origin": PAGE}):
            kinds = [answer for status, answer in answers(client, origin) if cors or status != 204]
            assert len(kinds) >= 8
            assert not any("vary" in answer.headers for answer in kinds)
            assert {answer.headers.get("access-control-allow-origin") for answer in kinds} == {"*" if cors and origin else None}


# The content type


def test_every_content_type_is_said_once() -> None:
    """JSON has no charset; text has one; no answer has two."""
    with make_client(EmbedEndpoint(), Talk()) as client:
        links = re.findall(r'(?:src|href)="([^"]+)"', client.get("/docs").text)
        assert len(links) >= 3
        found = {path: client.get(path) for path in [*SYSTEM, *links, "/nope", "/v1/embeddings"]}
        found["embeddings"] = client.post("/v1/embeddings", json=BODY)
        found["stream"] = client.post("/talk", json={"text": "a", "stream": True})
        found["refused"] = client.post("/v1/embeddings", json={})
    kinds: dict[str, str] = {}
    for name, answer in found.items():
        assert len(answer.headers.get_list("content-type")) == 1, name
        kind, *parameters = [part.strip() for part in answer.headers["content-type"].lower().split(";")]
        names = [parameter.partition("=")[0] for parameter in parameters]
        assert len(set(names)) == len(names), f"{name}: {answer.headers['content-type']}"
        assert ("charset=utf-8" in parameters) is kind.startswith("text/"), f"{name}: {answer.headers['content-type']}"
        kinds[name] = kind
    texts = {name: kind for name, kind in kinds.items() if kind.startswith("text/")}
    assert set(texts.values()) == {"text/plain", "text/html", "text/css", "text/javascript", "text/event-stream"}
    assert {kinds[name] for name in ("/health", "/openapi.json", "/nope", "embeddings", "refused")} == {"application/json"}
    assert "version=0.0.4" in found["/metrics"].headers["content-type"]
