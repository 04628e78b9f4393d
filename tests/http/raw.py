"""Requests written by hand and answers as they come over the socket, for tests of what HTTP clients hide."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse

import httpx
import msgspec

from jackfield.schema import ErrorBody

BODY = {"input": "hello"}
RIGHT = json.dumps(BODY).encode()
JSON = b"Content-Type: application/json"


class Raw:
    """An answer as it came over the socket."""

    def __init__(self, url: str, method: str, path: str, *lines: bytes, body: bytes | None = None) -> None:
        """lines: header lines, sent as they are. body: None sends no length, for a caller that gives its own or none."""
        address = httpx.URL(url)
        length = [] if body is None else [b"Content-Length: %d" % len(body)]
        head = [f"{method} {path} HTTP/1.1".encode(), b"Host: test", b"Connection: close", *lines, *length]
        with socket.create_connection((address.host, address.port or 0), timeout=20) as sock:
            sock.sendall(b"\r\n".join(head) + b"\r\n\r\n" + (body or b""))
            answer = HTTPResponse(sock, method=method)
            answer.begin()
            self.status = answer.status
            self.headers = {name.lower(): value for name, value in answer.getheaders()}
            self.body = answer.read()


def check_error(answer: httpx.Response | Raw, status: int) -> str:
    """The message of an error in the one shape."""
    code, content = (answer.status, answer.body) if isinstance(answer, Raw) else (answer.status_code, answer.content)
    assert code == status, content[:300]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = msgspec.json.decode(content, type=ErrorBody)
    assert json.loads(content) == {"error": msgspec.to_builtins(body.error)}
    assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
    assert body.error.code == status
    assert body.error.type
    return body.error.message


def sample(client: httpx.Client, series: str) -> float:
    """A series of /metrics by its exact name and labels; 0 when there is none."""
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series), 0.0)
