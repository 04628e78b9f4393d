"""From the probabilities of each token's labels to entities in a text.

The strategies and their results are those of transformers 5 (`pipelines/token_classification.py`), with two differences: a word's piece is
told by the tokenizer's own mark for one (`##`), not by its length, which accents and ligatures change; and `word` is the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

__all__ = ["Entity", "Strategy", "Tokens", "find_entities"]

Strategy = Literal["none", "simple", "first", "average", "max"]


class Entity(Struct, frozen=True, kw_only=True):
    """`entity` and `index` (the token's place in the prompt) from the strategy `none`, `entity_group` from the others."""

    entity: str | UnsetType = UNSET
    entity_group: str | UnsetType = UNSET
    score: float
    index: int | UnsetType = UNSET
    word: str
    start: int
    end: int

    @property
    def name(self) -> str:
        """Whichever of the two it has."""
        return self.entity or self.entity_group or ""


class Tokens(Struct, frozen=True, kw_only=True):
    """A text's tokens. strings: their pieces in the vocabulary. continuing: what a piece that continues a word begins with, where the
    vocabulary marks them. unknown: the piece of what is in no vocabulary."""

    text: str
    offsets: list[tuple[int, int] | None]
    strings: list[str]
    continuing: str = ""
    unknown: str | None = None

    def words(self) -> list[list[int]]:
        """Places of the tokens of each word."""
        words: list[list[int]] = []
        for place, offset in enumerate(self.offsets):
            if offset is None:
                continue
            if words and self._continues(self.strings[place], offset[0]):
                words[-1].append(place)
            else:
                words.append([place])
        return words

    def _continues(self, string: str, start: int) -> bool:
        if string == self.unknown:
            return False
        if self.continuing:
            return string.startswith(self.continuing) and string != self.continuing
        return start > 0 and " " not in self.text[start - 1 : start + 1]


class _Piece(Struct, frozen=True):
    """A token or a word, and the label that it has."""

    label: str
    score: float
    index: int
    start: int
    end: int


def find_entities(tokens: Tokens, probs: NDArray[np.float32], labels: Sequence[str | None], strategy: Strategy) -> list[Entity]:
    """probs: `[tokens, labels]`. In the order of the text, those without meaning (`O`) among them."""
    if strategy in ("none", "simple"):
        groups = [[place] for place, offset in enumerate(tokens.offsets) if offset is not None]
    else:
        groups = tokens.words()
    pieces = [_piece(tokens, group, probs[group], labels, strategy) for group in groups]
    if strategy != "none":
        return [_merge(tokens.text, run) for run in _runs(pieces)]
    return [
        Entity(entity=one.label, score=one.score, index=one.index, word=tokens.text[one.start : one.end], start=one.start, end=one.end)
        for one in pieces
    ]


def _piece(tokens: Tokens, group: list[int], probs: NDArray[np.float32], labels: Sequence[str | None], strategy: Strategy) -> _Piece:
    """probs: of the group's tokens."""
    chosen = int(probs.max(axis=1).argmax()) if strategy == "max" else 0
    row = probs.mean(axis=0) if strategy == "average" else probs[chosen]
    number = int(row.argmax())
    first, last = tokens.offsets[group[0]], tokens.offsets[group[-1]]
    assert first is not None
    assert last is not None
    return _Piece(labels[number] or f"LABEL_{number}", float(row[number]), group[0], first[0], last[1])


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Neighbours of one tag; a `B-` begins anew."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        begins, tag = _tag(piece.label)
        if runs and not begins and _tag(runs[-1][-1].label)[1] == tag:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and of what kind. One without `B-` or `I-` continues."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _merge(text: str, run: list[_Piece]) -> Entity:
    start, end = run[0].start, run[-1].end
    score = float(np.mean([piece.score for piece in run]))
    return Entity(entity_group=run[0].label.split("-", 1)[-1], score=score, word=text[start:end], start=start, end=end)
