"""The scheduler's promises, as properties over random requests. No model: a prompt is a number of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jackfield.client import EngineRequest
from jackfield.engine.scheduler import WINDOW_BUDGETS, Group, Scheduler, Sequence, Step
from jackfield.params import PoolingParams

MAX_WAIT_S = 2.0
thorough = settings(max_examples=100, deadline=None)

Key = tuple[int, int]


@dataclass(frozen=True)
class Arrival:
    """A request of the test: so many seconds after the one before it."""

    model: str
    priority: int
    lengths: list[int]
    after_s: float


lengths = st.lists(st.integers(1, 90), min_size=1, max_size=5)
arrivals = st.lists(
    st.builds(Arrival, model=st.sampled_from("ab"), priority=st.integers(-1, 1), lengths=lengths, after_s=st.sampled_from([0.0, 0.5, 3.0])),
    min_size=1,
    max_size=12,
)
budgets = st.integers(1, 120)
length_models = st.sets(st.sampled_from("ab"))


def request(
    request_id: int,
    prompt_lengths: Iterable[int],
    *,
    model: str = "a",
    priority: int = 0,
    deadline: float | None = None,
    token: int | None = None,
) -> EngineRequest:
    """Prompts of these lengths, no two of them equal; with `token`, those of one length are."""
    token_ids = [
        np.full(length, 1000 * request_id + index if token is None else token, dtype=np.int32).tobytes()
        for index, length in enumerate(prompt_lengths)
    ]
    return EngineRequest(id=request_id, model=model, token_ids=token_ids, params=PoolingParams(), priority=priority, deadline=deadline)


def scheduler_for(budget: int, by_length: Iterable[str] = ()) -> Scheduler:
    scheduler = Scheduler(token_budget=budget, max_wait_s=MAX_WAIT_S, starving_s=math.inf)
    scheduler.by_length = set(by_length)
    return scheduler


def key(sequence: Sequence) -> Key:
    return sequence.group.request.id, sequence.index


class Waiting:
    """What should wait, kept beside the scheduler: sequences in the order in which they came."""

    def __init__(self) -> None:
        self.sequences: dict[Key, tuple[Group, int]] = {}

    def add(self, group: Group) -> None:
        for index, ids in enumerate(group.request.token_ids):
            self.sequences[group.request.id, index] = (group, len(ids) // 4)

    def drop(self, group: Group) -> None:
        self.sequences = {k: entry for k, entry in self.sequences.items() if entry[0] is not group}

    def queue(self, model: str, priority: int) -> list[Key]:
        """In order of age."""
        return [k for k, (g, _) in self.sequences.items() if (g.request.model, g.request.priority) == (model, priority)]

    def length(self, *keys: Key) -> int:
        return sum(self.sequences[k][1] for k in keys)

    def take(self, step: Step) -> None:
        for sequence in step.sequences:
            del self.sequences[key(sequence)]


def fill(scheduler: Scheduler, requests: list[Arrival]) -> tuple[Waiting, float]:
    """Add all of them; returns what waits, and the time of the last."""
    waiting, now = Waiting(), 0.0
    for number, arrival in enumerate(requests):
        now += arrival.after_s
        waiting.add(scheduler.add(request(number, arrival.lengths, model=arrival.model, priority=arrival.priority), now))
    return waiting, now


def check_step(step: Step, waiting: Waiting, budget: int) -> None:
    """What holds for every step, whatever else happens. `waiting`: as it was before the step."""
    taken = [key(sequence) for sequence in step.sequences]
    assert taken
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(waiting.sequences), "it ran twice, or after its request had ended"
    assert {sequence.group.request.model for sequence in step.sequences} == {step.model}
    assert step.num_tokens == sum(sequence.length for sequence in step.sequences)
    assert step.num_tokens <= budget or len(step.sequences) == 1
    assert [s.length for s in step.sequences] == sorted(s.length for s in step.sequences)
    # The oldest of the best priority is in it; two of one moment and priority may stand for each other if their models differ.
    best = min((group.request.priority, group.arrival) for group, _ in waiting.sequences.values())
    heads = {
        model: next(k for k, (g, _) in waiting.sequences.items() if (g.request.priority, g.arrival, g.request.model) == (*best, model))
        for model in {g.request.model for g, _ in waiting.sequences.values() if (g.request.priority, g.arrival) == best}
    }
    assert heads.get(step.model) in taken


def left_behind(step: Step, waiting: Waiting, priority: int) -> list[Key]:
    taken = {key(sequence) for sequence in step.sequences}
    return [k for k in waiting.queue(step.model, priority) if k not in taken]


def room(step: Step, budget: int, priority: int, before: Key | None = None) -> int:
    """What the step's budget leaves after its sequences of better priority, and of this one (only those until `before`)."""
    used = 0
    for sequence in step.sequences:
        better = sequence.group.request.priority < priority
        same = sequence.group.request.priority == priority and (before is None or key(sequence) < before)
        used += sequence.length if better or same else 0
    return budget - used


