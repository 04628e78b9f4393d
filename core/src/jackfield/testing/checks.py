"""The checks of the contract. Each is handed a `Bench`, and knows no endpoint."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from select import select
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from jackfield.testing.bench import Bench, check_error, operations_of, read_vectors, until

__all__ = [
    "a_client_that_leaves_ends_its_work",
    "body_limit",
    "deadline",
    "engine_death",
    "engine_fault",
    "every_path_is_documented",
    "example_answers",
    "key_is_needed",
    "malformed_bodies",
    "metrics_have_bounded_labels",
    "overload",
    "refusal_is_told",
    "schema_round_trip",
    "stages_are_quick_and_leave_the_request_alone",
    "unknown_fields_are_ignored",
    "unknown_model",
    "wrong_capability",
    "wrong_fields_are_named",
]

# What a stage may take of the event loop, by the median: DESIGN 3 speaks of one millisecond, and a machine of tests is busy.
MAX_STAGE_MS = 10.0
NUM_TIMED = 20
# Values of every kind that JSON has, to find one that a field cannot have.
WRONG: tuple[Any, ...] = ({"wrong": {}}, [[{}]], 7.5, True, "x", -(2**70))


def example_answers(bench: Bench) -> None:
    """The example gets an answer of the declared type, under the id that was asked for, whose usage adds up."""
    answer = bench.send()
    assert answer.status_code == 200, answer.text[:300]
    assert answer.headers["x-request-id"]
    content = msgspec.json.decode(answer.content)
    kind = bench.route.response
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        msgspec.convert(content, kind, dec_hook=read_vectors)
    if isinstance(content, dict):
        if "id" in content:
            given = bench.send(headers={"x-request-id": "given-id"}).json()["id"]
            assert given == f"{bench.route.id_prefix or bench.endpoint.id_prefix}-given-id"
        if "model" in content:
            assert content["model"] == "fake"
        usage = content.get("usage")
        if usage:
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage.get("completion_tokens", 0)


def schema_round_trip(bench: Bench) -> None:
    """The example survives the types: decoded, encoded and decoded again it is the same, and the server answers the same to it."""
    kind = bench.route.request
    request = msgspec.convert(bench.example, kind)
    again = msgspec.json.encode(request)
    assert msgspec.json.decode(again, type=kind) == request
    if bench.route.method != "GET":
        first, second = bench.send(), bench.client.post(bench.path, content=again, headers={"content-type": "application/json"})
        assert (second.status_code, _steady(second.json())) == (200, _steady(first.json()))


def _steady(content: Any) -> Any:
    """An answer without what differs from one request to the next."""
    return {name: value for name, value in content.items() if name not in ("id", "created")} if isinstance(content, dict) else content


def unknown_model(bench: Bench) -> None:
    """A model that there is not is a 404 that names it."""
    body = check_error(bench.send({**bench.example, "model": "no-such-model"}), 404)
    assert body.error.param == "model"
    assert "no-such-model" in body.error.message


def wrong_capability(bench: Bench) -> None:
    """A model that cannot do it is a 400 that says what it can."""
    body = check_error(bench.send({**bench.example, "model": "fake"}), 400)
    assert body.error.param == "model"
    assert all(name in body.error.message for name in bench.engine.operations)


def malformed_bodies(bench: Bench) -> None:
    """What is no JSON object of the right content type is a 400."""
    headers = {"content-type": "application/json"}
    for raw in (b"", b"{", b"null", b"[]", b'"x"', b"{bad}", b'{"a":NaN}', b"\xff\xfe", b"[" * 100_000):
        check_error(bench.client.request(bench.route.method, bench.path, content=raw, headers=headers), 400)
    right = json.dumps(bench.example).encode()
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        check_error(bench.client.request(bench.route.method, bench.path, content=right, headers={"content-type": kind}), 400)


def wrong_fields_are_named(bench: Bench) -> None:
    """A value that a field cannot have is a 400 with the field's path in `param`."""
    for kind in get_args(bench.route.request) or (bench.route.request,):
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            wrong = next((value for value in WRONG if not _fits(value, hints[field.name])), None)
            if wrong is None:
                continue
            body = check_error(bench.send({**bench.example, field.encode_name: wrong}), 400)
            param = body.error.param or ""
            assert param.partition("[")[0].partition(".")[0] == field.encode_name, f"{field.encode_name}: {body.error}"


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


def unknown_fields_are_ignored(bench: Bench) -> None:
    """Clients send more than a server knows."""
    assert bench.send({**bench.example, "no_such_field": {"a": [1]}, "user": None}).status_code == 200


def body_limit(bench: Bench) -> None:
    """A body over the server's limit is a 413."""
    check_error(bench.send({**bench.example, "padding": "x" * 3000}), 413)


def key_is_needed(bench: Bench) -> None:
    """With a key configured no path answers without it."""
    for path in bench.paths:
        check_error(bench.client.request(bench.route.method, path, json=bench.example), 401)
    check_error(bench.send(headers={"authorization": "Bearer wrong"}), 401)
    assert bench.send(headers={"authorization": "bearer secret"}).status_code == 200


