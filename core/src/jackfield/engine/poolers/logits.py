"""Logits of chosen tokens after a prompt's last one: `logits`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jackfield.engine.poolers import Span
from jackfield.engine.poolers.labels import gather

__all__ = ["LogitsPooler"]


class LogitsPooler:
    """head: states `[n, H]` to logits `[n, vocabulary]`, float32. With `use_activation` the chosen tokens' shares of each other."""

    outputs = ("logits",)

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._head = head

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
        """One number for each of a span's `logit_ids`."""
        logits = self._head(gather(hidden, spans, "last")).cpu()
        chosen = [row[list(span.params.logit_ids)] for row, span in zip(logits, spans, strict=True)]
        return [rows.softmax(-1) if span.params.use_activation else rows for rows, span in zip(chosen, spans, strict=True)]
