"""The sampler against transformers' own warpers, and against the distribution that it should draw from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jackfield.engine.generation.rows import Row, Sampled, uniform
from jackfield.engine.generation.sampler import NUM_CANDIDATES, sample
from jackfield.params import SamplingParams

NUM = 4000
VOCAB = 12


def logits_of(seed: int, size: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def row(seed: int = 0, *, prompt: tuple[int, ...] = (), text: tuple[int, ...] = (), ends: tuple[int, ...] = (), **params: Any) -> Row:
    made = Row(params=SamplingParams(**params), seed=seed, prompt_ids=list(prompt), end_ids=frozenset(ends))
    for token in text:
        made.add(token)
    return made


def one(logits: torch.Tensor, given: Row) -> Sampled:
    return sample(logits[None].clone(), [given])[0]


def drawn(logits: torch.Tensor, **params: Any) -> np.ndarray[Any, Any]:
    """How often each token comes, over many seeds."""
    rows = [row(seed, **params) for seed in range(NUM)]
    tokens = [result.token_id for result in sample(logits.expand(NUM, -1).clone(), rows)]
    return np.bincount(np.asarray(tokens), minlength=len(logits))


def chi_square(counts: np.ndarray[Any, Any], right: torch.Tensor) -> float:
    expected = right.double().numpy() * counts.sum()
    assert not counts[expected == 0].any(), "a token that was left out"
    inside = expected > 0
    return float(((counts[inside] - expected[inside]) ** 2 / expected[inside]).sum() / max(inside.sum() - 1, 1))


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 4}, [TopKLogitsWarper(4)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"temperature": 1.5, "top_k": 6, "top_p": 0.7}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(6), TopPLogitsWarper(0.7)]),
        ({"min_p": 0.05, "top_k": 5, "top_p": 0.9}, [MinPLogitsWarper(0.05), TopKLogitsWarper(5), TopPLogitsWarper(0.9)]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_come_as_often_as_they_should(params: dict[str, Any], warpers: list[Any], seed: int) -> None:
    logits = logits_of(seed)
    right = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    assert chi_square(drawn(logits, **params), right) < 2.5


def test_bounds_that_keep_more_than_the_candidates() -> None:
    logits = logits_of(3, size=4 * NUM_CANDIDATES, scale=0.1)
    kept = TopPLogitsWarper(0.9)(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].isfinite()
    assert int(kept.sum()) > NUM_CANDIDATES
    counts = drawn(logits, top_p=0.9)
    assert not counts[~kept.numpy()].any()
    assert counts[kept.numpy()].astype(bool).mean() > 0.9


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-30, 5e-324])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    for seed in range(20):
        assert one(logits_of(seed), row(seed, temperature=temperature)).token_id == int(logits_of(seed).argmax())


def test_a_row_is_the_same_alone_and_among_others() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 3, "temperature": 2.0},
        {"frequency_penalty": 1.0, "temperature": 0.0},
        {"logprobs": 3},
    ]
    rows = [row(seed, text=(1, 2, 1), **kind) for seed, kind in enumerate(kinds * 4)]
    logits = torch.stack([logits_of(seed) for seed in range(len(rows))])
    together = sample(logits.clone(), rows)
    assert [result.token_id for result in together] == [one(logits[i], rows[i]).token_id for i in range(len(rows))]


def test_seeds_and_positions_make_the_noise() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert len(set(numbers.tolist())) == len(numbers)
    assert uniform(2**64 - 1, 5) == uniform(-1, 5)


# What changes logits


def test_repetition_penalty_is_transformers() -> None:
    logits = logits_of(5)
    ids = torch.tensor([[1, 2, 3, 7, 7]])
    right = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[None].clone())[0]
    assert one(logits, row(temperature=0, prompt=(1, 2), text=(3, 7, 7), repetition_penalty=1.7)).token_id == int(right.argmax())
    counts = drawn(logits, prompt=(1, 2), text=(3, 7, 7), repetition_penalty=1.7)
    assert chi_square(counts, right.softmax(-1)) < 2.5


def test_penalties_of_what_was_written() -> None:
    logits = torch.zeros(4)
    right = torch.tensor([0.0, -0.5 - 0.25, -1.0 - 0.25, 0.0]).softmax(-1)
    counts = drawn(logits, prompt=(3,), text=(1, 2, 2), frequency_penalty=0.5, presence_penalty=0.25)
    assert chi_square(counts, right) < 2.5


def test_allowed_biased_and_forbidden_tokens() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0])
    assert one(logits, row(temperature=0, allowed_token_ids=(2, 3))).token_id == 2
    assert one(logits, row(temperature=0, logit_bias={3: 100.0})).token_id == 3
    assert one(logits, row(temperature=0, logit_bias={0: -100.0})).token_id == 1
    assert one(logits, row(temperature=0, bad_words=((0,),))).token_id == 1
    assert one(logits, row(temperature=0, bad_words=((1, 0),), text=(1,))).token_id == 1
    assert one(logits, row(temperature=0, bad_words=((1, 0),), text=(2,))).token_id == 0


def test_no_end_before_the_least_length() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0])
    assert one(logits, row(temperature=0, min_tokens=2, ends=(0, 1), text=(2,))).token_id == 2
    assert one(logits, row(temperature=0, min_tokens=2, ends=(0, 1), text=(2, 2))).token_id == 0


# What is told


def test_logprobs_are_those_of_the_model_whatever_changes_the_choice() -> None:
    logits = logits_of(9)
    right = logits.log_softmax(-1)
    result = one(logits, row(temperature=0, logprobs=3, logit_bias={4: 100.0}, logprob_token_ids=(0,)))
    assert result.token_id == 4
    told = result.told
    assert told is not None
    assert told.logprob == pytest.approx(float(right[4]), abs=1e-6)
    assert told.rank == int((right > right[4]).sum()) + 1
    assert [entry.token_id for entry in told.top][:3] == right.topk(3).indices.tolist()
    assert [entry.rank for entry in told.top][:3] == [1, 2, 3]
    assert {entry.token_id: entry.logprob for entry in told.top}[0] == pytest.approx(float(right[0]), abs=1e-6)
    assert one(logits, row(temperature=0)).told is None
    only = one(logits, row(temperature=0, logprobs=0)).told
    assert only is not None
    assert only.top == ()
    assert only.logprob == pytest.approx(float(right.max()), abs=1e-6)


def test_what_is_below_every_number_is_told_as_one() -> None:
    logits = torch.tensor([0.0, -math.inf])
    told = one(logits, row(temperature=0, logprobs=2)).told
    assert told is not None
    assert [entry.logprob for entry in told.top] == [0.0, -9999.0]


def test_a_row_that_may_have_no_token() -> None:
    barred, free = sample(torch.stack([logits_of(0), logits_of(1)]), [row(allowed_token_ids=(2,), bad_words=((2,),)), row(temperature=0)])
    assert barred == Sampled(None, is_barred=True)
    assert free.token_id == int(logits_of(1).argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told_and_the_others_go_on(bad: float) -> None:
    logits = torch.stack([logits_of(0), logits_of(1)])
    logits[0, 3] = bad
    broken, whole = sample(logits.clone(), [row(), row(temperature=0)])
    assert broken.token_id is None
    assert whole.token_id == int(logits_of(1).argmax())
