"""The requests of one model that generates: from a request to its choices, and from a step's tokens to what is told of them. Pure.

One delta a choice and step; every request ends with the last delta of its last choice, or with one error.
"""

from __future__ import annotations

import random
from array import array
from typing import Protocol

from jackfield.client import EngineRequest
from jackfield.engine.generation.blocks import BlockPool
from jackfield.engine.generation.grammars import Matcher
from jackfield.engine.generation.rows import Result, Row, Sampled
from jackfield.engine.generation.scheduler import Choice, GenerationScheduler, Work
from jackfield.errors import BadRequest, NonFiniteOutput, ServingError
from jackfield.outputs import Delta, FinishReason, TokenLogprob
from jackfield.params import SamplingParams

__all__ = ["Event", "Generation", "Generator", "GrowingChoice"]

# A piece of a request's answer, or the error that ends it.
Event = tuple[int, Delta | ServingError]

# Odd, so that the choices of a request get seeds of their own whatever its seed is.
_NEXT_SEED = 0x9E3779B97F4A7C15


class GrowingChoice(Choice):
    """A choice with what its request wants of it. told_prompt: what is known of its prompt's log-probabilities, if it is to be told.
    untold: tokens that its grammar forced before anything was computed."""

    row: Row
    request: _Request
    told_prompt: list[TokenLogprob | None] | None = None
    is_counted: bool = False
    is_told: bool = False
    untold: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        """How many tokens it has."""
        return len(self.token_ids) - self.num_prompt


class _Request:
    """A request and those of its choices that have not ended."""

    __slots__ = ("choices", "id")

    def __init__(self, request_id: int) -> None:
        self.id = request_id
        self.choices: dict[int, GrowingChoice] = {}


class Generator(Protocol):
    """Computes the steps of a model that generates. pool: the blocks of its cache. max_running: choices side by side. end_ids: the tokens
    that end its texts. switch: a length beyond which all of a sequence is computed differently (longrope); 0: none."""

    pool: BlockPool
    max_running: int
    end_ids: tuple[int, ...]
    switch: int

    def run(self, works: list[Work]) -> list[Result]:
        """One result a work, in their order; its choices are GrowingChoices."""
        ...

    def clear(self, blocks: list[int]) -> None:
        """What these blocks hold is not finite, perhaps."""
        ...


