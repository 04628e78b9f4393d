"""What the cases are run with: servers over the models that they name, and a client that looks at every error it meets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.servers import Served, served

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in map(json.loads, (Path(__file__).parent / "cases.jsonl").read_text(encoding="utf-8").splitlines())
}

MAX_MESSAGE = 1000
# Flags with which a stuck engine is soon told.
QUICK = ("--set", "engine.stall_s=2", "--set", "engine.heartbeat_s=0.2")


class Bench:
    """A running server. Every answer of 4xx or 5xx must have the one shape (case F22), whichever case it came from."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self._client = server.client()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self._client.request(method, path, **options)
        if answer.status_code >= 400:
            check_error(answer)
        return answer

    def post(self, path: str, body: dict[str, Any], status: int = 200, **options: Any) -> Any:
        answer = self.send("POST", path, json=body, **options)
        assert answer.status_code == status, f"{answer.status_code}: {answer.text[:500]}"
        return answer.json()

    def raw(
        self, path: str, content: bytes | Iterator[bytes], status: int | None = None, content_type: str | None = "application/json"
    ) -> Any:
        headers = {} if content_type is None else {"content-type": content_type}
        answer = self.send("POST", path, content=content, headers=headers)
        assert status is None or answer.status_code == status, f"{answer.status_code}: {answer.text[:500]}"
        return answer

    def embed(self, given: Any, model: str = "minilm", **fields: Any) -> list[list[float]]:
        data = self.post("/v1/embeddings", {"model": model, "input": given, **fields})["data"]
        assert [item["index"] for item in data] == list(range(len(data)))
        return [item["embedding"] for item in data]


def check_error(answer: httpx.Response) -> None:
    """F22: one shape, a message, the status as code, nothing of the machine in it."""
    assert answer.headers["content-type"].startswith("application/json"), answer.text[:200]
    body = answer.json()
    assert list(body) == ["error"], body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["code"] == answer.status_code
    assert 0 < len(error["message"]) <= MAX_MESSAGE
    assert "Traceback" not in error["message"]
    assert "site-packages" not in error["message"]


def expand(value: Any) -> Any:
    """`{"$repeat": [text, n]}` of the cases as the text itself."""
    if isinstance(value, dict) and "$repeat" in value:
        text, count = value["$repeat"]
        return text * count
    if isinstance(value, dict):
        return {key: expand(item) for key, item in value.items()}
    return [expand(item) for item in value] if isinstance(value, list) else value


def steps(case_id: str) -> list[dict[str, Any]]:
    """A case's requests as a list."""
    request = CASES[case_id]["request"]
    if isinstance(request, dict) and "steps" in request:
        request = request["steps"]
    return [expand(step) for step in (request if isinstance(request, list) else [request]) if isinstance(step, dict)]


Enact = Callable[..., None]
ENACTED: dict[str, Enact] = {}


def case(case_id: str) -> Callable[[Enact], Enact]:
    """Marks the function that runs a case."""

    def register(function: Enact) -> Enact:
        assert case_id in CASES
        assert case_id not in ENACTED
        ENACTED[case_id] = function
        return function

    return register


@contextmanager
def serving(folder: Path, config: str, *flags: str, wait: bool = True, env: dict[str, str] | None = None) -> Iterator[Bench]:
    """Serve a configuration, given as text."""
    path = folder / "server.toml"
    path.write_text(config)
    with served(str(path), *flags, wait=wait, env=env) as server:
        yield Bench(server)
