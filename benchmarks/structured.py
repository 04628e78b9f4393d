"""What structured output costs, and what it saves: SmolLM2-135M in the real engine, without sockets and messages, medians of rounds.

- A step of 16 rows with a grammar, beside one of the same 16 rows without. Where a text is free ("text": inside of a long string, where no
  token is forced), and over a whole object ("object"); there both tell log-probabilities, which switches forced tokens off.
- The first token of a request with a schema of 2 KB that nobody has sent before, beside the same request without: the check that the HTTP
  process makes, compiling, and the first mask are in it.
- Steps a token of calls of functions, one at a time: what must follow is computed together with what comes before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any, Literal

import numpy as np
from transformers import AutoTokenizer

from benchmarks.chat import SMOLLM2
from benchmarks.results import machine, write
from benchmarks.workload import chat_messages
from jackfield.client import EngineRequest, ModelSpec
from jackfield.engine.conversion import converted
from jackfield.engine.core import Engine
from jackfield.engine.cpu import usable_cpus
from jackfield.errors import ServingError
from jackfield.grammar import checked_grammar, json_grammar
from jackfield.outputs import Delta
from jackfield.params import Grammar, SamplingParams
from jackfield.settings import EngineSettings
from jackfield.sources import resolve_source

__all__ = ["main"]

ROWS = 16
# A schema that a text fills for longer than it is measured.
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 2000}},
    "required": ["text"],
    "additionalProperties": False,
}
OBJECT = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 60},
        "kind": {"enum": ["statement", "expression", "module", "type"]},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1000}, "minItems": 8, "maxItems": 8},
        "nested": {"type": "object", "properties": {"why": {"type": "string", "minLength": 400}}, "required": ["why"]},
    },
    "required": ["title", "kind", "scores", "nested"],
    "additionalProperties": False,
}
CALLS = {
    "get_weather": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "send_message": {
        "recipient": {"type": "string", "maxLength": 20},
        "body": {"type": "string", "maxLength": 60},
        "urgent": {"type": "boolean"},
    },
    "book_table": {
        "restaurant_name": {"type": "string", "maxLength": 20},
        "date": {"type": "string", "format": "date"},
        "number_of_people": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "convert_currency": {
        "amount": {"type": "number", "minimum": 0, "maximum": 100000},
        "from_currency": {"enum": ["EUR", "USD", "GBP"]},
        "to_currency": {"enum": ["EUR", "USD", "GBP"]},
    },
}


def call_of(name: str) -> dict[str, Any]:
    """The schema of a call, as tools ask for it."""
    arguments = {"type": "object", "properties": CALLS[name], "required": list(CALLS[name]), "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def schema_of_2_kb(seed: int) -> dict[str, Any]:
    """An object of strings, numbers, choices and lists under names that no other has."""
    chance = random.Random(seed)
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < 1600:
        name = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz_", k=12))
        least = chance.randrange(100)
        properties[name] = chance.choice(
            [
                {"type": "string", "maxLength": least + 5},
                {"type": "integer", "minimum": least, "maximum": least + 1000},
                {"enum": [f"{name[:3]}_{number}" for number in range(5)]},
                {"type": "array", "items": {"type": "number"}, "maxItems": 4},
                {"type": "string", "pattern": f"^[a-z]{{2,{least % 9 + 3}}}-[0-9]+$"},
                {"type": "object", "properties": {"id": {"type": "integer"}, "tag": {"type": "string"}}, "required": ["id"]},
            ]
        )
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


class Bench:
    """An engine over one model, and prompts that its cache knows after the first time."""

    def __init__(self, folder: str, dtype: Literal["float32", "bfloat16"]) -> None:
        self.engine = Engine(EngineSettings(lanes=1))
        self.engine.load([ModelSpec(id="m", path=folder, dtype=dtype)], lambda progress: None)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in chat_messages()[:ROWS]]
        self.prompts: list[list[int]] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.number = 0

    def submit(self, prompt: int, grammar: Grammar | None, max_tokens: int, logprobs: int | None = None) -> None:
        """Greedy; without a grammar, to the end of max_tokens."""
        grammar = None if grammar is None else checked_grammar(grammar)  # as the HTTP process does
        self.number += 1
        raw = np.array(self.prompts[prompt], np.int32).tobytes()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=grammar is None, grammar=grammar, logprobs=logprobs)
        self.engine.submit(EngineRequest(id=self.number, model="m", token_ids=[raw], params=params))

    def step(self) -> list[Delta]:
        """One step, and what it has made."""
        deltas = []
        for _, outcome in self.engine.step():
            if isinstance(outcome, ServingError):
                raise outcome
            assert isinstance(outcome, Delta)
            deltas.append(outcome)
        return deltas

    def finish(self) -> None:
        """Whatever is left to do."""
        while self.engine.has_work():
            self.step()

    def step_ms(self, grammar: Grammar | None, steps: int, *, logprobs: int | None = None) -> float:
        """The median step of all rows, once each has its first token. A step makes one token a row."""
        for prompt in range(ROWS):
            self.submit(prompt, grammar, 10_000, logprobs)
        while len(self.step()) < ROWS:
            pass
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            deltas = self.step()
            times.append((time.perf_counter() - started) * 1e3)
            assert [len(delta.token_ids) for delta in deltas] == [1] * ROWS, "a token was forced, or a text has ended"
        for request in range(self.number - ROWS + 1, self.number + 1):
            self.engine.abort(request)
        self.finish()
        return statistics.median(times)

    def first_token_ms(self, schema: dict[str, Any] | None) -> float:
        """From a request to its first piece, of a prompt that is known."""
        started = time.perf_counter()
        self.submit(0, None if schema is None else json_grammar(schema, param="schema"), 2)
        while not self.step():
            pass
        taken = (time.perf_counter() - started) * 1e3
        self.finish()
        return taken

    def call(self, name: str, prompt: int) -> dict[str, int]:
        """Steps and tokens of one call, its prompt's step included."""
        before = self.engine.stats()
        self.submit(prompt, json_grammar(call_of(name), param="schema"), 400)
        self.finish()
        after = self.engine.stats()
        return {"steps": after.num_steps - before.num_steps, "tokens": after.num_generated_tokens - before.num_generated_tokens}


