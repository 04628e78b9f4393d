"""Grammars that a client sends are tried where they can harm nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jackfield import BadRequest, Grammar, json_grammar, lark_grammar
from jackfield.checker import GrammarChecker
from jackfield.testing import make_client
from jackfield_completions import CompletionsEndpoint

DEEP = 5000
# Each overflows llguidance's stack, which ends its process.
CRASHES: dict[str, Grammar] = {
    "references": json_grammar(
        {"$ref": "#/$defs/a0", "$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(DEEP)} | {f"a{DEEP}": {}}}, param="schema"
    ),
    "rules": lark_grammar("start: a0\n" + "\n".join(f'a{n}: a{n + 1} "x"' for n in range(DEEP)) + f'\na{DEEP}: "y"', param="schema"),
}
# Whether all these patterns together match nothing takes it minutes to tell.
ENDLESS = json_grammar({"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(3, 30)]}, param="schema")
GOOD = json_grammar({"type": "integer"}, param="schema")


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(timeout_s=1.0)
    yield made
    await made.close()


@pytest.mark.parametrize("name", [*CRASHES, "endless"])
async def test_what_cannot_be_tried_is_refused(checker: GrammarChecker, name: str) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest, match="too complex") as refused:
            await checker.check(CRASHES.get(name, ENDLESS))
        assert refused.value.param == "schema"
        assert (await checker.check(GOOD)).source


async def test_many_at_once(checker: GrammarChecker) -> None:
    """Each gets its own answer, whatever becomes of the others."""
    grammars = [json_grammar({"const": number}, param=str(number)) for number in range(20)]
    results = await asyncio.gather(*map(checker.check, [*grammars, CRASHES["rules"], *grammars]), return_exceptions=True)
    assert isinstance(results.pop(20), BadRequest)
    for number, made in enumerate(results):
        assert isinstance(made, Grammar)
        assert f'"const":{number % 20},' in made.source
        assert made.param == str(number % 20)


async def test_who_leaves_takes_no_answer_from_others(checker: GrammarChecker) -> None:
    leaving = asyncio.create_task(checker.check(ENDLESS))
    waiting = asyncio.create_task(checker.check(GOOD))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert '"integer"' in (await waiting).source


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with make_client(CompletionsEndpoint()) as made:
        yield made


def post(client: httpx.Client, outputs: dict[str, Any]) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "structured_outputs": outputs})


def test_the_server_lives_on(client: httpx.Client) -> None:
    rule = CRASHES["rules"].rule["lark_grammar"]
    answer = post(client, {"grammar": rule})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs.grammar"
    assert "too complex" in answer.json()["error"]["message"]
    assert post(client, {"regex": "a+"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_its_process_ends_with_the_server() -> None:
    others = children()
    with make_client(CompletionsEndpoint()) as client:
        assert post(client, {"regex": "ab"}).status_code == 200
        [child] = set(children()) - set(others)
    with pytest.raises(ProcessLookupError):
        os.kill(child, signal.SIG_DFL)


def children() -> list[int]:
    """Processes of this one that try grammars."""
    listed = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if parent == os.getpid() and "trial.py" in command:
            listed.append(int(folder.name))
    return listed