class Generation:
    """What a model is to generate. max_length: tokens of a prompt and its text together."""

    def __init__(self, generator: Generator, *, max_length: int) -> None:
        self.generator = generator
        self.scheduler = GenerationScheduler(generator.pool, max_running=generator.max_running)
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._stop_ids = frozenset(generator.end_ids)
        self.max_length = max_length
        self._switch = generator.switch
        self._requests: dict[int, _Request] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def add(self, given: EngineRequest, now: float, matcher: Matcher | None = None) -> None:
        """Take a request; its choices wait from now on. now: seconds, of any clock. matcher: of its grammar, at the begin of a text."""
        params = given.params
        assert isinstance(params, SamplingParams)
        self._requests[given.id] = request = _Request(given.id)
        seed = random.getrandbits(64) if params.seed is None else params.seed
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._stop_ids)
        for prompt in range(len(given.token_ids)):
            leader: GrowingChoice | None = None
            for sample in range(params.n):
                choice = self._choice(given, params, prompt, sample, now)
                prompt_ids = choice.token_ids if params.repetition_penalty != 1.0 else ()
                choice.row = Row(params=params, seed=seed + sample * _NEXT_SEED, end_ids=ends, prompt_ids=prompt_ids)
                choice.request, choice.leader = request, leader
                if matcher is not None:
                    choice.row.matcher = matcher.copy()
                    choice.untold = self._forced(choice, keep=1)
                if params.prompt_logprobs is not None and leader is None:
                    choice.told_prompt = [None]
                leader = leader or choice
                request.choices[choice.index] = choice
                self.scheduler.add(choice)

    def abort(self, request_id: int) -> None:
        """Forget a request: no event follows, and its blocks are free."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for choice in request.choices.values():
                self.scheduler.finish(choice)

    def end_choice(self, request_id: int, index: int) -> None:
        """Forget a choice: no delta follows, and its blocks are free."""
        request = self._requests.get(request_id)
        choice = request.choices.get(index) if request is not None else None
        if choice is not None:
            self._close(choice)

    def computed(self, works: list[Work], results: list[Result]) -> list[Event]:
        """A step has run: what is to be told of it. results: one a work."""
        events: list[Event] = []
        for work, result in zip(works, results, strict=True):
            choice = work.choice
            assert isinstance(choice, GrowingChoice)
            if choice.done:  # nobody wants it any more, or another choice of its request has failed
                continue
            if result.error is not None:
                self.abort(choice.request.id)
                events.append((choice.request.id, result.error))
                continue
            self.scheduler.computed(work)
            if not choice.is_counted:
                choice.is_counted = True
                self.num_prompt_tokens += choice.num_prompt
                self.num_cached_tokens += choice.num_cached or 0
            if choice.told_prompt is not None:
                # A prompt that is computed anew, since its blocks were taken, has been told in part.
                choice.told_prompt += result.told[len(choice.told_prompt) - 1 - work.start :]
            if work.samples:
                events.append((choice.request.id, self._sampled(choice, result.sampled)))
        return events

    def _sampled(self, choice: GrowingChoice, sampled: Sampled | None) -> Delta | ServingError:
        """The choice has its next token, unless it was to have none."""
        token_ids: tuple[int, ...] = ()
        told: tuple[TokenLogprob, ...] = ()
        first, choice.is_told = not choice.is_told, True
        before = len(choice.token_ids)
        matcher = choice.row.matcher
        if matcher is not None and matcher.error:
            self.abort(choice.request.id)
            return _stuck(choice.row, matcher)
        if sampled is not None:
            if sampled.token_id is None:
                self.generator.clear(self.scheduler.forget(choice))
                self.abort(choice.request.id)
                return _no_token(sampled)
            choice.token_ids.append(sampled.token_id)
            choice.row.add(sampled.token_id)
            self.num_tokens += 1
            token_ids, told = (sampled.token_id,), (sampled.told,) if sampled.told is not None else ()
            if matcher is not None and sampled.token_id not in choice.row.end_ids:
                if not matcher.accept(sampled.token_id):
                    self.abort(choice.request.id)
                    return _stuck(choice.row, matcher)
                token_ids += self._forced(choice)
        token_ids, choice.untold = choice.untold + token_ids, ()
        reason = self._finish_reason(choice)
        ends = reason == "stop" and bool(token_ids)
        if reason is not None:
            self._close(choice)
        elif before <= self._switch < len(choice.token_ids):
            self.scheduler.restart(choice, choice.salt + b"long")
        return Delta(
            index=choice.index,
            token_ids=token_ids,
            logprobs=told,
            finish_reason=reason,
            stop_reason=token_ids[-1] if ends and token_ids[-1] in choice.row.end_ids - self._stop_ids else None,
            ends_in_text=ends and token_ids[-1] not in choice.row.end_ids,
            num_cached_tokens=(choice.num_cached or 0) if first else 0,
            prompt_logprobs=tuple(choice.told_prompt) if first and choice.told_prompt is not None else (),
        )

    def _forced(self, choice: GrowingChoice, *, keep: int = 0) -> tuple[int, ...]:
        """Let a choice go on with the tokens that must follow, which are computed all at once. keep: so many tokens are left to be sampled.

        Not where each token's log-probability is to be told, which takes its own row of logits, nor where the request bars tokens.
        """
        params = choice.row.params
        if params.logprobs is not None or params.allowed_token_ids is not None or params.bad_words:
            return ()
        matcher, room = choice.row.matcher, choice.max_length - len(choice.token_ids) - keep
        if keep and len(choice.token_ids) <= self._switch:  # the prompt is computed as others' are that share its blocks
            room = min(room, self._switch - len(choice.token_ids))
        if matcher is None or room <= 0 or matcher.finished():
            return ()
        forced = matcher.forced()[:room]
        for count, token_id in enumerate(forced):
            if token_id in choice.row.end_ids or not matcher.accept(token_id):
                forced = forced[:count]
                break
        if keep and forced and matcher.finished():
            matcher.rollback(1)
            forced.pop()
        choice.token_ids.extend(forced)
        for token_id in forced:
            choice.row.add(token_id)
        self.num_tokens += len(forced)
        return tuple(forced)

    def _finish_reason(self, choice: GrowingChoice) -> FinishReason | None:
        if choice.row.matcher is not None and choice.row.matcher.finished():
            return "stop"
        if choice.number and choice.token_ids[-1] in choice.row.end_ids and choice.number >= choice.row.params.min_tokens:
            return "stop"
        return "length" if len(choice.token_ids) >= choice.max_length else None

    def _close(self, choice: GrowingChoice) -> None:
        self.scheduler.finish(choice)
        del choice.request.choices[choice.index]
        if not choice.request.choices:
            self._requests.pop(choice.request.id, None)

    def _choice(self, given: EngineRequest, params: SamplingParams, prompt: int, sample: int, now: float) -> GrowingChoice:
        token_ids = array("i", given.token_ids[prompt])
        rest = self.max_length - len(token_ids)
        return GrowingChoice(
            request_id=given.id,
            index=prompt * params.n + sample,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_length=len(token_ids) + (rest if params.max_tokens is None else min(params.max_tokens, rest)),
            priority=given.priority,
            arrival=now,
            salt=self._salt(given, params, prompt, len(token_ids)),
        )

    def _salt(self, given: EngineRequest, params: SamplingParams, prompt: int, length: int) -> bytes:
        """Whose blocks a prompt may share: nobody's, if its own logits are to be told, since those of a shared block are not computed."""
        own = b"%d.%d" % (given.id, prompt) if params.prompt_logprobs is not None else b""
        return b"\0".join([given.cache_salt.encode(), own, b"long" if self._switch and length > self._switch else b""])


def _no_token(sampled: Sampled) -> ServingError:
    if sampled.is_barred:
        return BadRequest(
            "allowed_token_ids, logit_bias, bad_words, min_tokens and the grammar together leave no token that may come next."
        )
    return NonFiniteOutput("The model gave non-finite values (NaN or infinity) for this input.")


def _stuck(row: Row, matcher: Matcher) -> ServingError:
    assert row.params.grammar is not None
    return BadRequest(f"{row.params.grammar.param} cannot be honoured any further: {matcher.error[:300]}", param=row.params.grammar.param)
