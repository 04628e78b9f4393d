"""Who may come in: limits in requests, bytes and tokens, and when to come back.

A refusal costs little: it is decided before the body is decoded (requests, bytes) or before the engine hears of it (tokens).
"""

from __future__ import annotations

import math
import time

from jackfield.errors import Overloaded

__all__ = ["Admission", "Ticket"]

# The drain rate is an exponential mean over about so many seconds.
RATE_WINDOW_S = 10.0
MAX_RETRY_AFTER_S = 60


class Ticket:
    """What a request that is in has taken; `Admission.release` gives it back, once."""

    __slots__ = ("num_bytes", "num_tokens", "released")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_tokens = 0
        self.released = False


class Admission:
    """The limits of one server."""

    def __init__(self, *, max_requests: int, max_bytes: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_bytes = 0
        self.num_tokens = 0
        self.rejections: dict[str, int] = {"requests": 0, "bytes": 0, "tokens": 0}
        self._rate = 0.0
        self._drained = 0
        self._busy = 0.0
        self._since = time.monotonic()

    def enter(self, num_bytes: int) -> Ticket:
        """Take a request in. Raises: Overloaded, with the measured time after which there should be room."""
        if self.num_requests >= self.max_requests:
            raise self._refuse("requests", f"The queue is full: {self.num_requests} requests of {self.max_requests}.")
        # A lone request may be larger than the limit of the queue; the body limit is its bound.
        if self.num_requests and self.num_bytes + num_bytes > self.max_bytes:
            raise self._refuse("bytes", f"The queue is full: {self.num_bytes + num_bytes} bytes of {self.max_bytes}.")
        if not self.num_requests:
            self._since = time.monotonic()
        self.num_requests += 1
        self.num_bytes += num_bytes
        return Ticket(num_bytes)

    def grow(self, ticket: Ticket, num_bytes: int) -> None:
        """A body has more bytes than its request said. Raises: Overloaded."""
        more = num_bytes - ticket.num_bytes
        if self.num_bytes > ticket.num_bytes and self.num_bytes + more > self.max_bytes:
            raise self._refuse("bytes", f"The queue is full: {self.num_bytes + more} bytes of {self.max_bytes}.")
        self.num_bytes += more
        ticket.num_bytes = num_bytes

    def charge(self, ticket: Ticket, num_tokens: int) -> None:
        """Count a request's tokens against the limit. Raises: Overloaded."""
        # A lone request may have more than the queue's limit, as with bytes.
        if self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            raise self._refuse("tokens", f"The queue is full: {self.num_tokens + num_tokens} tokens of {self.max_tokens}.")
        self.num_tokens += num_tokens
        ticket.num_tokens = num_tokens

    def release(self, ticket: Ticket, *, served: bool) -> None:
        """A request is over, however it ended; served: the engine did the work, so it counts for the drain rate."""
        if ticket.released:
            return
        ticket.released = True
        self._drained += served
        self._update()
        self.num_requests -= 1
        self.num_bytes -= ticket.num_bytes
        self.num_tokens -= ticket.num_tokens

    def drain_rate(self) -> float:
        """Requests served a second, lately."""
        self._update()
        return self._rate

    def _update(self) -> None:
        """Take the time since the last look into the mean, if the server was busy in it: idle time is no part of the rate."""
        now = time.monotonic()
        if self.num_requests:
            self._busy += now - self._since
        self._since = now
        if self._busy < 0.1:
            return
        weight = 1 - math.exp(-self._busy / RATE_WINDOW_S)
        self._rate += weight * (self._drained / self._busy - self._rate)
        self._drained = 0
        self._busy = 0.0

    def _refuse(self, reason: str, message: str) -> Overloaded:
        self.rejections[reason] += 1
        rate = self.drain_rate()
        # Half of the queue has drained by then: waiting for all of it would leave the engine idle in between.
        wait = math.ceil(self.num_requests / 2 / rate) if rate > 0 else 1
        return Overloaded(message, retry_after_s=min(max(wait, 1), MAX_RETRY_AFTER_S), reason=reason)
