"""What is refused, with the field at fault, before the engine sees anything of it; and what the engine does see of the rest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jackfield_decisions
from jackfield import PoolingParams, ReasoningParserRegistry, hookimpl
from jackfield.testing import FakeEngine, RunningServer, make_server, tiny_model
from jackfield_decisions import DecisionsEndpoint
from tests.http.raw import check_error

NOUL: dict[str, Any] = {"type": "noul", "instructions": "Is it?"}
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "It is."}
MANY = {f"option {number}": None for number in range(27)}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(jackfield_decisions, engine=FakeEngine(max_length=2000), endpoints={"decisions": {"max_questions": 3}}) as running:
        yield running


def refused(server: RunningServer, path: str, body: dict[str, Any], param: str | None) -> str:
    assert server.engine is not None
    before = len(server.engine.requests)
    with server.client() as client:
        answer = client.post(path, json=body)
    message = check_error(answer, 400)
    assert answer.json()["error"]["param"] == param
    assert len(server.engine.requests) == before
    return message


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"questions": {}}, "questions", "0; from 1 to 3"),
        ({"questions": dict.fromkeys("abcd", NOUL)}, "questions", "4; from 1 to 3"),
        ({"questions": [NOUL]}, "questions", "object"),
        ({"questions": {"a": "Is it?"}}, "questions.a", "must be an object"),
        ({"questions": {"a": {"type": "box"}}}, "questions.a.type", "'box'; it must be noul, choice, score"),
        ({"questions": {"a": {"type": ["noul"]}}}, "questions.a.type", "must be noul"),
        ({"questions": {"a": {"instructions": "Is it?"}}}, "questions.a.type", "is missing"),
        ({"questions": {"a": {"type": "noul"}}}, "questions.a.instructions", "asks nothing"),
        (
            {"questions": {"a": {"type": "noul", "instructions": "", "criteria": {"true": None}}}},
            "questions.a.instructions",
            "asks nothing",
        ),
        ({"questions": {"a": {**NOUL, "criteria": {"yes": "x"}}}}, "questions.a.criteria", "yes"),
        ({"questions": {"a": {**NOUL, "instructions": 7}}}, "questions.a.instructions", "int"),
        ({"questions": {"ok": NOUL, "a": {"type": "choice", "instructions": "q"}}}, "questions.a.criteria", "missing"),
        ({"questions": {"a": {"type": "choice", "criteria": {"one": None}}}}, "questions.a.criteria", ">= 2"),
        ({"questions": {"a": {"type": "choice", "criteria": MANY}}}, "questions.a.criteria", "<= 26"),
        ({"questions": {"a": {"type": "choice", "criteria": {"": None, "b": None}}}}, "questions.a.criteria", ">= 1"),
        ({"questions": {"a": {"type": "choice", "criteria": ["a", "b"]}}}, "questions.a.criteria", "object"),
        ({"questions": {"a": {"type": "score", "criteria": ["one"]}}}, "questions.a.criteria", ">= 2"),
        ({"questions": {"a": {"type": "score", "criteria": list("abcdefghijk")}}}, "questions.a.criteria", "<= 10"),
        ({"questions": {"a": {"type": "score", "criteria": ["a", None]}}}, "questions.a.criteria[1]", "null"),
        ({"questions": {"a": {"type": "score", "criteria": ["a", ""]}}}, "questions.a.criteria[1]", ">= 1"),
        (
            {"questions": {"a": {"type": "noul", "instructions": " \n", "criteria": {"false": " "}}}},
            "questions.a.instructions",
            "asks nothing",
        ),
        ({"state": 3}, "state", "int"),
        ({"state": None}, "state", "null"),
        ({"assets": {"img-1": {"data_base64": "AA=="}}}, "assets", "Images are not served"),
        ({"state": "x" * 3000}, "state", "2000 tokens"),
        ({"questions": {"ok": NOUL, "a": {"type": "noul", "instructions": "x" * 3000}}}, "questions.a", "2000 tokens"),
        ({"state": "x" * (23 * 2**20), "questions": dict.fromkeys("abc", NOUL)}, "state", "once for each of 3 questions"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_system_one_names_the_field(server: RunningServer, change: dict[str, Any], param: str, words: str) -> None:
    assert words in refused(server, "/v1/systemone", {"state": "x", "questions": {"a": NOUL}, **change}, param)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"questions": []}, "questions", "0; from 1 to 3"),
        ({"questions": [PREDICATE] * 4}, "questions", "4; from 1 to 3"),
        ({"questions": [PREDICATE, {"type": "noul", "instructions": "Is it?"}]}, "questions[1].type", "noul"),
        ({"questions": [{"instructions": "Is it?"}]}, "questions[0].type", "type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "missing"),
        ({"questions": [{"type": "predicate", "instructions": ""}]}, "questions[0].instructions", ">= 1"),
        (
            {"questions": [PREDICATE, {"type": "predicate", "instructions": [{"type": "input_text", "text": " "}]}]},
            "questions[1].instructions",
            "asks nothing",
        ),
        ({"questions": [{"type": "predicate", "instructions": [IMAGE]}]}, "questions[0].instructions[0]", "input_image"),
        ({"questions": [{**PREDICATE, "name": "a"}, {**PREDICATE, "name": "a"}]}, "questions[1].name", "'a'"),
        ({"questions": [{"type": "choice", "instructions": "q", "choices": [{"value": "a"}]}]}, "questions[0].choices", ">= 2"),
        (
            {"questions": [{"type": "choice", "instructions": "q", "choices": [{"value": name} for name in MANY]}]},
            "questions[0].choices",
            "<= 26",
        ),
        (
            {"questions": [{"type": "choice", "instructions": "q", "choices": [{"value": "a"}, {"value": True}, {"value": "a"}]}]},
            "questions[0].choices[2].value",
            "'a'",
        ),
        (
            {"questions": [{"type": "choice", "instructions": "q", "choices": [{"value": "a"}, {"value": 1}]}]},
            "questions[0].choices[1].value",
            "int",
        ),
        ({"questions": [{"type": "score", "instructions": "q", "levels": [{"label": "a"}]}]}, "questions[0].levels", ">= 2"),
        ({"questions": [{"type": "score", "instructions": "q", "levels": [{"label": "a"}] * 11}]}, "questions[0].levels", "<= 10"),
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", "null"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, IMAGE]}]}, "input[0].content[1]", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "without its text"),
        ({"input": [{"role": "user", "content": [{"type": "input_json"}]}]}, "input[0].content[0]", "without its data"),
        ({"input": [{"role": "user"}]}, "input[0].content", "content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}]}, "input[0].type", "function_call"),
        ({"input": "x" * 3000}, "input", "2000 tokens"),
        ({"questions": [PREDICATE, {**PREDICATE, "instructions": "x" * 3000}]}, "questions[1]", "2000 tokens"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_decisions_names_the_field(server: RunningServer, change: dict[str, Any], param: str, words: str) -> None:
    assert words in refused(server, "/v1/decisions", {"input": "x", "questions": [PREDICATE], **change}, param)


def test_what_is_nested_too_deeply_is_no_fault_of_the_server(server: RunningServer) -> None:
    for depth in (100, 500, 900, 1000, 1500, 5000, 100_000):
        with server.client() as client:
            raw = b'{"state": ' + b"[" * depth + b"]" * depth + b', "questions": {"a": {"type": "noul", "instructions": "q"}}}'
            answer = client.post("/v1/systemone", content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), f"{depth}: {answer.text}"


def test_the_engine_sees_no_labels(server: RunningServer) -> None:
    """A prompt a question, and the first tokens of all labels: of single bytes here."""
    questions = {
        "a": NOUL,
        "b": {"type": "choice", "criteria": {"x": None, "y": None}},
        "c": {"type": "score", "criteria": ["l", "m", "h"]},
    }
    with server.client() as client:
        content = client.post("/v1/systemone", json={"state": "x", "questions": questions}).json()
    assert server.engine is not None
    request = server.engine.requests[-1]
    assert len(request.token_ids) == 3
    assert isinstance(request.params, PoolingParams)
    assert len(set(request.params.logit_ids)) == 5  # Yes, No, A, B, C
    assert content["usage"]["input_tokens"] == sum(len(ids) // 4 for ids in request.token_ids)


def test_answers_that_are_all_alike(server: RunningServer) -> None:
    """As the fake engine has them: the first option is taken, and nothing is known."""
    questions = {
        "a": NOUL,
        "b": {"type": "choice", "criteria": {"x": None, "y": None}},
        "c": {"type": "score", "criteria": ["l", "m", "h"]},
    }
    with server.client() as client:
        answers = client.post("/v1/systemone", json={"state": "x", "questions": questions}).json()["answers"]
    assert answers["a"]["noul"] == 0.5
    assert (answers["b"]["choice"], answers["b"]["confidence"]) == ("x", 0)
    assert answers["c"]["score"] == pytest.approx(1)
    assert answers["c"]["confidence"] == pytest.approx(0, abs=1e-12)


def changed(folder: Path, name: str, change: Any) -> dict[str, Any]:
    """The table of the tiny model with one of its files changed."""
    shutil.copytree(tiny_model("llama"), folder, dirs_exist_ok=True)
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return {"source": str(folder)}


def test_models_that_cannot_be_asked(tmp_path: Path) -> None:
    one_letter = {"type": "Replace", "pattern": {"Regex": "[A-Z]"}, "content": "A"}
    models = {
        "silent": changed(tmp_path / "silent", "tokenizer_config.json", lambda content: content.pop("chat_template")),
        "alike": changed(tmp_path / "alike", "tokenizer.json", lambda content: content.update(normalizer=one_letter)),
    }
    with make_server(jackfield_decisions, models=models) as server:
        body = {"state": "x", "questions": {"a": {"type": "choice", "criteria": {"x": None, "y": None}}}}
        assert "no chat template" in refused(server, "/v1/systemone", {**body, "model": "silent"}, "model")
        assert "labels A, B with the same token" in refused(server, "/v1/systemone", {**body, "model": "alike"}, "model")
        with server.client() as client:
            assert "nobody" in check_error(client.post("/v1/systemone", json={**body, "model": "nobody"}), 404)
    with make_server(jackfield_decisions, engine=FakeEngine(operations=("embed", "generate"))) as server:
        assert "it can: embed, generate" in refused(server, "/v1/systemone", {**body, "model": "fake"}, "model")


def test_a_model_that_thinks_is_asked_not_to(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
    models = {"m": changed(tmp_path / "m", "tokenizer_config.json", lambda content: content.update(chat_template=template))}
    with make_server(jackfield_decisions, models=models) as server, server.client() as client:
        assert client.post("/v1/systemone", json={"state": "x", "questions": {"a": NOUL}}).status_code == 200
        assert server.engine is not None
        with_it = len(np.frombuffer(server.engine.requests[-1].token_ids[0], dtype=np.int32))
    text = "Text:\nx\n\nQuestion: Is it?\nReply with Yes or No alone."
    assert with_it == len(text) + len("<no thoughts>")


class Thoughts:
    """The parser of reasoning that one template marks. Nothing is generated, so nothing is read."""

    visible: tuple[str, ...] = ()
    start, end = "<think>", "</think>"

    def stream(self, prompt: str) -> Any:
        raise AssertionError(prompt)

    def begun(self, prompt: str) -> bool | None:
        return prompt.endswith(self.start) or None

    @hookimpl
    def jackfield_reasoning_parsers(self, registry: ReasoningParserRegistry) -> None:
        registry.add("thoughts", lambda dialect: self, fits=lambda dialect: True)


@pytest.mark.parametrize(("end", "status"), [("<think>", 400), ("<think></think>", 200)])
def test_a_template_that_begins_a_thought_is_refused(tmp_path: Path, end: str, status: int) -> None:
    """The next token would be the thought's, and no answer."""
    template = "{{ messages[0]['content'] }}" + end
    models = {"m": changed(tmp_path / "m", "tokenizer_config.json", lambda content: content.update(chat_template=template))}
    with make_server(jackfield_decisions, Thoughts(), models=models) as server, server.client() as client:
        answer = client.post("/v1/systemone", json={"state": "x", "questions": {"a": NOUL}})
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "thinks before it answers" in check_error(answer, 400)
        assert answer.json()["error"]["param"] == "model"


def test_the_endpoint_without_its_plugin_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with make_server(DecisionsEndpoint()) as server, server.client() as client:
        check_error(client.post("/v1/systemone", json={"state": "x", "questions": {"a": NOUL}}), 500)
    assert "register the module jackfield_decisions" in caplog.text
