"""What a request that generates may ask for, of a real model: by the engine's own door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jackfield.errors import BadRequest, NonFiniteOutput, StepFailed
from jackfield.outputs import PoolingOutputs
from tests.checkpoints import VOCAB, save_causal
from tests.engine.generating import Driver, greedy, prompt_of, whole_model

PROMPT = prompt_of(0, 20)
ATOL = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder)


@torch.inference_mode()
def logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of the token after each."""
    right: torch.Tensor = whole_model(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    return right


def one(driver: Driver, prompt: list[int], **params: Any) -> list[int]:
    request = driver.submit(prompt, **params)
    driver.run()
    return driver.tokens(request)


def test_a_seed_gives_the_same_text_alone_and_among_others(driver: Driver) -> None:
    alone = one(driver, PROMPT, max_tokens=20, temperature=1.0, seed=7)
    neighbours = [driver.submit(prompt_of(n, 3 * n), max_tokens=25, temperature=1.0) for n in range(1, 6)]
    driver.step()
    among = driver.submit(PROMPT, max_tokens=20, temperature=1.0, seed=7)
    driver.run()
    assert driver.tokens(among) == alone
    assert len({tuple(driver.tokens(request)) for request in neighbours}) == 5
    assert one(driver, PROMPT, max_tokens=20, temperature=1.0, seed=8) != alone


def test_without_a_seed_each_text_is_another(driver: Driver) -> None:
    requests = [driver.submit(PROMPT, max_tokens=20, temperature=1.0) for _ in range(5)]
    driver.run()
    assert len({tuple(driver.tokens(request)) for request in requests}) == 5


def test_choices_share_their_prompt(driver: Driver) -> None:
    before = driver.engine.stats()
    request = driver.submit(prompt_of(50, 64), prompt_of(51, 64), n=4, max_tokens=10, temperature=1.0, seed=1)
    driver.run()
    assert sorted(driver.choices[request]) == list(range(8))
    assert len({tuple(driver.tokens(request, index)) for index in range(8)}) == 8
    after = driver.engine.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == 8 * 64
    assert after.num_cached_tokens - before.num_cached_tokens == 6 * 48  # all but the last block, by all but the first choices
    alone = [driver.submit(prompt_of(50, 64), max_tokens=10, temperature=1.0, seed=1, n=2)]
    driver.run()
    assert [driver.tokens(alone[0], index) for index in (0, 1)] == [driver.tokens(request, index) for index in (0, 1)]


def test_a_prompt_is_known_again_unless_its_salt_is_another(driver: Driver, folder: Path) -> None:
    prompt = prompt_of(60, 70)
    right = greedy(folder, prompt, 8)
    for salt, known in (("", 0), ("", 64), ("a", 0), ("a", 64), ("b", 0)):
        request = driver.submit(prompt, max_tokens=8, cache_salt=salt)
        driver.run()
        assert driver.tokens(request) == right
        assert driver.choices[request][0].num_cached_tokens == known


def test_without_a_prefix_cache_nothing_is_known(folder: Path) -> None:
    driver = Driver(folder, prefix_cache=False)
    for _ in range(2):
        one(driver, prompt_of(60, 70), max_tokens=2)
    assert driver.engine.stats().num_cached_tokens == 0


def test_what_ends_a_text(driver: Driver, folder: Path) -> None:
    said = greedy(folder, PROMPT, 30)
    stop = said[5]
    first = said.index(stop)
    request = driver.submit(PROMPT, max_tokens=30, stop_token_ids=(stop,))
    later = driver.submit(PROMPT, max_tokens=30, stop_token_ids=(stop,), min_tokens=first + 2)
    driver.run()
    choice = driver.choices[request][0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (said[: first + 1], "stop", stop)
    assert len(driver.tokens(later)) >= first + 2
    assert driver.tokens(later)[:first] == said[:first]
    assert driver.tokens(later)[first] != stop


def test_the_models_own_end_tokens_and_those_of_all_its_files(tmp_path: Path) -> None:
    folder = save_causal(tmp_path, "llama")
    said = greedy(folder, PROMPT, 30)
    place = next(at for at, token in enumerate(said) if token not in said[:at] and at > 3)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [299, {said[place]}], "temperature": 0.5, "top_k": 7}}')
    driver = Driver(folder)
    assert driver.card.sampling == {"temperature": 0.5, "top_k": 7}
    request = driver.submit(PROMPT, max_tokens=30, ignore_eos=False)
    driver.run()
    choice = driver.choices[request][0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (said[: place + 1], "stop", None)


def test_no_token_at_all(driver: Driver, folder: Path) -> None:
    request = driver.submit(PROMPT, max_tokens=0, prompt_logprobs=1)
    driver.run()
    choice = driver.choices[request][0]
    assert (choice.token_ids, choice.finish_reason) == ([], "length")
    assert len(choice.prompt_logprobs) == len(PROMPT)


def test_no_max_tokens_means_the_rest_of_the_context(driver: Driver) -> None:
    assert len(one(driver, prompt_of(1, 100))) == 28
    assert len(one(driver, prompt_of(1, 100), max_tokens=50)) == 28  # the pipeline has refused it, or was told to let it be cut
    assert len(one(driver, prompt_of(1, 128))) == 0


@pytest.mark.parametrize("seed", [None, 3])
def test_logprobs_of_what_is_said(driver: Driver, folder: Path, seed: int | None) -> None:
    """By the model's own logits, whatever was done to them."""
    params: dict[str, Any] = {"temperature": 1.5, "seed": seed, "top_k": 5} if seed else {}
    request = driver.submit(PROMPT, max_tokens=10, logprobs=4, logprob_token_ids=(9,), logit_bias={11: 3.0}, **params)
    driver.run()
    said = driver.tokens(request)
    right = logprobs(folder, [*PROMPT, *said])[len(PROMPT) - 1 :]
    for token, told, row in zip(said, driver.choices[request][0].logprobs, right, strict=False):
        assert told.token_id == token
        assert told.logprob == pytest.approx(float(row[token]), abs=ATOL)
        assert [entry.logprob for entry in told.top[:4]] == pytest.approx(row.topk(4).values.tolist(), abs=ATOL)
        nine = next(entry for entry in told.top if entry.token_id == 9)
        assert nine.logprob == pytest.approx(float(row[9]), abs=ATOL)


@pytest.mark.parametrize("budget", [0, 16])
def test_logprobs_of_the_prompt(folder: Path, budget: int) -> None:
    """Read whole or in pieces; also of a prompt whose blocks are known already, and of one whose blocks were taken from it."""
    driver = Driver(folder, token_budget=budget)
    prompt = prompt_of(2, 90)
    one(driver, prompt, max_tokens=1)
    request = driver.submit(prompt, prompt[:40], n=2, max_tokens=2, prompt_logprobs=2)
    driver.run()
    for index, ids in ((0, prompt), (2, prompt[:40])):
        told = driver.choices[request][index].prompt_logprobs
        right = logprobs(folder, ids)
        assert told[0] is None
        for place, entry in enumerate(told[1:]):
            assert entry is not None
            assert entry.token_id == ids[place + 1]
            assert entry.logprob == pytest.approx(float(right[place, ids[place + 1]]), abs=ATOL)
            assert [one.token_id for one in entry.top] == right[place].topk(2).indices.tolist()
    assert driver.choices[request][1].prompt_logprobs == ()


def test_one_loaded_copy_generates_embeds_and_tells_logits(driver: Driver, folder: Path) -> None:
    prompts = [prompt_of(seed, length) for seed, length in enumerate((5, 30, 77))]
    texts = [driver.submit(prompt, max_tokens=20) for prompt in prompts]
    vectors = driver.pool(*prompts, outputs=("embed", "hidden_states"))
    logits = driver.pool(*prompts, outputs=("logits",), logit_ids=(7, 299))
    shares = driver.pool(*prompts, outputs=("logits",), logit_ids=(7, 299), use_activation=True)
    driver.run()
    for place, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert driver.tokens(text) == greedy(folder, prompt, 20)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            states = whole_model(folder).base_model(ids).last_hidden_state[0]
            right = whole_model(folder)(ids).logits[0, -1]
        np.testing.assert_allclose(driver.pooled[vectors]["hidden_states"][place], states, atol=ATOL)
        np.testing.assert_allclose(driver.pooled[vectors]["embed"][place], torch.nn.functional.normalize(states[-1], dim=0), atol=ATOL)
        np.testing.assert_allclose(driver.pooled[logits]["logits"][place], right[[7, 299]], atol=ATOL)
        np.testing.assert_allclose(driver.pooled[shares]["logits"][place], right[[7, 299]].softmax(-1), atol=ATOL)


def test_pooling_and_generation_take_turns(driver: Driver) -> None:
    """Neither waits until the other has nothing left."""
    texts = [driver.submit(prompt_of(seed, 30), max_tokens=60) for seed in range(3)]
    driver.step()
    vectors = driver.pool(prompt_of(9, 30), outputs=("embed",))
    driver.step()
    driver.step()
    assert isinstance(driver.pooled.get(vectors), PoolingOutputs)
    assert all(choice.finish_reason is None for text in texts for choice in driver.choices[text].values())
    driver.run()


def test_whoever_leaves_frees_his_blocks_at_once(driver: Driver) -> None:
    gone, stays = driver.submit(prompt_of(1, 60), n=2, temperature=1.0, max_tokens=60), driver.submit(prompt_of(2, 60), max_tokens=3)
    for _ in range(3):
        driver.step()
    used = driver.engine.stats().num_used_blocks
    driver.engine.end_choice(gone, 1)
    assert driver.engine.stats().num_used_blocks < used
    driver.engine.abort(gone)
    told = [len(choice.token_ids) for choice in driver.choices[gone].values()]
    driver.run()
    assert len(driver.tokens(stays)) == 3
    assert [len(choice.token_ids) for choice in driver.choices[gone].values()] == told
    assert driver.engine.stats().num_used_blocks == 0


def test_a_request_that_bars_every_token(driver: Driver) -> None:
    barred = driver.submit(PROMPT, allowed_token_ids=(7,), bad_words=((7,),), max_tokens=4)
    free = driver.submit(PROMPT, max_tokens=4)
    driver.run()
    assert type(driver.errors[barred]) is BadRequest
    assert len(driver.tokens(free)) == 4


CULPRIT = 4
UNKNOWN = VOCAB + 5


def test_one_requests_fault_is_its_own(folder: Path, tmp_path: Path) -> None:
    """A token that makes NaN, and one that breaks the whole step; the neighbours say what they would have said alone."""
    poisoned = save_causal(tmp_path, "qwen3")
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][CULPRIT, 0] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    driver = Driver(poisoned)
    prompts = [prompt_of(seed, 25) for seed in range(3)]
    sound = [driver.submit(prompt, max_tokens=40) for prompt in prompts]
    driver.step()
    nan = driver.submit([*prompt_of(9, 20), CULPRIT, *prompt_of(8, 20)], max_tokens=10)
    raises = driver.submit([*prompt_of(9, 20), UNKNOWN], max_tokens=10)
    driver.run()
    assert type(driver.errors[nan]) is NonFiniteOutput
    assert type(driver.errors[raises]) is StepFailed
    for prompt, request in zip(prompts, sound, strict=True):
        assert driver.tokens(request) == greedy(folder, prompt, 40)
    # The blocks of the one at fault are whoever needs them now, and what they held harms nobody.
    prompts = [prompt_of(seed, 100) for seed in range(40)]
    again = [driver.submit(prompt, max_tokens=5) for prompt in prompts]
    driver.run()
    for prompt, request in zip(prompts, again, strict=True):
        right = greedy(folder, prompt, 5)
        if CULPRIT not in right:  # which a text may hold by itself
            assert driver.tokens(request) == right