def round_of(bench: Bench, number: int, slices: int, steps: int) -> dict[str, Any]:
    """One round: with and without in turn."""
    figures: dict[str, Any] = {name: [] for name in ("text", "no_text", "object", "no_object", "new_schema", "no_schema", "schema_bytes")}
    text, whole = json_grammar(TEXT, param="schema"), json_grammar(OBJECT, param="schema")
    for place in range(slices):
        figures["no_text"].append(bench.step_ms(None, steps))
        figures["text"].append(bench.step_ms(text, steps))
        figures["no_object"].append(bench.step_ms(None, steps, logprobs=0))
        figures["object"].append(bench.step_ms(whole, steps, logprobs=0))
        for one in range(5):
            schema = schema_of_2_kb(1000 * number + 10 * place + one)
            figures["schema_bytes"].append(len(json.dumps(schema)))
            figures["no_schema"].append(bench.first_token_ms(None))
            figures["new_schema"].append(bench.first_token_ms(schema))
    figures["calls"] = [bench.call(name, prompt) for prompt, name in enumerate(CALLS)]
    return figures


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all slices of all rounds."""

    def all_of(name: str) -> list[float]:
        return [value for figures in rounds for value in figures[name]]

    found: dict[str, float] = {}
    for name in ("text", "object"):
        masked, free = all_of(name), all_of(f"no_{name}")
        found[f"step of {ROWS} rows without, ms ({name})"] = statistics.median(free)
        found[f"step of {ROWS} rows with a grammar, ms ({name})"] = statistics.median(masked)
        found[f"with / without ({name})"] = statistics.median(a / b for a, b in zip(masked, free, strict=True))
    new, none = all_of("new_schema"), all_of("no_schema")
    found["first token without, ms"] = statistics.median(none)
    found["first token with a new schema, ms"] = statistics.median(new)
    found["a new schema adds, ms"] = statistics.median(a - b for a, b in zip(new, none, strict=True))
    found["bytes of a schema"] = statistics.median(all_of("schema_bytes"))
    calls = [call for figures in rounds for call in figures["calls"]]
    found["steps a token of calls"] = sum(call["steps"] for call in calls) / sum(call["tokens"] for call in calls)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Run and write benchmarks/results/structured-DTYPE.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of a slice")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    file = resolve_source("smollm2", SMOLLM2)
    bench = Bench(converted("smollm2", file, dtype=arguments.dtype, device="cpu", progress=lambda step: None), arguments.dtype)
    bench.step_ms(json_grammar(OBJECT, param="schema"), 5, logprobs=0)  # the prompts are known, and the kernels are there
    bench.step_ms(None, 5)
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(round_of(bench, number, arguments.slices, arguments.steps))
        print(f"round {number + 1}: {json.dumps(summary(rounds[-1:]))}", flush=True)
    for name, value in summary(rounds).items():
        print(f"{name:50} {value}")
    print(json.dumps(machine()))
    if not arguments.dry:
        what = f"SmolLM2-135M-Instruct, {arguments.dtype}: steps and first tokens with a grammar, beside the same without"
        write(f"structured-{arguments.dtype}", {"what": what, **machine(), "summary": summary(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
