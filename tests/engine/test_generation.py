"""Greedy tokens of each family equal those of `generate()`, whatever else is going on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from jackfield.engine.generation.runner import padded_rows
from tests.checkpoints import CAUSAL, save_causal
from tests.engine.generating import Driver, greedy, prompt_of

PACKED = sorted(set(CAUSAL) - {"mamba"})
NEW = 40
PREEMPTED: set[bool] = set()


@pytest.fixture(scope="session", params=PACKED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp(request.param), request.param)


def test_the_same_tokens_as_generate(folder: Path) -> None:
    """Prompts of one token and of several windows, side by side; texts that go past the window and the switch."""
    driver = Driver(folder)
    assert driver.card.execution == "packed"
    assert driver.card.operations == ("embed", "token_embed", "hidden_states", "generate", "logits")
    prompts = [prompt_of(seed, length) for seed, length in enumerate((3, 17, 40, 1, 33, 80))]
    requests = [driver.submit(prompt, max_tokens=NEW) for prompt in prompts]
    driver.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert driver.tokens(request) == greedy(folder, prompt, NEW)
        assert driver.choices[request][0].finish_reason == "length"


def test_a_model_whose_layers_are_no_attention_is_run_plainly(tmp_path: Path) -> None:
    folder = save_causal(tmp_path, "mamba")
    driver = Driver(folder)
    assert driver.card.execution == "plain"
    prompts = [prompt_of(seed, length) for seed, length in enumerate((3, 17))]
    requests = [driver.submit(prompt, max_tokens=12) for prompt in prompts]
    driver.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert driver.tokens(request) == greedy(folder, prompt, 12)


def test_half_precision(tmp_path: Path) -> None:
    """No tokens to compare: what is near in float32 may be equal in bfloat16. It generates, and what it says is likely."""
    folder = save_causal(tmp_path, "llama", dtype=torch.bfloat16)
    driver = Driver(folder)
    request = driver.submit(prompt_of(0, 20), max_tokens=8, logprobs=0)
    driver.run()
    assert len(driver.tokens(request)) == 8


def test_the_same_tokens_whatever_else_goes_on(folder: Path, request: pytest.FixtureRequest) -> None:
    """Arrivals and departures at random, prompts that begin alike, pieces of several sizes, and too few blocks for all."""
    budget = (16, 48, 0)[PACKED.index(request.node.callspec.params["folder"]) % 3]
    random = Random(budget)
    driver = Driver(folder, token_budget=budget, kv_cache_mib=1 if "gemma3" not in str(folder) else 2)
    begins = [prompt_of(seed, 48) for seed in range(3)]
    waiting = [[*random.choice(begins), *prompt_of(100 + number, random.randint(1, 20))] for number in range(60)]
    right: dict[int, tuple[list[int], int]] = {}
    while waiting or driver.engine.has_work():
        for _ in range(min(len(waiting), random.choice((0, 8, 24)))):
            prompt, count = waiting.pop(), random.randint(20, 60)
            right[driver.submit(prompt, max_tokens=count, priority=random.choice((0, 0, 1)))] = (prompt, count)
        driver.step()
        if random.random() < 0.1 and len(right) > 20:
            gone = random.choice(list(right))
            driver.engine.abort(gone)
            del right[gone]
    for number, (prompt, count) in random.sample(sorted(right.items()), 12):
        assert driver.tokens(number) == greedy(folder, prompt, count)
    stats = driver.engine.stats()
    assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
    assert stats.num_cached_tokens > 0
    PREEMPTED.add(stats.num_preempted > 0)


def test_blocks_ran_out() -> None:
    """Else the test above has not tried what it says."""
    assert True in PREEMPTED


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_of_weights_is_let_go(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Where a tensor lies in it, the whole file stays in memory beside the copies that faster layers have made."""
    driver = Driver(save_causal(tmp_path / "mapped", kind, dtype=dtype))
    assert driver.card.execution == "packed"
    assert [line for line in Path("/proc/self/maps").read_text().splitlines() if "/mapped/" in line] == []


@pytest.mark.parametrize("count", [1, 8, 9, 16, 17, 100, 1000])
def test_padded_rows(count: int) -> None:
    padded = padded_rows(count)
    assert count <= padded <= max(count, 8) * 1.25
    assert padded_rows(padded) == padded


def test_there_are_few_numbers_of_rows() -> None:
    assert len({padded_rows(count) for count in range(1, 1025)}) == 36
