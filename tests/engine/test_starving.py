"""Nobody waits for ever, whatever comes meanwhile: starvation by priority, and every promise of a step under random traffic."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.client import EngineRequest
from jackfield.engine.scheduler import Group, Scheduler, Sequence, Step
from jackfield.params import PoolingParams

MAX_WAIT_S = 0.2
STEP_S = 0.5
BUDGET = 100
_ids = itertools.count(1)


def request(prompts: list[tuple[int, int]], *, model: str = "a", priority: int = 0, deadline: float | None = None) -> EngineRequest:
    """Prompts of (token, length), so that two of one pair are equal."""
    token_ids = [np.full(length, token, dtype=np.int32).tobytes() for token, length in prompts]
    return EngineRequest(id=next(_ids), model=model, token_ids=token_ids, params=PoolingParams(), priority=priority, deadline=deadline)


def distinct_tokens(step: Step) -> int:
    """What the runner has to compute: equal prompts once."""
    return sum({sequence.key: sequence.length for sequence in step.sequences}.values())


def seconds_until_served(scheduler: Scheduler, patient: EngineRequest, rush: EngineRequest, limit_s: float) -> float:
    """How long `patient` waits while a fresh copy of `rush`, enough for a whole step, comes before every step; inf after limit_s."""
    group = scheduler.add(patient, 0.0)
    for number in range(math.ceil(limit_s / STEP_S)):
        now = number * STEP_S
        scheduler.add(request([(number, BUDGET)], model=rush.model, priority=rush.priority), now)
        step = scheduler.schedule(now)
        assert step is not None
        if any(sequence.group is group for sequence in step.sequences):
            return now
    return math.inf


@pytest.mark.parametrize("by_length", [False, True], ids=["packed", "by length"])
@pytest.mark.parametrize("other", ["a", "b"], ids=["one model", "two models"])
@pytest.mark.parametrize("length", [10, BUDGET, 3 * BUDGET])
def test_a_low_priority_is_served_after_the_bound(other: str, by_length: bool, length: int) -> None:
    """However many of a better priority come: not before the bound, and with the next step after it."""

    def scheduler(**options: float) -> Scheduler:
        made = Scheduler(token_budget=BUDGET, max_wait_s=MAX_WAIT_S, **options)
        made.by_length = {"a", "b"} if by_length else set()
        return made

    patient, rush = request([(7, length)], priority=5), request([], model=other, priority=-5)
    assert seconds_until_served(scheduler(starving_s=2.0), patient, rush, 60) == 2.0 + STEP_S
    assert seconds_until_served(scheduler(), patient, rush, 60) == 5.0 + STEP_S
    assert seconds_until_served(scheduler(starving_s=math.inf), patient, rush, 60) == math.inf


def test_of_two_that_starve_the_older_is_first() -> None:
    """Whatever their priorities, and though one of a better priority that does not starve is there too."""
    scheduler = Scheduler(token_budget=BUDGET, max_wait_s=MAX_WAIT_S, starving_s=2.0)
    older = scheduler.add(request([(1, BUDGET)], priority=9), 0.0)
    younger = scheduler.add(request([(2, BUDGET)], priority=3), 0.5)
    fresh = scheduler.add(request([(3, BUDGET)], priority=-9), 2.5)
    order = [step.sequences[0].group for step in iter(lambda: scheduler.schedule(2.75), None)]
    assert order == [older, younger, fresh]


def test_a_prompt_of_another_priority_is_free_too() -> None:
    """Equal prompts count once in a step, whoever asks for them."""
    scheduler = Scheduler(token_budget=BUDGET, max_wait_s=MAX_WAIT_S)
    scheduler.add(request([(7, 60)]), 0.0)
    scheduler.add(request([(7, 60), (8, 40), (9, 1)], priority=1), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert [sequence.length for sequence in step.sequences] == [40, 60, 60]
    assert distinct_tokens(step) == BUDGET


@dataclass(frozen=True)
class Event:
    """What happens after so many seconds. prompts: a request that comes. ends: the request of that number, if it lives, is ended."""

    after_s: float
    prompts: list[tuple[int, int]]
    model: str
    priority: int
    patience_s: float | None
    ends: int
    steps: int


prompts = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 5, 20, 60, 90, 250])), max_size=6)
traffic = st.lists(
    st.builds(
        Event,
        after_s=st.sampled_from([0.0, 0.1, 1.0, 2.5]),
        prompts=prompts,
        model=st.sampled_from("ab"),
        priority=st.integers(-2, 2),
        patience_s=st.sampled_from([None, None, None, 0.5, 4.0]),
        ends=st.integers(0, 30),
        steps=st.integers(0, 2),
    ),
    max_size=25,
)


class Traffic:
    """A scheduler and what the test knows of it: who waits, who ran, who was ended."""

    def __init__(self, budget: int, by_length: set[str], starving_s: float) -> None:
        self.scheduler = Scheduler(token_budget=budget, max_wait_s=MAX_WAIT_S, starving_s=starving_s)
        self.scheduler.by_length = by_length
        self.budget = budget
        self.starving_s = starving_s
        self.now = 0.0
        self.groups: list[Group] = []
        self.waiting: dict[tuple[int, int], Group] = {}
        self.ran: list[tuple[int, int]] = []

    def happen(self, event: Event) -> None:
        self.now += event.after_s
        if event.prompts:
            deadline = None if event.patience_s is None else self.now + event.patience_s
            made = request(event.prompts, model=event.model, priority=event.priority, deadline=deadline)
            group = self.scheduler.add(made, self.now)
            self.groups.append(group)
            self.waiting |= {(made.id, index): group for index in range(len(event.prompts))}
        if event.ends < len(self.groups):
            self.end(self.groups[event.ends])
        for group in self.scheduler.expired(self.now):
            self.end(group)
        for _ in range(event.steps):
            self.step()

    def end(self, group: Group) -> None:
        self.scheduler.finish(group)
        self.waiting = {key: other for key, other in self.waiting.items() if other is not group}

    def step(self) -> bool:
        step = self.scheduler.schedule(self.now)
        assert (step is None) == (not self.waiting)
        if step is None:
            return False
        keys = [(sequence.group.request.id, sequence.index) for sequence in step.sequences]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(self.waiting), "it ran twice, or after its end"
        assert {sequence.group.request.model for sequence in step.sequences} == {step.model}
        assert distinct_tokens(step) <= self.budget or len({sequence.key for sequence in step.sequences}) == 1
        self._check_order(step.sequences)
        self.ran += keys
        for key in keys:
            del self.waiting[key]
        return True

    def _check_order(self, sequences: list[Sequence]) -> None:
        """Whoever has starved is oldest of all, and goes first; else the oldest of the best priority does."""
        groups = self.waiting.values()
        oldest = min(group.arrival for group in groups)
        taken = {(sequence.group.arrival, sequence.group.request.priority) for sequence in sequences}
        if self.now - oldest > self.starving_s:
            assert oldest in {arrival for arrival, _ in taken}
        else:
            best = min(group.request.priority for group in groups)
            assert (min(group.arrival for group in groups if group.request.priority == best), best) in taken


@settings(max_examples=200, deadline=None)
@given(traffic, st.integers(1, 120), st.sets(st.sampled_from("ab")), st.sampled_from([0.3, 2.0, math.inf]))
def test_everything_that_is_not_ended_runs_once(events: list[Event], budget: int, by_length: set[str], starving_s: float) -> None:
    run = Traffic(budget, by_length, starving_s)
    for event in events:
        run.happen(event)
    for _ in range(len(run.waiting) + 1):
        if not run.step():
            break
    assert not run.waiting
    assert len(set(run.ran)) == len(run.ran)
    expected = {(group.request.id, i) for group in run.groups if not group.done for i in range(len(group.request.token_ids))}
    assert expected <= set(run.ran)
    assert (run.scheduler.num_waiting, run.scheduler.num_waiting_tokens, len(run.scheduler)) == (0, 0, 0)


def test_the_fresh_do_not_ride_with_the_starved() -> None:
    """Of a priority that has starved only those who waited go first; what is left of the step is for the best priority."""
    scheduler = Scheduler(token_budget=BUDGET, max_wait_s=MAX_WAIT_S, starving_s=5.0)
    starved = scheduler.add(request([(1, 10)], priority=9), 0.0)
    scheduler.add(request([(2, 90)], priority=9), 6.0)
    better = scheduler.add(request([(3, 90)], priority=0), 6.0)
    step = scheduler.schedule(6.0)
    assert step is not None
    assert {sequence.group for sequence in step.sequences} == {starved, better}


def test_equal_prompts_are_counted_once() -> None:
    scheduler = Scheduler(token_budget=BUDGET, max_wait_s=MAX_WAIT_S)
    scheduler.add(request([(7, 50)] * 8), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert len(step.sequences) == 8
    assert step.num_tokens == 50