def steps(scheduler: Scheduler, waiting: Waiting, now: float) -> Iterable[Step]:
    """Until nothing waits; each step is seen before `waiting` knows of it."""
    for _ in range(len(waiting.sequences)):
        step = scheduler.schedule(now)
        assert step is not None
        yield step
        waiting.take(step)
        if not waiting.sequences:
            break
    assert not waiting.sequences
    assert scheduler.schedule(now) is None


@thorough
@given(arrivals, budgets, length_models)
def test_everything_runs_once_within_the_budget(requests: list[Arrival], budget: int, by_length: set[str]) -> None:
    scheduler = scheduler_for(budget, by_length)
    waiting, now = fill(scheduler, requests)
    expected = set(waiting.sequences)
    seen: list[Key] = []
    for step in steps(scheduler, waiting, now):
        check_step(step, waiting, budget)
        seen += map(key, step.sequences)
    assert len(seen) == len(expected)
    assert set(seen) == expected
    assert (scheduler.num_waiting, scheduler.num_waiting_tokens, len(scheduler)) == (0, 0, 0)


@thorough
@given(arrivals, budgets, length_models)
def test_counters_follow_the_queue(requests: list[Arrival], budget: int, by_length: set[str]) -> None:
    scheduler = scheduler_for(budget, by_length)
    waiting, now = fill(scheduler, requests)
    for step in steps(scheduler, waiting, now):
        left = len(waiting.sequences) - len(step.sequences)
        assert (scheduler.num_waiting, len(scheduler)) == (left, left)
        assert scheduler.num_waiting_tokens == waiting.length(*waiting.sequences) - step.num_tokens


