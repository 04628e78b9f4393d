"""Watches the stages of an endpoint from outside, as any plugin could: their CPU time, and whether they change the request."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import msgspec

from jackfield.context import Context
from jackfield.hookspecs import stageimpl
from jackfield.outputs import Delta

__all__ = ["StageProbe"]

Stage = Generator[None, Any, Any]


class StageProbe:
    """A plugin around the stages. seconds: CPU time of each call, by stage. changed: stages after which the request was another."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.changed: set[str] = set()

    def medians_ms(self) -> dict[str, float]:
        """Median CPU time of each stage that ran, in milliseconds."""
        return {stage: statistics.median(times) * 1e3 for stage, times in self.seconds.items()}

    @stageimpl(wrapper=True)
    def preprocess(self, ctx: Context[Any]) -> Stage:
        """Around the stage."""
        return (yield from self._around("preprocess", ctx))

    @stageimpl(wrapper=True)
    def pooling_params(self, ctx: Context[Any]) -> Stage:
        """Around the stage."""
        return (yield from self._around("pooling_params", ctx))

    @stageimpl(wrapper=True)
    def sampling_params(self, ctx: Context[Any]) -> Stage:
        """Around the stage."""
        return (yield from self._around("sampling_params", ctx))

    @stageimpl(wrapper=True)
    def build_response(self, ctx: Context[Any]) -> Stage:
        """Around the stage."""
        return (yield from self._around("build_response", ctx))

    @stageimpl(wrapper=True)
    def build_chunk(self, ctx: Context[Any], delta: Delta) -> Stage:
        """Around the stage."""
        return (yield from self._around("build_chunk", ctx))

    def _around(self, stage: str, ctx: Context[Any]) -> Stage:
        before = msgspec.msgpack.encode(ctx.request)
        started = time.thread_time()
        try:
            return (yield)
        finally:
            self.seconds[stage].append(time.thread_time() - started)
            if msgspec.msgpack.encode(ctx.request) != before:
                self.changed.add(stage)
