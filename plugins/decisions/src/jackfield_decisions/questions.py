"""A question in the form that both routes share: as the text that a model reads, and as numbers from the logits that it gives.

A model answers by one token, the first of a label: Yes or No, else a letter for each option. Probabilities are the labels' shares of each
other at temperature 1, as the model has them: nothing is calibrated.
"""

from __future__ import annotations

import string
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from jackfield import BadRequest

__all__ = [
    "MAX_LEVELS",
    "MAX_OPTIONS",
    "Content",
    "Question",
    "choice_confidence",
    "content_text",
    "expected",
    "score_confidence",
    "shares",
]

# One letter an option. Of longer labels the first tokens would not tell one from another.
MAX_OPTIONS = len(string.ascii_uppercase)
MAX_LEVELS = 10

Content = str | dict[str, Any] | list[Any]
Kind = Literal["yes_no", "choice", "score"]

# For a question whose options say it all.
_DEFAULT = {"yes_no": "Which of the two is so?", "choice": "Which option fits the text best?", "score": "Which level fits the text best?"}


class Question(Struct, frozen=True, kw_only=True):
    """One question. options: what each label stands for, in order; of a yes_no question they may be empty, what yes and what no means.

    param: the request's field, for error messages.
    """

    kind: Kind
    instructions: str
    options: tuple[str, ...]
    param: str

    @property
    def labels(self) -> tuple[str, ...]:
        """What a model answers with, one an option."""
        return ("Yes", "No") if self.kind == "yes_no" else tuple(string.ascii_uppercase[: len(self.options)])

    def text(self, state: str) -> str:
        """What a model is asked. The state comes first: prompts of one request have it in common."""
        lines = ["Text:", state, "", f"Question: {self.instructions or _DEFAULT[self.kind]}"]
        labels = self.labels
        if self.kind == "yes_no":
            lines += [f"{label} means: {meaning}" for label, meaning in zip(labels, self.options, strict=True) if meaning]
            lines.append("Reply with Yes or No alone.")
        else:
            lines += [f"{label}) {option}" for label, option in zip(labels, self.options, strict=True)]
            order = " (from the lowest level to the highest)" if self.kind == "score" else ""
            lines.append(f"Reply with one letter alone, {labels[0]} to {labels[-1]}{order}.")
        return "\n".join(lines)


def content_text(content: Content | None, param: str) -> str:
    """A text as it is, JSON as its text, nothing as an empty one. Raises: BadRequest for JSON that is nested too deeply."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        return msgspec.json.encode(content).decode()
    except RecursionError:
        raise BadRequest(f"{param} is nested too deeply.", param=param) from None


def shares(logits: list[NDArray[np.float32]]) -> list[float]:
    """logits: of each label, those of the tokens that it may begin with, which count together. The sum is 1 in float64."""
    top = max(one.max() for one in logits)
    weights = np.array([np.exp(one.astype(np.float64) - top).sum() for one in logits])
    probabilities: list[float] = (weights / weights.sum()).tolist()
    return probabilities


# Both as transformers has them (`decision/template_utils.py`), after TypeSafe's: thresholds that were found elsewhere keep their meaning.
def choice_confidence(probabilities: list[float]) -> float:
    """How far the likeliest of n lies above 1 / n: 1 when it has all, 0 when all are alike."""
    count = len(probabilities)
    return max(0.0, (count * max(probabilities) - 1) / (count - 1))


def score_confidence(probabilities: list[float]) -> float:
    """How near the others are to the likeliest level: 1 when it has all; 0 when they are, in the mean, as far as levels that are alike are
    from the middle of the scale, or further.
    """
    count = len(probabilities)
    best = probabilities.index(max(probabilities))
    distance = sum(one * abs(level - best) for level, one in enumerate(probabilities))
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / uniform)


def expected(probabilities: list[float]) -> float:
    """The mean of the levels' numbers, from 0, weighted by their probabilities."""
    return sum(level * one for level, one in enumerate(probabilities))
