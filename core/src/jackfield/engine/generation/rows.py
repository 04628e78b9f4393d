"""What is known of a choice where its next token is chosen, and what comes of it. Pure.

The noise of a row is a number of its own, made from its seed and its position by a hash. So a text depends on nobody else's, and a seed
gives the same text whatever was in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jackfield.engine.generation.grammars import Matcher
from jackfield.errors import ServingError
from jackfield.outputs import TokenLogprob
from jackfield.params import SamplingParams

__all__ = ["Result", "Row", "Sampled", "uniform"]

_MASK = 2**64 - 1


@dataclass(kw_only=True)
class Row:
    """A choice that grows. end_ids: tokens that end it. prompt_ids, text_ids: what it has been given and has made.

    seed: of its noise; two choices of a request have two. matcher: of its grammar, which has seen the text.
    """

    params: SamplingParams
    seed: int
    end_ids: frozenset[int] = frozenset()
    prompt_ids: Sequence[int] = ()
    text_ids: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    # Of the text's tokens how often each was made, and the different ones of the prompt: for the penalties, empty without them.
    counts: Counter[int] = field(default_factory=Counter)
    prompt_set: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.params.repetition_penalty != 1.0:
            self.prompt_set = frozenset(self.prompt_ids)

    @property
    def penalises(self) -> bool:
        """Whether what was made counts."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    @property
    def changes(self) -> bool:
        """Whether its logits are anything but the model's own now."""
        params = self.params
        return (
            self.matcher is not None
            or params.allowed_token_ids is not None
            or bool(params.logit_bias or params.bad_words)
            or len(self.text_ids) < params.min_tokens
            or self.penalises
        )

    def add(self, token_id: int) -> None:
        """A token was chosen."""
        self.text_ids.append(token_id)
        if self.penalises:
            self.counts[token_id] += 1


class Sampled(NamedTuple):
    """A row's token, and what is to be told of it. None: no token; its logits are not finite, or (`is_barred`) its request bars all."""

    token_id: int | None
    told: TokenLogprob | None = None
    is_barred: bool = False


class Result(NamedTuple):
    """What a step gave a choice: the token, if one was due; of the prompt's tokens after the step's first what is to be told, if it is; or
    what went wrong."""

    sampled: Sampled | None = None
    told: Sequence[TokenLogprob] = ()
    error: ServingError | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is as good as random: SplitMix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195) at that position."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 2**53
