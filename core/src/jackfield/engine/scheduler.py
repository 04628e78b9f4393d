"""Which sequences run in the next step. Pure: no model, no clock of its own, no I/O.

One token budget a step, over all models and operations of a device. Sequences wait in the order of priority, then age, and a step takes
the oldest of the best priority first. What fills the rest of the budget depends on how the model runs: where batches are of equal length
(`by_length`), those nearest to it in length; where they are packed, the next oldest, since blocks fill best with mixed lengths (905 texts/s
in order of age against 803 sorted by length, MiniLM in bfloat16, benchmarks/ledger.md). Among lengths, whoever has waited longer than
`max_wait_s` is taken first, in order of age. So nobody starves: the oldest always runs, and after `max_wait_s` a sequence is overtaken by
older ones only. A prompt that the step holds already costs nothing of its budget: the runner computes it once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from jackfield.client import EngineRequest
from jackfield.outputs import FloatArray

__all__ = ["Group", "Scheduler", "Sequence", "Step"]

# A step chooses among so many budgets' worth of waiting tokens: enough for good neighbours, small enough to sort at every step.
WINDOW_BUDGETS = 4


class Group:
    """A request in the engine: its sequences and their fate. `done` is set once, by whoever ends it."""

    __slots__ = ("arrival", "done", "remaining", "request", "results")

    def __init__(self, request: EngineRequest, arrival: float) -> None:
        self.request = request
        self.arrival = arrival
        self.remaining = len(request.token_ids)
        self.results: list[dict[str, FloatArray] | None] = [None] * len(request.token_ids)
        self.done = False


class Sequence:
    """One prompt of a request, waiting or running. token_ids are int32 bytes; length is in tokens."""

    __slots__ = ("group", "index", "length", "token_ids")

    def __init__(self, group: Group, index: int) -> None:
        self.group = group
        self.index = index
        self.token_ids = group.request.token_ids[index]
        self.length = len(self.token_ids) // 4


class Step(Struct, frozen=True):
    """What to run: sequences of one model, shortest first."""

    model: str
    sequences: list[Sequence]
    num_tokens: int


class Scheduler:
    """Waiting sequences and the choice among them.

    token_budget: tokens a step (a longer sequence runs alone). max_wait_s: the age from which a sequence is served in order of age.
    by_length: models whose batches are of equal length.
    """

    def __init__(self, *, token_budget: int, max_wait_s: float) -> None:
        self.token_budget = token_budget
        self.max_wait_s = max_wait_s
        self.by_length: set[str] = set()
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        # model -> priority -> sequences in order of arrival
        self._queues: dict[str, dict[int, deque[Sequence]]] = {}
        self._groups: dict[int, Group] = {}
        self._deadlines = 0

    def __len__(self) -> int:
        return self.num_waiting

    def add(self, request: EngineRequest, now: float) -> Group:
        """Take a request; all of its sequences wait from now on."""
        group = Group(request, now)
        self._groups[request.id] = group
        self._deadlines += request.deadline is not None
        queue = self._queues.setdefault(request.model, {}).setdefault(request.priority, deque())
        for index in range(len(request.token_ids)):
            sequence = Sequence(group, index)
            queue.append(sequence)
            self.num_waiting += 1
            self.num_waiting_tokens += sequence.length
        return group

    def get(self, request_id: int) -> Group | None:
        """The live request of that id."""
        return self._groups.get(request_id)

    def finish(self, group: Group) -> bool:
        """End a request, for whatever reason; False if it had ended already. Its waiting sequences are dropped when met."""
        if group.done:
            return False
        group.done = True
        self._groups.pop(group.request.id, None)
        self._deadlines -= group.request.deadline is not None
        if not self._groups:
            self._clear()
        return True

    def expired(self, now: float) -> list[Group]:
        """Live requests whose deadline has passed; the caller finishes them."""
        if not self._deadlines:
            return []
        return [g for g in self._groups.values() if g.request.deadline is not None and g.request.deadline <= now]

    def schedule(self, now: float) -> Step | None:
        """The next step, its sequences taken out of the queue; None when nothing waits."""
        model = self._next_model()
        if model is None:
            return None
        queues = self._queues[model]
        chosen: list[Sequence] = []
        budget = self.token_budget
        for priority in sorted(queues):
            overdue = now - self.max_wait_s if model in self.by_length else math.inf
            budget = self._take(queues[priority], budget, overdue, chosen)
            if not queues[priority]:
                del queues[priority]
            if budget <= 0:
                break
        if not queues:
            del self._queues[model]
        chosen.sort(key=_length)
        return Step(model, chosen, sum(s.length for s in chosen))

    def _clear(self) -> None:
        self._queues.clear()
        self.num_waiting = self.num_waiting_tokens = 0

    def _next_model(self) -> str | None:
        """The model whose first waiting sequence has the best (priority, age)."""
        best: tuple[int, float, str] | None = None
        for model in list(self._queues):
            queues = self._queues[model]
            for priority in sorted(queues):
                queue = queues[priority]
                while queue and queue[0].group.done:
                    self._dropped(queue.popleft())
                if queue:
                    candidate = (priority, queue[0].group.arrival, model)
                    best = candidate if best is None else min(best, candidate)
                    break
                del queues[priority]
            if not queues:
                del self._queues[model]
        return best[2] if best else None

    def _dropped(self, sequence: Sequence) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= sequence.length

    def _take(self, queue: deque[Sequence], budget: int, overdue: float, chosen: list[Sequence]) -> int:
        """Move sequences of one priority from the queue into `chosen`; returns what is left of the budget.

        Those that arrived until `overdue` go in order of age, the rest by length.
        """
        window = self._window(queue)
        if not window:
            return budget
        picked: list[Sequence] = []
        held = {sequence.token_ids for sequence in chosen}
        for position, sequence in enumerate(window):
            if position and sequence.group.arrival > overdue:
                break
            cost = 0 if sequence.token_ids in held else sequence.length
            if cost > budget and (chosen or picked):
                break
            picked.append(sequence)
            held.add(sequence.token_ids)
            budget -= cost
        rest = window[len(picked) :]
        if budget > 0 and picked:
            near = _nearest(rest, window[0].length, budget, held)
            budget -= sum(sequence.length for sequence in near if sequence.token_ids not in held)
            taken = set(map(id, near))
            rest = [s for s in rest if id(s) not in taken]
            picked += near
        queue.extendleft(reversed(rest))
        for sequence in picked:
            self._dropped(sequence)
        chosen += picked
        return budget if picked else 0

    def _window(self, queue: deque[Sequence]) -> list[Sequence]:
        """The oldest live sequences, some budgets' worth, taken out of the queue."""
        window: list[Sequence] = []
        tokens, limit = 0, self.token_budget * WINDOW_BUDGETS
        while queue and (tokens < limit or not window):
            sequence = queue.popleft()
            if sequence.group.done:
                self._dropped(sequence)
            else:
                window.append(sequence)
                tokens += sequence.length
        return window


def _length(sequence: Sequence) -> int:
    return sequence.length


def _nearest(candidates: Iterable[Sequence], length: int, budget: int, held: set[bytes]) -> list[Sequence]:
    """Those nearest in length, as many as fit the budget; the older first among equals."""
    near: list[Sequence] = []
    for sequence in sorted(candidates, key=lambda s: abs(s.length - length)):
        if sequence.token_ids in held:
            near.append(sequence)
        elif sequence.length <= budget:
            near.append(sequence)
            budget -= sequence.length
    return near
