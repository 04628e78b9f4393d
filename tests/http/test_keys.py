"""API keys: every route but the probes is behind them, whatever the method, and nothing but a key opens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from jackfield import ConfigError
from jackfield.testing import RunningServer, make_client, make_server
from jackfield_embed import EmbedEndpoint
from tests.http.raw import JSON, RIGHT, Raw, check_error

OPEN = ["/health", "/ready"]
SYSTEM = ["/version", "/metrics", "/v1/models", "/v1/models/fake", "/openapi.json", "/docs", "/docs/swagger-ui.css"]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Keys from both places."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# the team's\nfrom-file\n\n  second-of-file  \n", encoding="utf-8")
    with make_server(EmbedEndpoint(), server={"api_keys": ["secret", "clé"], "api_key_file": str(file)}) as running:
        yield running


@pytest.mark.parametrize("path", [*SYSTEM, "/no/such/path", "/", "//health", "/ready/x", "/HEALTH"])
def test_every_route_is_behind_the_key(keyed: RunningServer, path: str) -> None:
    answer = Raw(keyed.url, "GET", path)
    check_error(answer, 401)
    scheme = "Basic" if path.startswith("/docs") else "Bearer"  # a browser has no other way to ask for a page's key
    assert answer.headers["www-authenticate"].partition(" ")[0] == scheme


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed", "/nope"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "GET"])
def test_every_method_is_behind_the_key(keyed: RunningServer, method: str, path: str) -> None:
    check_error(Raw(keyed.url, method, path, JSON, body=RIGHT), 401)


@pytest.mark.parametrize("path", [*OPEN, *(f"{path}/" for path in OPEN)])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_need_no_key(keyed: RunningServer, path: str, method: str) -> None:
    assert Raw(keyed.url, method, path).status == 200
    assert Raw(keyed.url, "GET", path, b"Authorization: Bearer wrong").status == 200


@pytest.mark.parametrize("key", [b"secret", b"from-file", b"second-of-file", "clé".encode()])
@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER", b"bEaReR"])
def test_each_key_opens(keyed: RunningServer, scheme: bytes, key: bytes) -> None:
    authorization = b"Authorization: " + scheme + b" " + key
    assert Raw(keyed.url, "GET", "/version", authorization).status == 200
    assert Raw(keyed.url, "POST", "/v1/embeddings", authorization, JSON, body=RIGHT).status == 200
    check_error(Raw(keyed.url, "GET", "/no/such/path", authorization), 404)


def test_a_browser_sends_the_key_as_a_password(keyed: RunningServer) -> None:
    for name in ("", "anyone"):
        assert httpx.get(f"{keyed.url}/docs", auth=(name, "secret")).status_code == 200
        assert httpx.get(f"{keyed.url}/docs", auth=("secret", name)).status_code == 401


WRONG = (
    b"Bearer  secret|Bearer\tsecret|Bearer|Bearer ||secret|Basic secret|"
    b"Basic c2VjcmV0|Bearersecret|Bearer secretx|Bearer Secret|Bearer # the team's"
)
STRANGE = ["Bearer sécret".encode(), "Bearer sécret".encode("latin-1"), "Bearer clé".encode("latin-1"), b"Bearer \xff\xfe\x80"]


@pytest.mark.parametrize("value", [*WRONG.split(b"|"), *STRANGE, b"Bearer " + b"s" * 8000], ids=lambda value: repr(value[:30]))
def test_anything_else_is_401(keyed: RunningServer, value: bytes) -> None:
    check_error(Raw(keyed.url, "GET", "/v1/models", b"Authorization: " + value), 401)


def test_the_document_tells_of_the_key(keyed: RunningServer) -> None:
    document = json.loads(Raw(keyed.url, "GET", "/openapi.json", b"Authorization: Bearer secret").body)
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]
    assert all(document["paths"][path]["get"]["security"] == [] for path in OPEN)
    with make_client(EmbedEndpoint()) as client:
        assert "security" not in client.get("/openapi.json").json()


@pytest.mark.parametrize("keys", [[""], ["secret", " "]])
def test_an_empty_key_stops_the_start(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="holds an empty key"), make_server(EmbedEndpoint(), server={"api_keys": keys}):
        pass
