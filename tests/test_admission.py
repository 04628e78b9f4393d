"""Admission: three limits, and a Retry-After that follows the measured drain rate. Time is the test's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.admission import Admission, Ticket
from jackfield.errors import Overloaded


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("jackfield.admission.time.monotonic", clock)
    return clock


def make(max_requests: int = 10, max_bytes: int = 1000, max_tokens: int = 100) -> Admission:
    return Admission(max_requests=max_requests, max_bytes=max_bytes, max_tokens=max_tokens)


def refusal(attempt: Callable[[], object]) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        attempt()
    return caught.value


def retry_after(error: Overloaded) -> int:
    return int(error.headers["retry-after"])


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.num_requests, admission.num_bytes, admission.num_tokens


def serve(admission: Admission, clock: Clock, *, num_requests: int, seconds_each: float) -> None:
    """One after the other, with one more always in, so that it is never idle. Leaves nothing behind."""
    ticket = admission.enter(1)
    for _ in range(num_requests):
        following = admission.enter(1)
        clock.wait(seconds_each)
        admission.release(ticket, served=True)
        ticket = following
    admission.release(ticket, served=False)


def test_limit_of_requests() -> None:
    admission = make(max_requests=2)
    first = admission.enter(1)
    admission.enter(1)
    error = refusal(lambda: admission.enter(1))
    assert error.status == 429
    assert error.reason == "requests"
    assert "2 requests of 2" in error.message
    assert admission.rejections == {"requests": 1, "bytes": 0, "tokens": 0}
    assert counts(admission) == (2, 2, 0)
    admission.release(first, served=True)
    admission.enter(1)
    assert counts(admission) == (2, 2, 0)


def test_limit_of_bytes() -> None:
    admission = make(max_bytes=1000)
    first = admission.enter(600)
    admission.enter(400)
    error = refusal(lambda: admission.enter(1))
    assert error.reason == "bytes"
    assert "1001 bytes of 1000" in error.message
    assert admission.rejections == {"requests": 0, "bytes": 1, "tokens": 0}
    admission.release(first, served=False)
    admission.enter(600)
    assert counts(admission) == (2, 1000, 0)


def test_limit_of_tokens() -> None:
    admission = make(max_tokens=100)
    first, second, third = admission.enter(1), admission.enter(1), admission.enter(1)
    admission.charge(first, 60)
    admission.charge(second, 40)
    error = refusal(lambda: admission.charge(third, 1))
    assert error.reason == "tokens"
    assert "101 tokens of 100" in error.message
    assert admission.rejections == {"requests": 0, "bytes": 0, "tokens": 1}
    assert counts(admission) == (3, 3, 100)
    admission.release(third, served=False)  # what was refused gives back no tokens
    assert counts(admission) == (2, 2, 100)
    admission.release(first, served=True)
    assert counts(admission) == (1, 1, 40)


def test_lone_oversized_request_passes() -> None:
    """A request larger than the queue waits for an empty one; nothing joins it."""
    admission = make(max_bytes=1000, max_tokens=100)
    ticket = admission.enter(5000)
    assert refusal(lambda: admission.enter(1)).reason == "bytes"
    admission.charge(ticket, 500)
    assert counts(admission) == (1, 5000, 500)
    admission.release(ticket, served=True)
    small, other = admission.enter(1), admission.enter(1)
    assert refusal(lambda: admission.enter(5000)).reason == "bytes"
    admission.charge(small, 1)
    assert refusal(lambda: admission.charge(other, 500)).reason == "tokens"


def test_oversized_tokens_pass_while_none_are_charged() -> None:
    """Requests that are in and not charged yet do not stand in the way of the first charge."""
    admission = make(max_tokens=100)
    large, small = admission.enter(1), admission.enter(1)
    admission.charge(large, 500)
    assert refusal(lambda: admission.charge(small, 1)).reason == "tokens"


@pytest.mark.parametrize("served", [True, False])
def test_release_twice_is_harmless(served: bool, clock: Clock) -> None:
    admission = make()
    kept, ended = admission.enter(10), admission.enter(20)
    admission.charge(kept, 3)
    admission.charge(ended, 4)
    clock.wait(1)
    admission.release(ended, served=served)
    rate = admission.drain_rate()
    admission.release(ended, served=True)
    assert counts(admission) == (1, 10, 3)
    assert admission.drain_rate() == rate
    assert (rate > 0) is served


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["enter", "charge", "release"]), st.integers(0, 30), st.integers(0, 10)), max_size=60))
def test_limits_hold_and_everything_is_given_back(operations: list[tuple[str, int, int]]) -> None:
    admission = make(max_requests=4, max_bytes=50, max_tokens=20)
    uncharged: list[Ticket] = []
    charged: list[Ticket] = []
    refused = 0
    for operation, amount, pick in operations:
        try:
            if operation == "enter":
                uncharged.append(admission.enter(amount * 2))
            elif operation == "charge" and uncharged:
                admission.charge(uncharged[pick % len(uncharged)], amount)
                charged.append(uncharged.pop(pick % len(uncharged)))
            elif operation == "release" and uncharged + charged:
                ticket = (uncharged + charged)[pick % len(uncharged + charged)]
                admission.release(ticket, served=True)
                (uncharged if ticket in uncharged else charged).remove(ticket)
        except Overloaded:
            refused += 1
        tickets = uncharged + charged
        assert counts(admission) == (len(tickets), sum(t.num_bytes for t in tickets), sum(t.num_tokens for t in charged))
        assert admission.num_requests <= 4
        assert admission.num_bytes <= 50 or sum(t.num_bytes > 0 for t in tickets) == 1
        assert admission.num_tokens <= 20 or sum(t.num_tokens > 0 for t in charged) == 1
        assert sum(admission.rejections.values()) == refused
    for ticket in uncharged + charged:
        admission.release(ticket, served=False)
    assert counts(admission) == (0, 0, 0)


def test_drain_rate_is_what_was_served(clock: Clock) -> None:
    admission = make()
    assert admission.drain_rate() == 0
    serve(admission, clock, num_requests=400, seconds_each=0.25)
    assert admission.drain_rate() == pytest.approx(4, rel=0.02)


def test_requests_that_were_not_served_do_not_count(clock: Clock) -> None:
    admission = make()
    for _ in range(50):
        ticket = admission.enter(1)
        clock.wait(1)
        admission.release(ticket, served=False)
    assert admission.drain_rate() == 0


def test_drain_rate_follows_a_change(clock: Clock) -> None:
    admission = make()
    serve(admission, clock, num_requests=1000, seconds_each=0.1)
    serve(admission, clock, num_requests=3, seconds_each=1)
    assert 1 < admission.drain_rate() < 10  # within seconds on its way
    serve(admission, clock, num_requests=100, seconds_each=1)
    assert admission.drain_rate() == pytest.approx(1, rel=0.05)


def test_idle_time_between_requests_is_not_slowness(clock: Clock) -> None:
    admission = make(max_requests=7)
    serve(admission, clock, num_requests=400, seconds_each=0.25)
    clock.wait(3600)
    for _ in range(7):
        admission.enter(1)
    assert admission.drain_rate() == pytest.approx(4, rel=0.02)
    assert retry_after(refusal(lambda: admission.enter(1))) == 1


def test_retry_after_without_a_measurement() -> None:
    admission = make(max_requests=1)
    admission.enter(1)
    assert retry_after(refusal(lambda: admission.enter(1))) == 1


@pytest.mark.parametrize(("queue", "expected"), [(2, 1), (7, 1), (39, 5), (79, 10), (159, 20), (399, 50), (1000, 60), (5000, 60)])
def test_retry_after_is_half_the_queue(queue: int, expected: int, clock: Clock) -> None:
    """At 4 requests a second."""
    admission = make(max_requests=queue, max_bytes=10**6)
    serve(admission, clock, num_requests=400, seconds_each=0.25)
    for _ in range(queue):
        admission.enter(1)
    assert retry_after(refusal(lambda: admission.enter(1))) == expected


@pytest.mark.parametrize("reason", ["requests", "bytes", "tokens"])
def test_retry_after_grows_with_the_queue(reason: str, clock: Clock) -> None:
    waits: list[int] = []
    for queue in (2, 20, 60, 120, 250, 500, 4000):
        admission = make(max_requests=queue + (reason != "requests"), max_bytes=queue if reason == "bytes" else 10**6, max_tokens=queue)
        serve(admission, clock, num_requests=200, seconds_each=0.25)
        tickets = [admission.enter(1) for _ in range(queue)]
        if reason == "tokens":
            for ticket in tickets:
                admission.charge(ticket, 1)
            late = admission.enter(1)
            error = refusal(partial(admission.charge, late, 1))
        else:
            error = refusal(partial(admission.enter, 1))
        assert error.reason == reason
        waits.append(retry_after(error))
    assert waits == sorted(waits)
    assert waits[0] == 1
    assert waits[-1] == 60
    assert len(set(waits)) >= 5


def test_retry_after_grows_when_nothing_is_served(clock: Clock) -> None:
    """A stalled engine: the measured rate fades, and clients are told to stay away longer, a minute at most."""
    admission = make(max_requests=20)
    serve(admission, clock, num_requests=400, seconds_each=0.25)
    for _ in range(20):
        admission.enter(1)
    waits: list[int] = []
    for _ in range(8):
        waits.append(retry_after(refusal(lambda: admission.enter(1))))
        clock.wait(10)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (3, 60)
