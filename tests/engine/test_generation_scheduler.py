"""The scheduler of what generates, with a model that computes nothing: everybody ends, whatever arrives, leaves or finds no room."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jackfield.engine.generation.blocks import BlockPool
from jackfield.engine.generation.scheduler import Choice, GenerationScheduler, Work

SIZE = 4


class Bench:
    """Steps without a model: the next token of a choice is a function of all tokens before it, which the cache must have seen."""

    def __init__(self, num_blocks: int, *, share: bool = True, max_running: int = 256) -> None:
        self.pool = BlockPool(num_blocks, SIZE, share=share)
        self.scheduler = GenerationScheduler(self.pool, max_running=max_running)
        self.store: dict[tuple[int, int], tuple[int, ...]] = {}
        self.steps = 0
        self.chunks: list[list[Work]] = []

    def add(self, prompt: list[int], new: int, **more: object) -> Choice:
        choice = Choice(
            request_id=more.pop("request_id", len(self.chunks) + self.steps),  # type: ignore[arg-type]
            index=more.pop("index", 0),  # type: ignore[arg-type]
            token_ids=array("i", prompt),
            num_prompt=len(prompt),
            max_length=len(prompt) + new,
            **more,  # type: ignore[arg-type]
        )
        self.scheduler.add(choice)
        return choice

    def step(self, chunk: int = 8) -> list[Work]:
        works = self.scheduler.plan(chunk)
        assert sum(work.num_tokens for work in works if work.num_tokens > 1) <= chunk
        assert len({id(work.choice) for work in works}) == len(works)
        for work in works:
            ids, blocks = work.choice.token_ids, work.choice.held.blocks
            assert work.start == work.choice.num_computed
            for place in range(work.start):
                assert self.store[blocks[place // SIZE], place % SIZE] == tuple(ids[: place + 1])
            for place in range(work.start, work.start + work.num_tokens):
                self.store[blocks[place // SIZE], place % SIZE] = tuple(ids[: place + 1])
        for work in works:
            choice = work.choice
            self.scheduler.computed(work)
            assert work.samples == (choice.num_computed == len(choice.token_ids))
            if work.samples:
                choice.token_ids.append(sum(choice.token_ids) % 2)
                if len(choice.token_ids) >= choice.max_length:
                    self.scheduler.finish(choice)
        self.steps += 1
        return works

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not len(self.scheduler):
                break
            assert self.step(), "nothing runs, and somebody waits"
        assert not len(self.scheduler)
        assert self.pool.num_free == self.pool.num_blocks


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12
    ),
    st.integers(8, 20),
    st.integers(1, 16),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_everybody_ends_with_the_right_text(requests, num_blocks, chunk, share, random) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(num_blocks, share=share, max_running=random.choice([1, 3, 256]))
    choices: list[Choice] = []
    left: list[Choice] = []
    for number, (prompt, new, priority) in enumerate(requests):
        choices.append(bench.add(prompt, new, request_id=number, priority=priority, arrival=float(bench.steps)))
        for _ in range(random.randint(0, 3)):
            bench.step(chunk)
        if random.random() < 0.2:
            gone = random.choice(choices)
            bench.scheduler.finish(gone)
            left.append(gone)
    bench.run()
    for choice, (prompt, new, _) in zip(choices, requests, strict=True):
        if choice not in left:
            text = list(prompt)
            for _ in range(new):
                text.append(sum(text) % 2)
            assert list(choice.token_ids) == text


def test_decoding_goes_before_prompts_and_prompts_are_cut() -> None:
    bench = Bench(64)
    first = bench.add([0] * 5, 20)
    bench.step(8)
    second = bench.add([1] * 30, 2)
    sizes = []
    while second.num_computed < 30:
        works = bench.step(8)
        assert works[0].choice is first
        assert works[0].num_tokens == 1
        sizes.append(works[1].num_tokens)
    assert sizes == [8, 8, 8, 6]


def test_priority_goes_first_and_takes_blocks_from_the_worst() -> None:
    bench = Bench(6, share=False)
    low = bench.add([0] * 8, 8, request_id=1, priority=5)
    bench.step()
    high = bench.add([1] * 8, 8, request_id=2, priority=0)
    while not high.done:
        bench.step()
    assert not low.done
    assert bench.scheduler.num_preempted > 0
    bench.run()


def test_choices_of_one_prompt_compute_it_once() -> None:
    bench = Bench(64)
    prompt = list(range(17))
    leader = bench.add(prompt, 4, request_id=1, index=0)
    followers = [bench.add(prompt, 4, request_id=1, index=index, leader=leader) for index in (1, 2)]
    tokens = sum(work.num_tokens for work in bench.step(100))
    assert tokens == 17
    bench.step(100)
    assert [choice.num_cached for choice in (leader, *followers)] == [0, 16, 16]
    bench.run()


def test_a_choice_that_no_cache_has_room_for() -> None:
    with pytest.raises(ValueError, match="41 tokens"):
        Bench(10).add([0] * 30, 11)
