"""The accounting of the cache's blocks: no block lost or shared wrongly, whatever happens in whatever order."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jackfield.engine.generation.blocks import BlockPool, Held

SIZE = 4
NUM = 12


def ids(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


class Cache(RuleBasedStateMachine):
    """The pool beside a real store: what each block holds is written there, and read back on a hit."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM, SIZE)
        # What stands in each place of each block: the token, and all that came before it, salt included.
        self.store: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        self.live: dict[int, tuple[Held, list[int]]] = {}
        self.next = 0

    @rule(target=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), salt=st.sampled_from([b"", b"a"]))
    def start(self, tokens: list[int], salt: bytes) -> object:
        held = Held(salt)
        cached = self.pool.match(held, ids(tokens))
        assert cached < len(tokens)
        assert cached % SIZE == 0
        for place in range(cached):
            assert self.store[held.blocks[place // SIZE], place % SIZE] == (salt, tuple(tokens[: place + 1]))
        if not self.pool.grow(held, len(tokens)):
            assert self.pool.blocks_for(len(tokens)) - len(held.blocks) > self.pool.num_free
            self.pool.release(held)
            return multiple()
        self.next += 1
        self.live[self.next] = (held, tokens)
        self.compute(self.next, cached)
        return self.next

    def compute(self, number: int, start: int) -> None:
        held, tokens = self.live[number]
        for place in range(start, len(tokens)):
            self.store[held.blocks[place // SIZE], place % SIZE] = (held.salt, tuple(tokens[: place + 1]))
        self.pool.publish(held, ids(tokens), len(tokens))

    @rule(number=running, token=st.integers(0, 1))
    def one_more_token(self, number: int, token: int) -> None:
        held, tokens = self.live[number]
        if self.pool.grow(held, len(tokens) + 1):
            tokens.append(token)
            self.compute(number, len(tokens) - 1)

    @rule(number=consumes(running))
    def finish(self, number: int) -> None:
        self.pool.release(self.live.pop(number)[0])

    @invariant()
    def what_a_sequence_holds_is_its_own(self) -> None:
        for held, tokens in self.live.values():
            assert len(held.blocks) == len(set(held.blocks)) == self.pool.blocks_for(len(tokens))
            for place in range(len(tokens)):
                assert self.store[held.blocks[place // SIZE], place % SIZE] == (held.salt, tuple(tokens[: place + 1]))

    @invariant()
    def no_block_is_lost(self) -> None:
        held = {block for one, _ in self.live.values() for block in one.blocks}
        assert self.pool.num_free == NUM - len(held)


Cache.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCache = Cache.TestCase


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    pool = BlockPool(4, SIZE)
    old, new = [1] * 9, [2] * 5
    for tokens in (old, new):
        held = Held()
        assert pool.grow(held, len(tokens))
        pool.publish(held, ids(tokens), len(tokens))
        pool.release(held)
    held = Held()
    assert pool.grow(held, 2 * SIZE)  # one was empty; the other is the second block of the old one
    first, second = Held(), Held()
    assert pool.match(first, ids(old)) == SIZE
    assert pool.match(second, ids(new)) == SIZE
    for one in (held, first, second):
        pool.release(one)
    assert pool.num_free == 4


def test_a_pool_that_shares_nothing() -> None:
    pool = BlockPool(4, SIZE, share=False)
    held = Held()
    assert pool.grow(held, 8)
    pool.publish(held, ids([1] * 8), 8)
    assert pool.match(Held(), ids([1] * 8)) == 0
    pool.release(held)
    assert pool.num_free == 4


def test_a_pool_without_blocks() -> None:
    with pytest.raises(ValueError, match="0 of 16"):
        BlockPool(0, 16)
