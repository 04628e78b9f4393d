"""One request's fault is its own: whoever shared a step with it gets the vectors it would have had alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from jackfield.client import EngineRequest, ModelSpec
from jackfield.engine.core import Engine
from jackfield.errors import EngineUnavailable, NonFiniteOutput, ServingError, StepFailed
from jackfield.outputs import Delta, PoolingOutputs
from jackfield.params import PoolingParams
from jackfield.settings import EngineSettings
from jackfield.testing import make_server
from jackfield_embed import EmbedEndpoint
from tests.checkpoints import VOCAB, save_sentence_transformer

# `!`, the first token after the special ones; nothing but the prompts at fault holds it, the check at load included.
CULPRIT = 4
UNKNOWN = VOCAB + 5
ATOL = 1e-5
Outcome = PoolingOutputs | ServingError


@pytest.fixture(scope="module", params=["bert", "mpnet"], ids=["packed", "buckets"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: str = request.param
    return save_sentence_transformer(tmp_path_factory.mktemp("sound") / kind, kind, max_seq_length=None)


@pytest.fixture(scope="module")
def poisoned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a NaN in the embedding of one token."""
    copy = save_sentence_transformer(tmp_path_factory.mktemp("poisoned") / folder.name, folder.name, max_seq_length=None)
    weights = load_file(copy / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][CULPRIT, 0] = torch.nan
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def load(folder: Path) -> Engine:
    engine = Engine(EngineSettings(threads=1, token_budget=8192))
    engine.load([ModelSpec(id="m", path=str(folder))], lambda progress: None)
    return engine


@pytest.fixture(scope="module")
def sound(folder: Path) -> Engine:
    """What each prompt is compared with: an engine that meets no fault, and gets one prompt at a time."""
    return load(folder)


def ids(seed: int, length: int, *, at: int = -1, token: int = CULPRIT) -> list[int]:
    """A prompt; `at` is the place of the token at fault, if any."""
    drawn: list[int] = np.random.default_rng(seed).integers(CULPRIT + 1, VOCAB, length).tolist()
    if at >= 0:
        drawn[at] = token
    return drawn


def run(engine: Engine, *requests: list[list[int]]) -> list[Outcome]:
    """The one event of each request, in their order; all of them share one step."""
    before = engine.stats().num_steps
    for number, prompts in enumerate(requests):
        packed = [np.array(prompt, np.int32).tobytes() for prompt in prompts]
        engine.submit(EngineRequest(id=number, model="m", token_ids=packed, params=PoolingParams(outputs=("embed", "hidden_states"))))
    events = engine.step()
    assert engine.stats().num_steps == before + 1
    assert not engine.has_work()
    assert sorted(number for number, _ in events) == list(range(len(requests)))
    return [outcome for _, outcome in sorted(events, key=lambda event: event[0]) if not isinstance(outcome, Delta)]


def check_right(outcome: Outcome, sound: Engine, prompts: list[list[int]]) -> None:
    assert isinstance(outcome, PoolingOutputs), outcome
    for position, prompt in enumerate(prompts):
        (alone,) = run(sound, [prompt])
        assert isinstance(alone, PoolingOutputs), alone
        for name in ("embed", "hidden_states"):
            np.testing.assert_allclose(outcome.values[name][position], alone.values[name][0], rtol=0, atol=ATOL)


@contextmanager
def before_each_module(hook: Callable[[torch.nn.Module, tuple[Any, ...]], None]) -> Iterator[None]:
    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def embeds(module: torch.nn.Module) -> bool:
    """Whether it looks up the tokens: the one module that is given their ids."""
    return isinstance(module, torch.nn.Embedding) and module.num_embeddings == VOCAB


# Lengths that fill shared blocks, whole blocks, and equal ones.
SOUND = [[ids(1, 10)], [ids(2, 70), ids(3, 10)], [ids(4, 40)], [ids(5, 10)]]


