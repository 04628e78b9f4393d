"""Which sequences run in the next step. Pure: no model, no clock of its own, no I/O.

One token budget a step, over all models and operations of a device. Sequences wait in the order of priority, then age, and a step takes
the oldest of the best priority first. What fills the rest of the budget depends on how the model runs: where batches are of equal length
(`by_length`), those nearest to it in length; where they are packed, the next oldest, since blocks fill best with mixed lengths (905 texts/s
in order of age against 803 sorted by length, MiniLM in bfloat16, benchmarks/ledger.md). Among lengths, whoever has waited longer than
`max_wait_s` is taken first, in order of age: it is overtaken by older ones only. Whoever has waited for STARVING_S goes before every
priority. So nobody starves. A prompt that the step holds already costs nothing of its budget: the runner computes it once.
"""

from __future__ import annotations

import math
from collections import deque

from msgspec import Struct

from jackfield.client import EngineRequest
from jackfield.outputs import FloatArray

__all__ = ["Group", "Scheduler", "Sequence", "Step"]

# A step chooses among so many budgets' worth of waiting tokens: enough for good neighbours, small enough to sort at every step.
WINDOW_BUDGETS = 4
# After so long a priority is no excuse any more.
STARVING_S = 5.0


class Group:
    """A request in the engine: its sequences and their fate. `done` is set once, by whoever ends it."""

    __slots__ = ("arrival", "done", "num_waiting", "num_waiting_tokens", "remaining", "request", "results")

    def __init__(self, request: EngineRequest, arrival: float) -> None:
        self.request = request
        self.arrival = arrival
        self.remaining = self.num_waiting = len(request.token_ids)
        self.num_waiting_tokens = sum(map(len, request.token_ids)) // 4
        self.results: list[dict[str, FloatArray] | None] = [None] * len(request.token_ids)
        self.done = False


class Sequence:
    """One prompt of a request, waiting or running. token_ids are int32 bytes; length is in tokens; two of one key have one result.

    segment: tokens of a pair's first part, 0 for no pair."""

    __slots__ = ("group", "index", "key", "length", "segment", "token_ids")

    def __init__(self, group: Group, index: int) -> None:
        self.group = group
        self.index = index
        self.token_ids = group.request.token_ids[index]
        self.length = len(self.token_ids) // 4
        prefixes, segments = group.request.prefix_lengths, group.request.segments
        self.segment = segments[index] if segments else 0
        self.key = (self.token_ids, prefixes[index] if prefixes else 0, self.segment, group.request.params)


class Step(Struct, frozen=True):
    """What to run: sequences of one model, shortest first. num_tokens: to be computed, of equal prompts those of one."""

    model: str
    sequences: list[Sequence]
    num_tokens: int


