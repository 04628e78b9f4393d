"""An engine that generates, driven step by step, and what is right."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jackfield.client import EngineRequest, ModelCard, ModelSpec
from jackfield.engine.core import Engine
from jackfield.errors import ServingError
from jackfield.grammar import checked_grammar
from jackfield.outputs import Choice, Delta, PoolingOutputs
from jackfield.params import Grammar, PoolingParams, SamplingParams
from jackfield.settings import EngineSettings
from tests.checkpoints import VOCAB

MODEL = "m"
# Every request's end that a driver waits for comes in far fewer steps.
MAX_STEPS = 5000


def prompt_of(seed: int, length: int) -> list[int]:
    """Token ids, none of them special."""
    ids: list[int] = np.random.default_rng(seed).integers(5, VOCAB, length).tolist()
    return ids


@lru_cache(maxsize=4)
def whole_model(folder: Path) -> Any:
    """By transformers alone, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What `generate()` says next."""
    ids = torch.tensor([prompt])
    out = whole_model(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class Driver:
    """An engine over one model, and what has come of its requests."""

    def __init__(self, folder: Path, *, quantization: Literal["", "int4"] = "", **settings: Any) -> None:
        self.engine = Engine(EngineSettings(**{"threads": 1, "lanes": 1, "kv_cache_mib": 4, **settings}))
        spec = ModelSpec(id=MODEL, path=str(folder), quantization=quantization)
        self.cards: dict[str, ModelCard] = self.engine.load([spec], lambda progress: None)
        self.choices: dict[int, dict[int, Choice]] = defaultdict(dict)
        self.errors: dict[int, ServingError] = {}
        self.pooled: dict[int, PoolingOutputs] = {}
        self._next = 0

    @property
    def card(self) -> ModelCard:
        """Of the model."""
        return self.cards[MODEL]

    def submit(self, *prompts: list[int], priority: int = 0, cache_salt: str = "", **params: Any) -> int:
        """Greedy and without an end token unless told otherwise; returns the request's id. A grammar without a source is given its own."""
        grammar: Grammar | None = params.get("grammar")
        if grammar is not None and not grammar.source:
            params["grammar"] = checked_grammar(grammar)
        given = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
        return self._send(prompts, given, priority=priority, cache_salt=cache_salt)

    def pool(self, *prompts: list[int], **params: Any) -> int:
        """A request of vectors or logits."""
        return self._send(prompts, PoolingParams(**params))

    def _send(self, prompts: tuple[list[int], ...], params: Any, **more: Any) -> int:
        self._next += 1
        raw = [np.array(prompt, np.int32).tobytes() for prompt in prompts]
        self.engine.submit(EngineRequest(id=self._next, model=MODEL, token_ids=raw, params=params, **more))
        return self._next

    def step(self) -> list[Any]:
        """One step; returns its events."""
        events = self.engine.step()
        for request_id, outcome in events:
            assert request_id not in self.errors, "an event after the last"
            assert request_id not in self.pooled, "an event after the last"
            if isinstance(outcome, Delta):
                choice = self.choices[request_id].setdefault(outcome.index, Choice(outcome.index))
                assert choice.finish_reason is None, "a delta after the last"
                choice.add(outcome)
            elif isinstance(outcome, ServingError):
                self.errors[request_id] = outcome
            else:
                self.pooled[request_id] = outcome
        return events

    def run(self) -> None:
        """Steps until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"not done after {MAX_STEPS} steps")

    def tokens(self, request_id: int, index: int = 0) -> list[int]:
        """Of a choice that has ended well."""
        assert request_id not in self.errors, self.errors[request_id]
        choice = self.choices[request_id][index]
        assert choice.finish_reason is not None
        return choice.token_ids