@thorough
@example([Arrival("a", 0, [1, 2], 0.0), Arrival("a", 1, [1], 3.0), Arrival("a", 0, [1], 0.0)], 2, {"a"})
@given(arrivals, budgets, length_models)
def test_lower_priority_waits_for_higher(requests: list[Arrival], budget: int, by_length: set[str]) -> None:
    """Where a step holds a lower priority, nothing of a higher one that is looked at (some budgets' worth) would have fitted."""
    total = sum(sum(arrival.lengths) for arrival in requests)
    budget = max(budget, -(-total // WINDOW_BUDGETS))
    scheduler = scheduler_for(budget, by_length)
    waiting, now = fill(scheduler, requests)
    for step in steps(scheduler, waiting, now):
        present = {sequence.group.request.priority for sequence in step.sequences}
        for priority in range(-1, max(present)):
            for behind in left_behind(step, waiting, priority):
                assert waiting.length(behind) > room(step, budget, priority)


@thorough
@given(arrivals, budgets, length_models, st.sampled_from([0.0, 1.0, 2.5]))
def test_the_overdue_go_in_order_of_age(requests: list[Arrival], budget: int, by_length: set[str], late_s: float) -> None:
    """Of a priority the overdue (all, where batches are packed) run oldest first, up to the first that does not fit what is left."""
    scheduler = scheduler_for(budget, by_length)
    waiting, last = fill(scheduler, requests)
    now = last + late_s
    for step in steps(scheduler, waiting, now):
        for priority in {sequence.group.request.priority for sequence in step.sequences}:
            behind = left_behind(step, waiting, priority)
            if not behind:
                continue
            first = behind[0]
            if step.model not in by_length or waiting.sequences[first][0].arrival <= now - MAX_WAIT_S:
                assert waiting.length(first) > room(step, budget, priority, before=first)


@thorough
@given(arrivals, budgets)
def test_waiting_longer_never_costs_a_place(requests: list[Arrival], budget: int) -> None:
    """The oldest of a model and priority is served by every step of that model which serves the priority at all."""
    scheduler = scheduler_for(budget, "ab")
    waiting, now = fill(scheduler, requests)
    for step in steps(scheduler, waiting, now):
        for priority in {sequence.group.request.priority for sequence in step.sequences}:
            assert waiting.queue(step.model, priority)[0] in {key(sequence) for sequence in step.sequences}


@thorough
@given(arrivals, st.data())
def test_finish_drops_what_waits(requests: list[Arrival], data: st.DataObject) -> None:
    scheduler = scheduler_for(50)
    groups = [scheduler.add(request(n, a.lengths, model=a.model, priority=a.priority), 0.0) for n, a in enumerate(requests)]
    ended = data.draw(st.sets(st.sampled_from(range(len(groups)))))
    for number in ended:
        assert scheduler.get(number) is groups[number]
        assert scheduler.finish(groups[number]) is True
        assert scheduler.finish(groups[number]) is False
        assert scheduler.get(number) is None
        assert groups[number].done
    seen: set[Key] = set()
    while (step := scheduler.schedule(0.0)) is not None:
        seen |= {key(sequence) for sequence in step.sequences}
    assert seen == {(n, i) for n, a in enumerate(requests) if n not in ended for i in range(len(a.lengths))}
    assert (scheduler.num_waiting, scheduler.num_waiting_tokens) == (0, 0)


@thorough
@given(st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=10), st.integers(0, 10), st.data())
def test_expired(deadlines: list[int | None], now: int, data: st.DataObject) -> None:
    scheduler = scheduler_for(50)
    groups = [scheduler.add(request(n, [3], deadline=deadline), 0.0) for n, deadline in enumerate(deadlines)]
    ended = data.draw(st.sets(st.sampled_from(range(len(groups)))))
    for number in ended:
        scheduler.finish(groups[number])
    expected = [n for n, deadline in enumerate(deadlines) if n not in ended and deadline is not None and deadline <= now]
    assert sorted(group.request.id for group in scheduler.expired(now)) == expected


def test_nothing_waits() -> None:
    scheduler = scheduler_for(10)
    assert scheduler.schedule(0.0) is None
    assert scheduler.expired(1e9) == []
    assert scheduler.get(1) is None


def test_running_does_not_end_a_request() -> None:
    """A request whose sequences all run is live until its owner ends it; its deadline still counts."""
    scheduler = scheduler_for(10)
    group = scheduler.add(request(7, [3, 4], deadline=5.0), 1.0)
    step = scheduler.schedule(1.0)
    assert step is not None
    assert [key(s) for s in step.sequences] == [(7, 0), (7, 1)]
    assert group.remaining == 2
    assert group.results == [None, None]
    assert not group.done
    assert scheduler.get(7) is group
    assert scheduler.expired(4.9) == []
    assert scheduler.expired(5.0) == [group]
    assert scheduler.finish(group)


@thorough
@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(1, 20), st.booleans())
def test_equal_prompts_run_once_each_within_the_budget(prompt_lengths: list[int], budget: int, by_length: bool) -> None:
    """Prompts of one length are equal here: what a step has to compute is its distinct prompts."""
    scheduler = scheduler_for(budget, "a" if by_length else "")
    waiting = Waiting()
    waiting.add(scheduler.add(request(1, prompt_lengths, token=7), 0.0))
    for step in steps(scheduler, waiting, 0.0):
        distinct = {sequence.length for sequence in step.sequences}
        assert sum(distinct) <= budget or len(distinct) == 1
        assert len({key(sequence) for sequence in step.sequences}) == len(step.sequences)
        assert waiting.queue("a", 0)[0] in {key(sequence) for sequence in step.sequences}
    assert (scheduler.num_waiting, scheduler.num_waiting_tokens) == (0, 0)


def test_a_prompt_that_the_step_holds_costs_nothing() -> None:
    """The runner computes equal prompts once, so they share a step whatever its budget."""
    scheduler = scheduler_for(10)
    scheduler.add(request(1, [6, 6, 6, 4, 6, 5], token=7), 0.0)
    assert run_lengths(scheduler, 0.0) == [4, 6, 6, 6, 6]
    assert run_lengths(scheduler, 0.0) == [5]


def run_lengths(scheduler: Scheduler, now: float) -> list[int]:
    step = scheduler.schedule(now)
    assert step is not None
    return [sequence.length for sequence in step.sequences]


