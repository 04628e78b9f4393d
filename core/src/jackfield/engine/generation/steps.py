"""One step of a model that generates: its size, and what goes wrong in it."""

from __future__ import annotations

import logging

import torch

from jackfield.engine.generation.growing import Generator
from jackfield.engine.generation.rows import Result
from jackfield.engine.generation.scheduler import Work
from jackfield.errors import EngineUnavailable, StepFailed

__all__ = ["StepSize", "run_step"]

log = logging.getLogger("jackfield.engine")

START_TOKENS = 128
# A step that took less than this share of its bound lets the next one be larger; between the two it stays as it is.
ROOM = 0.7
GROWTH = 1.25


class StepSize:
    """How many tokens that could wait a step takes, so that it stays under a bound: found by what steps took.

    least: tokens that a step takes however long they last. most: tokens that it never exceeds.
    """

    def __init__(self, bound_s: float, *, least: int, most: int) -> None:
        self._bound_s = bound_s
        self._least = least
        self._most = max(most, least)
        self._tokens = float(min(max(START_TOKENS, least), self._most))

    @property
    def tokens(self) -> int:
        """For the next step."""
        return int(self._tokens)

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step with so many of them has run."""
        if not num_tokens:
            return
        if seconds > self._bound_s:
            self._tokens = max(min(self._tokens, num_tokens * self._bound_s / seconds), self._least)
        elif seconds < ROOM * self._bound_s and num_tokens > self._tokens / 2:
            self._tokens = min(self._tokens * GROWTH, self._most)


def run_step(generator: Generator, works: list[Work], model: str) -> list[Result]:
    """One result a work. If the step raises, each is tried alone: the culprit fails, the others do not notice."""
    try:
        return generator.run(works)
    except Exception:
        log.exception("a step of %d choices of model %s raised; retrying one by one", len(works), model)
        return [_run_alone(generator, work) for work in works]


def _run_alone(generator: Generator, work: Work) -> Result:
    try:
        return generator.run([work])[0]
    except torch.OutOfMemoryError:
        return Result(error=EngineUnavailable(f"Not enough memory for {work.num_tokens} tokens after {work.start}."))
    except Exception as error:
        log.exception("request %d failed in the model", work.choice.request_id)
        return Result(error=StepFailed(f"The model failed on this input ({type(error).__name__}); the log has the details."))
