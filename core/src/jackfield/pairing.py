"""Pairs of texts as one prompt: how a tokenizer joins them, found by trying, and cutting the second so that both fit."""

from __future__ import annotations

from msgspec import Struct
from tokenizers import Tokenizer

__all__ = ["PairFrame", "pair_frame"]

_PROBES = (("a b", "b"), ("b", "a a"), ("", "a"), ("a", ""))


class PairFrame(Struct, frozen=True):
    """Ids before, between and after the texts of a pair."""

    head: list[int]
    middle: list[int]
    tail: list[int]

    @property
    def size(self) -> int:
        """Tokens that are of neither text."""
        return len(self.head) + len(self.middle) + len(self.tail)

    def join(self, first: list[int], second: list[int]) -> list[int]:
        """The ids of the pair."""
        return [*self.head, *first, *self.middle, *second, *self.tail]

    def segment(self, first: list[int]) -> int:
        """Tokens of the pair's first part: up to the second text."""
        return len(self.head) + len(first) + len(self.middle)


def pair_frame(tokenizer: Tokenizer) -> PairFrame | None:
    """The frame, or None for a tokenizer whose pairs are more than its texts' ids in a frame with the types 0 and 1, or 0 alone."""
    first, second = _PROBES[0]
    ids = _encode(tokenizer, first, second)[0]
    a, b = _alone(tokenizer, first), _alone(tokenizer, second)
    start = _find(ids, a, 0)
    then = _find(ids, b, start + len(a)) if start >= 0 else -1
    if then < 0:
        return None
    frame = PairFrame(ids[:start], ids[start + len(a) : then], ids[then + len(b) :])
    return frame if all(_agrees(tokenizer, frame, *probe) for probe in _PROBES) else None


def _agrees(tokenizer: Tokenizer, frame: PairFrame, first: str, second: str) -> bool:
    ids, types = _encode(tokenizer, first, second)
    a, b = _alone(tokenizer, first), _alone(tokenizer, second)
    segment = frame.segment(a)
    return ids == frame.join(a, b) and (not any(types) or types == [0] * segment + [1] * (len(ids) - segment))


def _encode(tokenizer: Tokenizer, first: str, second: str) -> tuple[list[int], list[int]]:
    encoding = tokenizer.encode_batch_fast([(first, second)])[0]
    return encoding.ids, encoding.type_ids


def _alone(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _find(ids: list[int], part: list[int], start: int) -> int:
    """Where a part lies in the ids, from `start` on; -1 if nowhere, or if it is nothing."""
    ends = range(start, len(ids) - len(part) + 1) if part else ()
    return next((place for place in ends if ids[place : place + len(part)] == part), -1)