def refusal_is_told(bench: Bench) -> None:
    """A route that is known and not served says so, to those who have a key."""
    check_error(bench.send(), 401)
    body = check_error(bench.send(headers={"authorization": "bearer secret"}), 501)
    assert body.error.message == bench.route.refusal


def every_path_is_documented(bench: Bench) -> None:
    """The OpenAPI document has each path, its references lead somewhere, and no operation has another's name."""
    document = bench.client.get("/openapi.json").json()
    for path in bench.paths:
        assert bench.route.method.lower() in document["paths"][path]
    for reference in _values(document, "$ref"):
        node = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in node, f"{reference} leads nowhere"
            node = node[part]
    names = list(_values(document["paths"], "operationId"))
    assert len(names) == len(set(names))


def _values(node: Any, key: str) -> Any:
    """Every value of a key, anywhere in a document."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)


def metrics_have_bounded_labels(bench: Bench) -> None:
    """Requests are counted under the route's path, and ids, models that there are not and queries make no series of their own."""
    bench.send()
    check_error(bench.send({**bench.example, "model": "first-wrong"}), 404)
    before = bench.client.get("/metrics").text
    assert f'path="{bench.path}",status="200"' in before
    bench.send(headers={"x-request-id": "an-id-of-its-own"})
    bench.client.request(bench.route.method, bench.path + "?a=query-of-its-own", json=bench.example)
    check_error(bench.send({**bench.example, "model": "model-of-its-own"}), 404)
    after = bench.client.get("/metrics").text
    new = _series(after) - _series(before)
    assert not new, f"{len(new)} series that the same requests under other names have made, such as {min(new)}"


def _series(metrics: str) -> set[str]:
    """Names and labels, but of the metrics' own route, which counts itself."""
    return {line.rpartition(" ")[0] for line in metrics.splitlines() if 'path="/metrics"' not in line}


def overload(bench: Bench) -> None:
    """With the engine held, two requests wait and the third is told when to come back; the two get their answers."""
    bench.engine.hold()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(bench.send) for _ in range(2)]
        until(lambda: len(bench.engine.requests) == 2 or any(future.done() for future in waiting))
        refused = bench.send()
        bench.engine.go()
        check_error(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in waiting] == [200, 200]
    assert bench.send().status_code == 200


def deadline(bench: Bench) -> None:
    """X-Request-Timeout ends a request with 504, and its work with it."""
    bench.engine.hold()
    check_error(bench.send(headers={"x-request-timeout": "0.05"}), 504)
    assert bench.engine.aborted == [bench.engine.requests[0].id]
    bench.engine.go()
    check_error(bench.send(headers={"x-request-timeout": "soon"}), 400)
    assert bench.send(headers={"x-request-timeout": "30"}).status_code == 200


def a_client_that_leaves_ends_its_work(bench: Bench) -> None:
    """A connection that is cut while the request is in the engine aborts it there; others do not notice."""
    bench.engine.hold()
    url = urlsplit(str(bench.client.base_url))
    body = b"" if bench.route.method == "GET" else json.dumps(bench.example).encode()
    head = f"{bench.route.method} {bench.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with ThreadPoolExecutor(1) as pool:
        with socket.create_connection((url.hostname or "", url.port or 80)) as leaving:
            leaving.sendall(head.encode() + body)
            until(lambda: bool(bench.engine.requests or select([leaving], [], [], 0)[0]))
            assert len(bench.engine.requests) == 1, "it was answered, and the engine has never seen it"
        staying = pool.submit(bench.send)
        until(lambda: len(bench.engine.requests) == 2 and len(bench.engine.aborted) == 1)
        bench.engine.go()
        assert staying.result().status_code == 200
    assert bench.engine.aborted == [bench.engine.requests[0].id]


def engine_fault(bench: Bench) -> None:
    """An error of the engine is this request's alone."""
    assert "a fault on demand" in check_error(bench.send(), 500).error.message
    bench.engine.fault = None
    assert bench.send().status_code == 200


def engine_death(bench: Bench) -> None:
    """With the engine dead, requests are told so, and so are those who ask for the server's health."""
    bench.engine.die()
    check_error(bench.send(), 503)
    check_error(bench.client.get("/health"), 503)
    check_error(bench.client.get("/ready"), 503)


def stages_are_quick_and_leave_the_request_alone(bench: Bench) -> None:
    """The median CPU time of each stage is under 10 ms, and none changes the request, which wrappers see after it."""
    for _ in range(NUM_TIMED):
        assert bench.send().status_code == 200
    assert not bench.probe.changed, f"changed by {sorted(bench.probe.changed)}"
    medians = bench.probe.medians_ms()
    assert medians if operations_of(bench.endpoint, bench.route) else True
    slow = {stage: round(median, 1) for stage, median in medians.items() if median > MAX_STAGE_MS}
    assert not slow, f"milliseconds of CPU, by the median of {NUM_TIMED}: {slow}"
