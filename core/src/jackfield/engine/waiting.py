"""What callers of an engine wait for, on the event loop: one answer a request, or the pieces of a generated one. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from msgspec import structs

from jackfield.client import EngineRequest
from jackfield.errors import EngineUnavailable, ServingError
from jackfield.outputs import Delta, PoolingOutputs
from jackfield.params import SamplingParams

__all__ = ["Waiting"]


class Waiting:
    """By request id. abort: told the id of a request whose caller gave up."""

    def __init__(self, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._waiting: dict[int, asyncio.Future[PoolingOutputs] | _Pieces] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def answer(self, request_id: int, send: Callable[[], None]) -> PoolingOutputs:
        """The one answer of a request that `send` sends; cancelling aborts it."""
        future: asyncio.Future[PoolingOutputs] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        send()
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(request_id)
            raise

    async def pieces(self, request: EngineRequest, send: Callable[[], None]) -> AsyncGenerator[Delta]:
        """The deltas of a request that `send` sends, until each choice has had its last; closing aborts it."""
        assert isinstance(request.params, SamplingParams)
        self._waiting[request.id] = pieces = _Pieces(len(request.token_ids) * request.params.n)
        send()
        try:
            while pieces.is_open:
                for delta in await pieces.take():
                    yield delta
        finally:
            self._give_up(request.id)

    def settle(self, request_id: int, outcome: PoolingOutputs | Delta | ServingError) -> None:
        """Something has come for a request, whose caller may have gone by now."""
        caller = self._waiting.get(request_id)
        if caller is None:
            return
        if isinstance(caller, _Pieces):
            assert not isinstance(outcome, PoolingOutputs)
            caller.add(outcome)
            if not caller.num_open:
                del self._waiting[request_id]
            return
        del self._waiting[request_id]
        if caller.done():
            return
        if isinstance(outcome, ServingError):
            caller.set_exception(outcome)
        else:
            assert isinstance(outcome, PoolingOutputs)
            caller.set_result(outcome)

    def fail_all(self, message: str) -> None:
        """No answer comes any more."""
        for request_id in list(self._waiting):
            self.settle(request_id, EngineUnavailable(message))

    def _give_up(self, request_id: int) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._abort(request_id)


class _Pieces:
    """Deltas that have come and were not taken yet: one a choice, since a caller that is late takes them together."""

    def __init__(self, num_choices: int) -> None:
        self.num_open = num_choices
        self.come: dict[int, Delta] = {}
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether there is something to take, or will be."""
        return bool(self.num_open or self.come) or self._error is not None

    def add(self, outcome: Delta | ServingError) -> None:
        """The next, or the last."""
        if isinstance(outcome, ServingError):
            self._error = outcome
            self.num_open = 0
        else:
            before = self.come.get(outcome.index)
            self.come[outcome.index] = outcome if before is None else _joined(before, outcome)
            self.num_open -= outcome.finish_reason is not None
        self._changed.set()

    async def take(self) -> list[Delta]:
        """What has come since the last time. Raises: ServingError, after what came before it."""
        if not self.come and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if not self.come and self._error is not None:
            raise self._error
        come, self.come = self.come, {}
        return list(come.values())


def _joined(first: Delta, second: Delta) -> Delta:
    return structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
    )
