"""Logits of labels and what is made of them: `classify`, `score`, `token_classify`.

The head is the checkpoint's own: its whole forward pass runs with a base that gives back the states it is handed, so no head is known by
name. Which states a head reads (the first token's, the last one's, their mean, or all of them, which then go through it one text at a
time) is found at load, by comparing with the whole model. Head and activation are computed in float32 whatever the model's dtype: in
bfloat16 a sigmoid is 1 from a logit of 6 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch

from jackfield.engine.known import KnownBase
from jackfield.engine.poolers import Span

__all__ = ["ROWS", "Head", "LabelPooler", "detach_head"]

# What a head of a whole text may read; "all" is right for every head.
ROWS = ("first", "last", "mean", "all")


class _First(torch.nn.Module):
    """The first token's states, `[n, L, H]` to `[n, H]`."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, 0]


class Head:
    """States to logits, by the checkpoint's own modules, in float32: they are small, and in bfloat16 logits above 4 are 0.03 apart."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model.float()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Its weights."""
        return self._model.parameters()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, L, H]` to `[n, labels]`, or `[n, L, labels]` from a head of tokens; float32."""
        logits: torch.Tensor = self._model(inputs_embeds=states.float()).logits
        return logits


def detach_head(model: Any) -> tuple[torch.nn.Module, Head]:
    """Take a model apart into its base and its head. Both keep the weights they had; the model is not to be used any more."""
    base: Any = model.base_model
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        base.pooler = None
    if isinstance(pooler, torch.nn.Linear):  # ALBERT's pooler is in its forward pass
        pooler = torch.nn.Sequential(_First(), pooler, base.pooler_activation)
    setattr(model, model.base_model_prefix, KnownBase(pooler))
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # a head that looks for the last token wants one, and is never handed padding
    return base, Head(model)


class LabelPooler:
    """Runs a head and its activation.

    rows: what a head of texts reads; None for a head of tokens. activation: of classify and token_classify; score_activation: of score.
    """

    def __init__(self, head: Head, rows: str | None, *, activation: torch.nn.Module, score_activation: torch.nn.Module) -> None:
        self.outputs: tuple[str, ...] = ("token_classify",) if rows is None else ("classify", "score")
        self.head = head
        self.rows = rows
        self._activations = {"classify": activation, "token_classify": activation, "score": score_activation}

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> Many[torch.Tensor]:
        """`[labels]` a span, or `[length, labels]` for token_classify."""
        logits = self.logits(hidden, spans)
        activation = self._activations[output]
        return [rows if span.params.use_activation is False else activation(rows) for rows, span in zip(logits, spans, strict=True)]

    def logits(self, hidden: torch.Tensor, spans: list[Span]) -> Many[torch.Tensor]:
        """What the head says, before any activation."""
        if self.rows == "all":
            return torch.cat([self.head(hidden[None, span.start : span.end]) for span in spans]).cpu().unbind()
        if self.rows is not None:
            return self.head(gather(hidden, spans, self.rows)[:, None]).cpu().unbind()
        states = torch.cat([hidden[span.start : span.end] for span in spans])
        return torch.split(self.head(states[None])[0], [span.length for span in spans])


def gather(hidden: torch.Tensor, spans: list[Span], rows: str) -> torch.Tensor:
    """`[T, H]` to `[n, H]`."""
    if rows == "mean":
        return torch.stack([hidden[span.start : span.end].mean(0, dtype=torch.float32) for span in spans])
    places = [span.start if rows == "first" else span.end - 1 for span in spans]
    return hidden.index_select(0, torch.tensor(places, device=hidden.device))