class Scheduler:
    """Waiting sequences and the choice among them.

    token_budget: tokens a step (a longer sequence runs alone). max_wait_s: the age from which a sequence is served in order of age.
    starving_s: the wait after which a priority counts no longer. by_length: models whose batches are of equal length.
    """

    def __init__(self, *, token_budget: int, max_wait_s: float, starving_s: float = STARVING_S) -> None:
        self.token_budget = token_budget
        self.max_wait_s = max_wait_s
        self.starving_s = starving_s
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
        queue.extend(Sequence(group, index) for index in range(len(request.token_ids)))
        self.num_waiting += group.num_waiting
        self.num_waiting_tokens += group.num_waiting_tokens
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
        self.num_waiting -= group.num_waiting
        self.num_waiting_tokens -= group.num_waiting_tokens
        if not self._groups:
            self._queues.clear()
        return True

    def expired(self, now: float) -> list[Group]:
        """Live requests whose deadline has passed; the caller finishes them."""
        if not self._deadlines:
            return []
        return [g for g in self._groups.values() if g.request.deadline is not None and g.request.deadline <= now]

    def schedule(self, now: float, budget: int = 0) -> Step | None:
        """The next step, its sequences taken out of the queue; None when nothing waits. budget: of this step, if not `token_budget`."""
        model = self._next_model(now)
        if model is None:
            return None
        queues = self._queues[model]
        chosen: list[Sequence] = []
        budget = budget or self.token_budget
        overdue = now - self.max_wait_s if model in self.by_length else math.inf
        # First who has starved, oldest first, and nobody else of their priority; then each priority in turn.
        starved = now - self.starving_s
        turns = [(p, starved) for p in sorted(queues, key=lambda p: queues[p][0].group.arrival) if queues[p][0].group.arrival < starved]
        for priority, latest in [*turns, *((p, math.inf) for p in sorted(queues))]:
            if queues[priority]:
                budget = self._take(queues[priority], budget, overdue, latest, chosen)
                if budget <= 0:
                    break
        for priority in [p for p in queues if not queues[p]]:
            del queues[priority]
        if not queues:
            del self._queues[model]
        chosen.sort(key=_length)
        return Step(model, chosen, sum({s.key: s.length for s in chosen}.values()))

    def _next_model(self, now: float) -> str | None:
        """The model whose first waiting sequence has the best (priority, age)."""
        best: tuple[float, float, str] | None = None
        for model, queues in list(self._queues.items()):
            for priority, queue in list(queues.items()):
                while queue and queue[0].group.done:
                    queue.popleft()
                if not queue:
                    del queues[priority]
                    continue
                candidate = (*self._urgency(priority, queue, now), model)
                best = candidate if best is None else min(best, candidate)
            if not queues:
                del self._queues[model]
        return best[2] if best else None

    def _take(self, queue: deque[Sequence], budget: int, overdue: float, latest: float, chosen: list[Sequence]) -> int:
        """Move sequences of one priority from the queue into `chosen`; returns what is left of the budget for those after them.

        latest: arrivals up to then are looked at.
        Those that arrived until `overdue` go in order of age, the rest by length, if no overdue one is left over.
        """
        window = self._window(queue, latest)
        if not window:
            return budget
        picked: list[Sequence] = []
        held = {sequence.key for sequence in chosen}
        late = sum(sequence.group.arrival <= overdue for sequence in window)
        by_length = sorted(window[late:], key=lambda s: abs(s.length - window[0].length))
        blocked = False
        for position, sequence in enumerate([*window[:late], *by_length]):
            if position == late and len(picked) < late:
                blocked = True  # younger ones do not pass an overdue one that waits for room
                break
            cost = 0 if sequence.key in held else sequence.length
            if cost > budget and (chosen or picked):  # an oversized one runs alone
                if not picked:
                    break  # nor does anyone pass the oldest of a lower priority
                continue
            picked.append(sequence)
            held.add(sequence.key)
            budget -= cost
        taken = set(map(id, picked))
        rest = [sequence for sequence in window if id(sequence) not in taken]
        queue.extendleft(reversed(rest))
        for sequence in picked:
            self._start(sequence)
        chosen += picked
        # Nobody of a lower priority passes the oldest that found no room, nor what is beyond the window and would fit, perhaps.
        beyond = len(queue) > len(rest) and queue[len(rest)].group.arrival <= latest
        return budget if picked and not blocked and not beyond else 0

    def _start(self, sequence: Sequence) -> None:
        sequence.group.num_waiting -= 1
        sequence.group.num_waiting_tokens -= sequence.length
        self.num_waiting -= 1
        self.num_waiting_tokens -= sequence.length

    def _urgency(self, priority: int, queue: deque[Sequence], now: float) -> tuple[float, float]:
        """What a queue is compared by: its priority, which counts no longer once its first has starved, then age."""
        arrival = queue[0].group.arrival
        return (-math.inf if now - arrival > self.starving_s else priority, arrival)

    def _window(self, queue: deque[Sequence], latest: float) -> list[Sequence]:
        """The oldest live sequences, some budgets' worth, taken out of the queue."""
        window: list[Sequence] = []
        tokens, limit = 0, self.token_budget * WINDOW_BUDGETS
        while queue and (tokens < limit or not window) and queue[0].group.arrival <= latest:
            sequence = queue.popleft()
            if not sequence.group.done:
                window.append(sequence)
                tokens += sequence.length
        return window


def _length(sequence: Sequence) -> int:
    return sequence.length
