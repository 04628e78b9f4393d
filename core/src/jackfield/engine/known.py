"""What stands for the base of a model whose states are known already, so that the checkpoint's own head can be run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

__all__ = ["KnownBase"]


@dataclass
class _Given(ModelOutput):  # type: ignore[misc]  # transformers types it as Any
    """What a base model returns, by name and by place."""

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    hidden_states: Any = None
    attentions: Any = None
    past_key_values: Any = None
    cache: Any = None
    cross_attentions: Any = None


class KnownBase(torch.nn.Module):
    """Stands for the base of a model whose states are known already."""

    def __init__(self, pooler: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Given:
        """inputs_embeds: the last hidden states, `[n, L, H]`."""
        return _Given(last_hidden_state=inputs_embeds, pooler_output=None if self.pooler is None else self.pooler(inputs_embeds))
