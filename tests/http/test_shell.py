"""What holds for every request, whatever answers it: ids, errors, cross-origin headers, metrics, the documents, deadlines."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jackfield.client import EngineRequest
from jackfield.errors import ServingError
from jackfield.testing import FakeEngine, RunningServer, make_client, make_server
from jackfield_embed import EmbedEndpoint
from tests.http.raw import BODY, JSON, RIGHT, Raw, check_error, sample

OPEN = ["/health", "/ready"]
SYSTEM = ["/version", "/metrics", "/v1/models", "/v1/models/fake", "/openapi.json", "/docs", "/docs/swagger-ui.css"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(EmbedEndpoint()) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


# Request ids


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-1.2_3:4", "abc-1.2_3:4"),
        (b"a b\tc", "abc"),
        ("né-1".encode(), "n-1"),
        ("né-1".encode("latin-1"), "n-1"),
        (b'<a href="x">', "ahrefx"),
        (b"x" * 128, "x" * 128),
        (b"x" * 129, "x" * 128),
        (b"x" * 3000, "x" * 128),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_request_id_is_cleaned_and_echoed(server: RunningServer, given: bytes, kept: str) -> None:
    answer = Raw(server.url, "POST", "/v1/embeddings", JSON, b"X-Request-Id: " + given, body=RIGHT)
    assert answer.status == 200
    assert answer.headers["x-request-id"] == kept
    assert json.loads(answer.body)["id"] == f"embd-{kept}"
    assert Raw(server.url, "GET", "/nope", b"X-Request-Id: " + given).headers["x-request-id"] == kept


@pytest.mark.parametrize("given", [b"", "é".encode(), b"!?"])
def test_without_a_usable_id_there_is_a_new_one_each_time(server: RunningServer, given: bytes) -> None:
    ids = {Raw(server.url, "GET", "/version", b"X-Request-Id: " + given).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(re.fullmatch(r"[0-9a-f]{16}", name) for name in ids)


async def test_no_line_break_of_an_id_reaches_the_answer(server: RunningServer) -> None:
    """Straight into the application: an HTTP parser in front of it would refuse such a header."""
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
    scope |= {"path": "/nope", "raw_path": b"/nope", "query_string": b"", "root_path": "", "client": None, "server": ("127.0.0.1", 80)}
    scope["headers"] = [(b"host", b"test"), (b"x-request-id", b"a\r\nSet-Cookie: b\n\rc")]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(server.app.asgi(scope, receive, send), 10)
    assert sent[0]["status"] == 404
    assert dict(sent[0]["headers"])[b"x-request-id"] == b"aSet-Cookie:bc"


@pytest.mark.parametrize("given", [b"a\rb", b"a\nSet-Cookie: b", b"a\r\n\tb"])
def test_a_broken_header_is_refused(server: RunningServer, given: bytes) -> None:
    answer = Raw(server.url, "GET", "/version", b"X-Request-Id: " + given)
    assert answer.status == 400
    assert "set-cookie" not in answer.headers


def test_an_id_in_the_body_is_cleaned_too(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={**BODY, "request_id": "a\r\né b" + "c" * 200})
    assert answer.json()["id"] == "embd-ab" + "c" * 126


# Errors


@pytest.mark.parametrize("path", ["/no/such/path", "/v1/embedding", "/docs/nope.js", "/v1/models/no/such", "/%ff%00", "/v1/embeddings/x"])
def test_404(server: RunningServer, path: str) -> None:
    check_error(Raw(server.url, "GET", path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/embeddings", "POST"), ("PUT", "/v2/embed", "POST"), ("POST", "/health", "GET"), ("DELETE", "/v1/models/fake", "GET")],
)
def test_405_says_what_is_allowed(server: RunningServer, method: str, path: str, allowed: str) -> None:
    answer = Raw(server.url, method, path, body=b"")
    assert allowed in check_error(answer, 405)
    methods = {name.strip() for name in answer.headers["allow"].split(",")}
    assert allowed in methods
    assert method not in methods


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[1]", b'{"input": NaN}', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"input": "a"} x', b"[" * 50_000],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_malformed_body_is_400(server: RunningServer, raw: bytes) -> None:
    check_error(Raw(server.url, "POST", "/v1/embeddings", JSON, body=raw), 400)


@pytest.mark.parametrize("kind", [None, b"text/plain", b"application/jsonx", b"multipart/form-data; boundary=x", b"\xff"])
def test_another_content_type_is_400(server: RunningServer, kind: bytes | None) -> None:
    lines = [] if kind is None else [b"Content-Type: " + kind]
    assert "application/json" in check_error(Raw(server.url, "POST", "/v1/embeddings", *lines, body=RIGHT), 400)


@pytest.mark.parametrize("kind", [b"application/json; charset=utf-8", b"Application/JSON", b"application/json ;x=y"])
def test_json_by_any_spelling_is_right(server: RunningServer, kind: bytes) -> None:
    assert Raw(server.url, "POST", "/v1/embeddings", b"Content-Type: " + kind, body=RIGHT).status == 200


def test_413_by_length_and_by_what_comes() -> None:
    with make_server(EmbedEndpoint(), server={"max_body_bytes": 1000}) as server, server.client() as client:
        # Nothing of the body is sent: the length alone decides.
        assert "1000" in check_error(Raw(server.url, "POST", "/v1/embeddings", JSON, b"Content-Length: 50000000"), 413)
        chunks = [b"x" * 400] * 3
        framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        lines = [JSON, b"Transfer-Encoding: chunked", b"", framed]
        assert "1000" in check_error(Raw(server.url, "POST", "/v1/embeddings", *lines), 413)
        fitting = RIGHT.ljust(1000)
        assert client.post("/v1/embeddings", content=fitting, headers={"content-type": "application/json"}).status_code == 200
        assert client.post("/v1/embeddings", content=iter([fitting]), headers={"content-type": "application/json"}).status_code == 200


def test_a_bug_is_500_with_its_traceback_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fault(request: EngineRequest) -> ServingError | None:
        raise RuntimeError("the inside story")

    with make_client(EmbedEndpoint(), engine=FakeEngine(fault=fault)) as client, caplog.at_level(logging.ERROR):
        answer = client.post("/v1/embeddings", json=BODY)
        assert "inside" not in check_error(answer, 500)
        assert sample(client, 'jackfield_requests_total{method="POST",path="/v1/embeddings",status="500"}') == 1
    assert "the inside story" in caplog.text
    assert "Traceback" in caplog.text


# Cross-origin


PREFLIGHT = {"origin": "https://page.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


def test_no_origin_is_allowed_by_default(client: httpx.Client) -> None:
    assert cors_headers(client.options("/v1/embeddings", headers=PREFLIGHT)) == {}
    assert cors_headers(client.get("/v1/models", headers={"origin": "https://page.example"})) == {}


def test_a_configured_origin_is_allowed() -> None:
    options = {"api_keys": ["secret"], "cors": {"allow_origins": ["https://page.example"], "max_age_s": 7, "allow_headers": ["x-a"]}}
    with make_client(EmbedEndpoint(), server=options) as client:
        preflight = client.options("/v1/embeddings", headers=PREFLIGHT)  # a browser sends it without the key
        assert preflight.status_code == 204
        assert preflight.content == b""
        allowed = cors_headers(preflight)
        assert allowed["access-control-allow-origin"] == "https://page.example"
        assert "POST" in allowed["access-control-allow-methods"]
        assert allowed["access-control-allow-headers"] == "x-a"
        assert allowed["access-control-max-age"] == "7"
        key = {"authorization": "Bearer secret"}
        for headers, path, status in (({}, "/v1/models", 401), (key, "/nope", 404), (key, "/v1/embeddings", 405), (key, "/version", 200)):
            answer = client.get(path, headers={"origin": "https://page.example", **headers})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            assert "retry-after" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "origin"
            other = client.get(path, headers={"origin": "https://page.example.evil", **headers})
            assert other.status_code == status
            assert cors_headers(other) == {}
        stranger = client.options("/v1/embeddings", headers={**PREFLIGHT, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_a_star_allows_any_origin_and_lends_no_credentials() -> None:
    with make_client(EmbedEndpoint(), server={"cors": {"allow_origins": ["*"]}}) as client:
        for answer in (client.options("/v1/embeddings", headers=PREFLIGHT), client.get("/nope", headers={"origin": "null"})):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers
        assert cors_headers(client.get("/version")) == {}


# A proxy's prefix


@pytest.mark.parametrize("root", ["/llm", "/llm/"])
def test_routes_answer_under_the_root_path(root: str) -> None:
    with make_client(EmbedEndpoint(), server={"root_path": root, "api_keys": ["secret"]}) as client:
        assert client.get("/llm/health").status_code == 200
        check_error(client.get("/llm/version"), 401)
        client.headers["authorization"] = "Bearer secret"
        assert client.post("/llm/v1/embeddings", json=BODY).status_code == 200
        assert client.post("/v1/embeddings", json=BODY).status_code == 200  # a proxy may cut its prefix off
        check_error(client.get("/llmx/version"), 404)
        links = assets(client.get("/llm/docs").text)
        assert links
        for link in links:
            assert link.startswith("/llm/")
            assert client.get(link).status_code == 200
        assert client.get("/llm/openapi.json").json()["servers"][0]["url"].rstrip("/") == "/llm"
        assert sample(client, 'jackfield_requests_total{method="POST",path="/v1/embeddings",status="200"}') == 2


# Metrics


def test_labels_are_bounded() -> None:
    with make_client(EmbedEndpoint()) as client:
        for number in range(100):
            client.get(f"/no/such/{number}")
            client.get(f"/v1/models/m{number}")
            client.post("/v1/embeddings", json={**BODY, "model": f"m{number}"})
        for method in ("PROPFIND", "TRACE", "LOCK"):
            client.request(method, "/nope")
        series = [line for line in client.get("/metrics").text.splitlines() if line.startswith("jackfield_requests_total{")]
        assert sorted(line.rpartition(" ")[0].removeprefix("jackfield_requests_total") for line in series) == [
            '{method="GET",path="/v1/models/{model_id}",status="404"}',
            '{method="GET",path="unmatched",status="404"}',
            '{method="POST",path="/v1/embeddings",status="404"}',
            '{method="other",path="unmatched",status="404"}',
        ]
        assert sample(client, 'jackfield_requests_total{method="GET",path="unmatched",status="404"}') == 100


def test_statuses_are_counted_right() -> None:
    with make_client(EmbedEndpoint(), server={"api_keys": ["secret"]}) as client:
        client.get("/v1/models")
        client.headers["authorization"] = "Bearer secret"
        client.get("/v1/models/nope")
        client.get("/v1/embeddings")
        client.post("/v1/embeddings", content=b"{")
        client.post("/v1/embeddings", json=BODY)
        client.get("/version")
        total = "jackfield_requests_total"
        assert sample(client, total + '{method="GET",path="unmatched",status="401"}') == 1
        assert sample(client, total + '{method="GET",path="/v1/models/{model_id}",status="404"}') == 1
        assert sample(client, total + '{method="GET",path="/version",status="200"}') == 1
        assert sample(client, total + '{method="POST",path="/v1/embeddings",status="400"}') == 1
        assert sample(client, total + '{method="POST",path="/v1/embeddings",status="200"}') == 1
        assert sample(client, 'jackfield_endpoint_requests_total{endpoint="embed",model="fake",outcome="ok"}') == 1
        assert sample(client, 'jackfield_prompt_tokens_total{endpoint="embed",model="fake"}') == len("hello") + 2


def test_histograms_are_whole() -> None:
    """As Prometheus reads them: buckets add up, the last holds everything, sums are of seconds."""
    with make_client(EmbedEndpoint()) as client:
        begun = time.monotonic()
        for number in range(20):
            assert client.post("/v1/embeddings", json={**BODY, "input": "ab " * number or "a"}).status_code == 200
        seconds = time.monotonic() - begun
        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert families["jackfield_stage_seconds"].type == "histogram"
    series: dict[str, dict[str, list[float]]] = {}
    for one in families["jackfield_stage_seconds"].samples:
        series.setdefault(one.labels["stage"], {}).setdefault(one.name.rpartition("_")[2], []).append(one.value)
    assert set(series) == {"preprocess", "tokenize", "engine", "build_response"}
    for stage in series.values():
        assert stage["bucket"] == sorted(stage["bucket"])
        assert stage["bucket"][-1] == stage["count"][0] == 20
        assert 0 < stage["sum"][0] < seconds
    bounds = [float(one.labels["le"]) for one in families["jackfield_request_seconds"].samples if one.name.endswith("_bucket")]
    assert bounds == sorted(bounds)
    assert bounds[-1] == math.inf


def test_without_metrics_and_docs_their_routes_are_unknown() -> None:
    with make_client(EmbedEndpoint(), server={"metrics": False, "docs": False}) as client:
        for path in ("/metrics", "/docs", "/openapi.json", "/docs/swagger-ui.css"):
            check_error(client.get(path), 404)


# The documents


def assets(page: str) -> list[str]:
    return re.findall(r'(?:src|href|url)\s*[=:]\s*"([^"]+)"', page)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolved(document: Any, reference: str) -> Any:
    assert reference.startswith("#/"), reference
    node = document
    for part in reference[2:].split("/"):
        node = node[part.replace("~1", "/").replace("~0", "~")]
    return node


def test_the_document_is_whole(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == client.get("/version").json()["version"]
    found = set(references(document))
    assert "#/components/schemas/ErrorBody" in found
    assert all(isinstance(resolved(document, reference), dict) for reference in found)
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for path, item in document["paths"].items():
        for operation in item.values():
            declared = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path))
            assert all(answer["description"] for answer in operation["responses"].values())


def test_every_route_is_documented_with_its_errors(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    routes = {(path, route.method.lower()) for route in EmbedEndpoint().routes for path in route.paths}
    assert {(path, method) for path, item in paths.items() for method in item} == routes | {
        (path, "get") for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/{model_id}")
    }
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for item in paths.values():
        for operation in item.values():
            assert all(answer["content"] == error for code, answer in operation["responses"].items() if code != "200")
    for path, method in routes:
        assert {"200", "400", "401", "404", "413", "429", "500", "503", "504"} <= set(paths[path][method]["responses"])
        assert paths[path][method]["requestBody"]["content"]["application/json"]["schema"]


def test_the_page_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?:|['\"(]//", page.text), "another host is named"
    links = assets(page.text)
    assert {Path(link).suffix for link in links} == {".png", ".css", ".js", ".json"}
    for link in links:
        answer = client.get(link)
        assert answer.status_code == 200, link
        assert len(answer.content) > 500, link
    style = client.get(next(link for link in links if link.endswith(".css"))).text
    assert not re.search(r"(@import|url\(\s*['\"]?https?:)", style)


# Deadlines and vectors


def test_a_deadline_is_kept() -> None:
    with make_server(EmbedEndpoint(), server={"default_deadline_s": 0.1}) as server, server.client() as client:
        assert server.engine is not None
        server.engine.hold()
        check_error(client.post("/v1/embeddings", json=BODY), 504)
        check_error(client.post("/v1/embeddings", json=BODY, headers={"x-request-timeout": "0.05"}), 504)
        assert server.engine.aborted == [request.id for request in server.engine.requests]
        assert all(request.deadline is not None for request in server.engine.requests)
        assert sample(client, 'jackfield_requests_total{method="POST",path="/v1/embeddings",status="504"}') == 2
        assert sample(client, 'jackfield_queue{unit="requests"}') == 0
        server.engine.go()
        assert client.post("/v1/embeddings", json=BODY, headers={"x-request-timeout": "5"}).status_code == 200


@pytest.mark.parametrize("given", ["soon", "", "0", "-1", "nan", "inf", "1e400", "5s"])
def test_a_deadline_that_is_none_is_400(client: httpx.Client, given: str) -> None:
    assert "x-request-timeout" in check_error(client.post("/v1/embeddings", json=BODY, headers={"x-request-timeout": given}), 400)


def digits(text: str) -> str:
    """The significant digits of a number."""
    return re.sub(r"[-+.]", "", text.lower().partition("e")[0]).strip("0")


def test_floats_are_the_shortest_that_round_trip() -> None:
    with make_client(EmbedEndpoint(), engine=FakeEngine(embedding_size=2048)) as client:
        raw = client.post("/v1/embeddings", json=BODY).text
        written = json.loads(raw, parse_float=str)["data"][0]["embedding"]
        exact = np.frombuffer(
            b64decode(client.post("/v1/embeddings", json={**BODY, "encoding_format": "base64"}).json()["data"][0]["embedding"]), "<f4"
        )
        np.testing.assert_array_equal(np.array([float(text) for text in written], np.float32), exact)
        assert [digits(text) for text in written] == [digits(str(number)) for number in exact]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_a_number_that_is_none_is_an_error(form: str) -> None:
    with make_client(EmbedEndpoint(), engine=FakeEngine(nan=True)) as client:
        assert "non-finite" in check_error(client.post("/v1/embeddings", json={**BODY, "encoding_format": form}), 500)
        cohere = {"texts": ["a"], "embedding_types": [form]}
        assert "non-finite" in check_error(client.post("/v2/embed", json=cohere), 500)
