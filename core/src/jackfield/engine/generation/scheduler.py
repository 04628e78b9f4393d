"""Which choices run in the next step of a model that generates, and with how many tokens. Pure: no model, no clock, no tensor.

Every choice that has its prompt behind it gets its one token first. What is left of the step goes to those whose grammar has let them go on
by several, then to prompts, in chunks, in the order of priority, then age. A choice that finds no block takes them from the worst one that
runs (lowest priority, then youngest), which starts anew later: its tokens are kept, and most of its blocks are often still known. One that
waits takes them from worse priorities alone.
"""

from __future__ import annotations

from array import array
from bisect import insort
from dataclasses import dataclass, field

from jackfield.engine.generation.blocks import BlockPool, Held

__all__ = ["Choice", "GenerationScheduler", "Work"]


@dataclass(eq=False, kw_only=True)
class Choice:
    """A prompt, and the text that grows after it. max_length: of both together.

    leader: another choice of the same prompt, which goes first, so that its blocks can be shared.
    """

    request_id: int
    index: int
    token_ids: array[int]
    num_prompt: int
    max_length: int
    priority: int = 0
    arrival: float = 0.0
    salt: bytes = b""
    leader: Choice | None = None
    held: Held = field(init=False)
    # Leading tokens whose keys and values are in the cache.
    num_computed: int = 0
    # Of the prompt's tokens those that were found in the cache, the first time.
    num_cached: int | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.held = Held(self.salt)

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_full(self) -> bool:
        """Whether no token may be added any more."""
        return len(self.token_ids) >= self.max_length

    @property
    def order(self) -> tuple[int, float, int, int]:
        """What comes first is smaller."""
        return (self.priority, self.arrival, self.request_id, self.index)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of a choice in a step: `num_tokens` from `start` on. samples: whether the last of them is the last there is, so that the next
    one is chosen."""

    choice: Choice
    start: int
    num_tokens: int
    samples: bool


class GenerationScheduler:
    """The choices of one model. max_running: how many have blocks at once."""

    def __init__(self, pool: BlockPool, *, max_running: int = 256) -> None:
        self.pool = pool
        self.max_running = max_running
        self.num_preempted = 0
        # By their order, the first first.
        self._waiting: list[Choice] = []
        self._running: list[Choice] = []
        # Of the step that is being planned; whoever loses his blocks to another is in it no more.
        self._planned: dict[Choice, Work] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_running(self) -> int:
        """Choices that have blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Choices that have none yet, or not any more."""
        return len(self._waiting)

    def first(self) -> Choice | None:
        """The one that comes before all others."""
        return min((queue[0] for queue in (self._running, self._waiting) if queue), key=lambda choice: choice.order, default=None)

    def add(self, choice: Choice) -> None:
        """Let it wait. The pool must have room for all of it when nobody else runs. Raises: ValueError if it has not."""
        if self.pool.blocks_for(choice.max_length) > self.pool.num_blocks:
            raise ValueError(f"{choice.max_length} tokens are more than the cache has room for")
        insort(self._waiting, choice, key=_order)

    def finish(self, choice: Choice) -> None:
        """It is over, or nobody wants it any more: its blocks are for others from the next step on."""
        if self._end(choice):
            self.pool.release(choice.held)

    def forget(self, choice: Choice) -> list[int]:
        """It is over, and what it has left in its blocks is of no use; returns those that nobody else holds."""
        return self.pool.forget(choice.held) if self._end(choice) else []

    def _end(self, choice: Choice) -> bool:
        """False if it had ended already."""
        if choice.done:
            return False
        choice.done = True
        (self._waiting if choice in self._waiting else self._running).remove(choice)
        return True

    def restart(self, choice: Choice, salt: bytes) -> None:
        """Compute all of it again. salt: whose blocks it may share from now on."""
        self._put_back(choice)
        choice.held = Held(salt)

    def plan(self, chunk_tokens: int) -> list[Work]:
        """The next step, empty when nothing can run. chunk_tokens: of prompts, at most; decoding choices come on top."""
        self._planned = {}
        for choice in list(self._running):  # which shrinks where one takes another's blocks
            if choice.num_missing == 1 and choice in self._running and self._make_room(choice, len(choice.token_ids)):
                self._plan(choice, 1)
        left = chunk_tokens
        # Texts that go on by several tokens at once before prompts.
        for choice in sorted(self._running, key=lambda choice: choice.num_computed < choice.num_prompt):
            if left <= 0:
                break
            if choice.num_missing > 1 and choice in self._running:
                left -= self._chunk(choice, left)
        while left > 0 and self._waiting and len(self._running) < self.max_running:
            taken = self._admit(left)
            if not taken:
                break
            left -= taken
        works, self._planned = list(self._planned.values()), {}
        return works

    def _plan(self, choice: Choice, count: int) -> None:
        self._planned[choice] = Work(choice, choice.num_computed, count, samples=count == choice.num_missing)

    def computed(self, work: Work) -> None:
        """A step has run: the tokens are in the cache."""
        choice = work.choice
        if choice.done:
            return
        choice.num_computed = work.start + work.num_tokens
        self.pool.publish(choice.held, choice.token_ids.tobytes(), choice.num_computed)

    def _chunk(self, choice: Choice, limit: int) -> int:
        """Some of a prompt's tokens; as many as there are blocks for, without taking any from others."""
        count = min(choice.num_missing, limit)
        while count and not self.pool.grow(choice.held, choice.num_computed + count):
            room = self.pool.num_free * self.pool.block_size + len(choice.held.blocks) * self.pool.block_size - choice.num_computed
            count = min(count - 1, max(room, 0))
        if count:
            self._plan(choice, count)
        elif not self._planned and not self._decoding():  # prompts alone, that have taken all blocks from each other: the worst gives way
            worst = self._running[-1]
            if worst is not choice:
                self._preempt(worst)
                return self._chunk(choice, limit)
        return count

    def _decoding(self) -> bool:
        return any(choice.num_missing == 1 for choice in self._running)

    def _admit(self, limit: int) -> int:
        """Let the first that may start; returns how many of its tokens run. One that finds no room lets nobody pass."""
        choice = next((one for one in self._waiting if not _follows(one)), None)
        if choice is None:
            return 0
        self._waiting.remove(choice)
        insort(self._running, choice, key=_order)
        cached = self.pool.match(choice.held, choice.token_ids.tobytes())
        choice.num_computed = cached
        if choice.num_cached is None:
            choice.num_cached = min(cached, choice.num_prompt)
        # Room for the whole prompt and the next token of everybody who runs: else it would be thrown out again at once.
        missing = self.pool.blocks_for(len(choice.token_ids) + 1) - len(choice.held.blocks)
        while missing + len(self._running) - 1 > self.pool.num_free and self._running[-1].priority > choice.priority:
            self._preempt(self._running[-1])
        fits = missing + len(self._running) - 1 <= self.pool.num_free or len(self._running) == 1
        taken = self._chunk(choice, limit) if fits else 0
        if not taken and choice in self._running:
            self._put_back(choice)
        return taken

    def _make_room(self, choice: Choice, num_tokens: int) -> bool:
        """Blocks for so many tokens, taken from the worst that run if need be; False if it was itself the worst."""
        while not self.pool.grow(choice.held, num_tokens):
            worst = self._running[-1]
            self._preempt(worst)
            if worst is choice:
                return False
        return True

    def _preempt(self, choice: Choice) -> None:
        self.num_preempted += 1
        self._put_back(choice)

    def _put_back(self, choice: Choice) -> None:
        self._planned.pop(choice, None)
        self._running.remove(choice)
        self.pool.release(choice.held)
        choice.num_computed = 0
        insort(self._waiting, choice, key=_order)


def _order(choice: Choice) -> tuple[int, float, int, int]:
    return choice.order


def _follows(choice: Choice) -> bool:
    """Whether it waits for the prompt that it shares."""
    leader = choice.leader
    return leader is not None and not leader.done and leader.num_computed < leader.num_prompt - 1
