"""Models of each family by their templates, made by hand: what is told of a family here is how it writes calls and reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

import jackfield_chat
from jackfield import EngineRequest
from jackfield.testing import FakeEngine, RunningServer, make_server, tiny_model
from tests.checkpoints import save_causal

LENGTH, VOCAB = 4096, 320
PATH = "/v1/chat/completions"
_TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}[assistant]"
_SHOWN = "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
_HERMES = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
TEMPLATES = {
    # As Gemma's: user and assistant take turns, and nobody else speaks.
    "turns": "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]",
    "plain": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]",
    "hermes": _SHOWN + _TURNS.replace("CALL", _HERMES),
    "llama3_json": _SHOWN
    + _TURNS.replace("CALL", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}')
    + '{# <|start_header_id|> {"name": a name, "parameters": the arguments} #}',
    "mistral": _SHOWN + _TURNS.replace("CALL", "[TOOL_CALLS]{{ c.id }}{{ c.function | tojson }}"),
    "response_template": _SHOWN + _TURNS.replace("CALL", _HERMES),
    "think": _TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "thinking": _SHOWN + _TURNS.replace("CALL", _HERMES) + "<think>\n{# </think> #}",
}
# As Qwen's models write, in transformers' description of it (the keys are those of its documentation).
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "[assistant]",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}
SETTINGS = {"response_template": {"response_template": RESPONSE_TEMPLATE}}
INTEGER = {"type": "integer"}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def write_model(folder: Path, template: str, *, special: Sequence[str] = (), settings: dict[str, Any] | None = None) -> str:
    """A tiny model that generates, with another template, more special tokens, and more settings of its tokenizer."""
    shutil.copytree(tiny_model("llama"), folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    more = {"chat_template": template, "model_max_length": LENGTH}
    path.write_text(json.dumps(json.loads(path.read_text()) | more | (settings or {})))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def write_real(folder: Path, template: str, *, special: Sequence[str] = ()) -> str:
    """The same with weights for more special tokens, and positions for tools that are told in words."""
    write_model(folder, template, special=special)
    tokens: Any = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    made = save_causal(folder.with_name(f"{folder.name} weights"), "llama", vocab_size=VOCAB, max_position_embeddings=LENGTH, **tokens)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(made / name, folder / name)
    return str(folder)


class Families:
    """A server with a model of each family, whose fake engine says what a test tells it to."""

    def __init__(self, server: RunningServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.server = server
        self.engine = engine
        self.tokenizer = tokenizer
        self._client = server.client()  # to make one takes longer than an answer

    def will_say(self, *pieces: str) -> None:
        """From now on, in these deltas."""
        tokens = [tuple(self.tokenizer.encode(piece, add_special_tokens=False).ids) for piece in pieces]
        self.engine.says = lambda request: tokens

    def close(self) -> None:
        """Leave the server."""
        self._client.close()

    @property
    def prompt(self) -> str:
        """Of the last request."""
        return self.tokenizer.decode(ids(self.engine.requests[-1]), skip_special_tokens=True)

    def post(self, model: str, status: int = 200, **body: Any) -> Any:
        """The answer."""
        answer = self._client.post(PATH, json={"model": model, "messages": [{"role": "user", "content": "2+2?"}], **body})
        assert answer.status_code == status, answer.text
        return answer.json()

    def send(self, body: str) -> httpx.Response:
        """The answer to a body that is written by hand."""
        return self._client.post(PATH, content=body, headers={"content-type": "application/json"})

    def choice(self, model: str, **body: Any) -> dict[str, Any]:
        """The one choice."""
        [choice] = self.post(model, **body)["choices"]
        made: dict[str, Any] = choice
        return made

    def stream(self, model: str, **body: Any) -> dict[str, Any]:
        """The one choice, put together from its chunks as clients do it."""
        answer = self._client.post(PATH, json={"model": model, "messages": [{"role": "user", "content": "2+2?"}], "stream": True, **body})
        assert answer.status_code == 200, answer.text
        *lines, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return joined([json.loads(line.removeprefix("data: "))["choices"][0] for line in lines])


def ids(request: EngineRequest) -> list[int]:
    """Of the one prompt."""
    [raw] = request.token_ids
    return memoryview(raw).cast("i").tolist()


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice of its chunks. Each call begins once, with an id and a name, and its pieces follow."""
    message: dict[str, Any] = {"content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert piece["id"].startswith("call_")
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            else:
                assert piece["index"] == len(calls) - 1
                assert piece.keys() == {"index", "function"}
                assert piece["function"].keys() == {"arguments"}
            calls[-1]["arguments"] += piece["function"]["arguments"]
    assert len({call["id"] for call in calls}) == len(calls)
    reasons = [choice["finish_reason"] for choice in choices]
    assert not any(reasons[:-1])
    return {**message, "calls": [(call["name"], call["arguments"]) for call in calls], "finish_reason": reasons[-1]}


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole choice in the form of `joined`."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert message["reasoning"] == message.get("reasoning_content")
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "finish_reason": choice["finish_reason"],
    }


@contextmanager
def serve_families(folder: Path, templates: dict[str, str], *, special: Sequence[str] = ()) -> Iterator[Families]:
    """A model for each template."""
    models = {
        name: {"source": write_model(folder / name, template, special=special, settings=SETTINGS.get(name))}
        for name, template in templates.items()
    }
    engine = FakeEngine(max_length=LENGTH, vocab_size=VOCAB)
    tokenizer = Tokenizer.from_file(f"{next(iter(models.values()))['source']}/tokenizer.json")
    with make_server(jackfield_chat, engine=engine, models=models) as server:
        families = Families(server, engine, tokenizer)
        try:
            yield families
        finally:
            families.close()


def deltas(text: str, step: int = 1) -> Iterator[tuple[str, ...]]:
    """A text cut at every place once, or every so many, at all places at once, and not at all."""
    yield (text,)
    yield tuple(text)
    for place in range(1, len(text), step):
        yield text[:place], text[place:]