def test_nan_stays_with_the_prompt_that_has_it(sound: Engine, poisoned: Path) -> None:
    bad = [ids(6, 10, at=3)]
    *others, outcome, last = run(load(poisoned), *SOUND[:3], bad, SOUND[3])
    assert type(outcome) is NonFiniteOutput
    for prompts, right in zip(SOUND, [*others, last], strict=True):
        check_right(right, sound, prompts)


def test_a_step_that_raises_is_run_again_one_by_one(folder: Path, sound: Engine) -> None:
    """A token id beyond the vocabulary, which the pipeline would have refused, breaks the whole batch."""
    engine = load(folder)
    bad = [ids(7, 12), ids(8, 10, at=9, token=UNKNOWN), ids(9, 64)]
    first, outcome, *others = run(engine, SOUND[0], bad, *SOUND[1:])
    assert type(outcome) is StepFailed
    assert "IndexError" in outcome.message
    for prompts, right in zip(SOUND, [first, *others], strict=True):
        check_right(right, sound, prompts)
    (again,) = run(engine, SOUND[1])
    check_right(again, sound, SOUND[1])


def test_every_culprit_fails_by_itself(poisoned: Path) -> None:
    """Of two kinds, in one step: each is told its own fault."""
    nan, raises, good = run(load(poisoned), [ids(1, 10, at=0)], [ids(2, 10, at=0, token=UNKNOWN)], SOUND[0])
    assert type(nan) is NonFiniteOutput
    assert type(raises) is StepFailed
    assert isinstance(good, PoolingOutputs)


@pytest.mark.parametrize("limit", [64, 48], ids=["alone it fits", "alone it does not fit"])
def test_a_batch_that_needs_too_much_memory(folder: Path, sound: Engine, limit: int) -> None:
    """The large ones have memory for one of 64 tokens at a time, or for less."""
    engine = load(folder)

    def refuse(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if embeds(module) and arguments[0].numel() > limit:
            raise torch.OutOfMemoryError("as torch says it")

    large, small = [ids(1, 64), ids(2, 64)], [ids(3, 10), ids(4, 10)]
    with before_each_module(refuse):
        first, second, third = run(engine, large, small, [ids(5, 64)])
    check_right(second, sound, small)
    if limit == 64:
        check_right(first, sound, large)
        check_right(third, sound, [ids(5, 64)])
    else:
        assert type(first) is type(third) is EngineUnavailable
        assert "64 tokens" in first.message


def raise_at_culprit(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    if embeds(module) and bool((arguments[0] == CULPRIT).any()):
        raise RuntimeError("the inside story")


@pytest.mark.parametrize(("fault", "words"), [("nan", "non-finite"), ("raises", "The model failed on this input (RuntimeError)")])
def test_over_http_the_culprits_alone_are_told(folder: Path, poisoned: Path, fault: str, words: str) -> None:
    source = poisoned if fault == "nan" else folder
    texts = [f"sound {number}" + " more" * (number % 7) for number in range(12)]

    with make_server(EmbedEndpoint(), models={"m": {"source": str(source)}}, real=True) as server, server.client() as client:

        def ask(text: str) -> httpx.Response:
            return client.post("/v1/embeddings", json={"input": text})

        right = {text: ask(text).json()["data"][0]["embedding"] for text in texts}
        batch = [text for pair in zip(texts, [f"{text}!" for text in texts], strict=True) for text in pair]
        hook = raise_at_culprit if fault == "raises" else lambda module, arguments: None
        with before_each_module(hook), ThreadPoolExecutor(len(batch)) as pool:
            answers = dict(zip(batch, pool.map(ask, batch), strict=True))
        for text, answer in answers.items():
            if text.endswith("!"):
                assert answer.status_code == 500
                assert words in answer.json()["error"]["message"]
                assert "inside" not in answer.text
            else:
                np.testing.assert_allclose(answer.json()["data"][0]["embedding"], right[text], rtol=0, atol=ATOL)