@pytest.mark.parametrize(
    ("by_length", "expected"),
    [(True, [[10, 10, 10], [15], [50]]), (False, [[10, 15], [10, 10], [50]])],
    ids=["by length", "packed"],
)
def test_neighbours(by_length: bool, expected: list[list[int]]) -> None:
    """Young sequences join the oldest by length where batches are of equal length, by age where they are packed; a large one runs alone."""
    scheduler = scheduler_for(30, "a" if by_length else "")
    scheduler.add(request(1, [10, 15, 10, 10, 50]), 0.0)
    assert [run_lengths(scheduler, 0.1) for _ in expected] == expected


def test_overdue_sequences_are_not_passed_by_better_lengths() -> None:
    scheduler = scheduler_for(30, "a")
    scheduler.add(request(1, [10, 20]), 0.0)
    scheduler.add(request(2, [10, 10]), 1.0)
    assert run_lengths(scheduler, MAX_WAIT_S) == [10, 20]
    assert run_lengths(scheduler, MAX_WAIT_S) == [10, 10]


def test_models_share_one_order() -> None:
    scheduler = scheduler_for(100)
    scheduler.add(request(1, [5], model="b"), 0.0)
    scheduler.add(request(2, [5], model="a"), 1.0)
    scheduler.add(request(3, [5], model="b"), 2.0)
    scheduler.add(request(4, [5], model="c", priority=-1), 3.0)
    order = [(step.model, [s.group.request.id for s in step.sequences]) for step in iter(lambda: scheduler.schedule(4.0), None)]
    assert order == [("c", [4]), ("b", [1, 3]), ("a", [2])]


class Scheduling(RuleBasedStateMachine):
    """Add, finish, schedule, expire in any order; a model of the queue beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = 60
        self.scheduler = scheduler_for(self.budget, "b")
        self.waiting = Waiting()
        self.live: dict[int, Group] = {}
        self.ended: list[Group] = []
        self.ids = itertools.count()
        self.now = 0.0

    @rule(
        model=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        prompt_lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
        patience_s=st.none() | st.sampled_from([0.0, 1.0, 5.0]),
    )
    def add(self, model: str, priority: int, prompt_lengths: list[int], patience_s: float | None) -> None:
        deadline = None if patience_s is None else self.now + patience_s
        made = request(next(self.ids), prompt_lengths, model=model, priority=priority, deadline=deadline)
        group = self.scheduler.add(made, self.now)
        assert (group.request, group.arrival, group.remaining) == (made, self.now, len(prompt_lengths))
        self.live[made.id] = group
        self.waiting.add(group)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule(self.now)
        if step is None:
            assert not self.waiting.sequences
            assert (self.scheduler.num_waiting, self.scheduler.num_waiting_tokens) == (0, 0)
            return
        check_step(step, self.waiting, self.budget)
        self.waiting.take(step)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self._end(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        assert self.scheduler.finish(data.draw(st.sampled_from(self.ended))) is False

    @rule()
    def expire(self) -> None:
        due = {n for n, group in self.live.items() if group.request.deadline is not None and group.request.deadline <= self.now}
        found = self.scheduler.expired(self.now)
        assert len(found) == len(due)
        assert {group.request.id for group in found} == due
        for group in found:
            self._end(group)

    def _end(self, group: Group) -> None:
        assert self.scheduler.finish(group) is True
        del self.live[group.request.id]
        self.ended.append(group)
        self.waiting.drop(group)

    @invariant()
    def counts_no_less_than_what_waits(self) -> None:
        """More is allowed while ended requests are still to be met, nothing once no request is live."""
        assert self.scheduler.num_waiting >= len(self.waiting.sequences)
        assert self.scheduler.num_waiting_tokens >= self.waiting.length(*self.waiting.sequences)
        if not self.live:
            assert (self.scheduler.num_waiting, self.scheduler.num_waiting_tokens) == (0, 0)
        assert all(self.scheduler.get(number) is group for number, group in self.live.items())
        assert not any(self.scheduler.get(group.request.id) for group in self.ended)

    def teardown(self) -> None:
        for step in steps(self.scheduler, self.waiting, self.now) if self.waiting.sequences else ():
            check_step(step, self.waiting, self.budget)
        assert self.scheduler.schedule(self.now) is None
        assert (self.scheduler.num_waiting, self.scheduler.num_waiting_tokens) == (0, 0)
        for group in list(self.live.values()):
            self._end(group)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
