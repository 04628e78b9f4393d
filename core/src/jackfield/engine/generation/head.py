"""From the states of chosen tokens to logits, by the checkpoint's own modules: scales, soft caps and biases are where it has them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from jackfield.engine.known import KnownBase
from jackfield.engine.linear import linear

__all__ = ["LogitsHead", "logits_head"]


class LogitsHead:
    """States `[n, H]` to logits `[n, vocabulary]` in float32."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Each row by itself."""
        logits: torch.Tensor = self.model(inputs_embeds=states[None], use_cache=False).logits
        return logits[0].float()


def logits_head(model: Any) -> LogitsHead:
    """The head of a causal model, of the same weights; the model stays whole."""
    head = copy.copy(model)
    head.__dict__["_modules"] = dict(model.named_children())
    setattr(head, model.base_model_prefix, KnownBase())
    output = model.get_output_embeddings()
    for name, child in list(head.named_children()):
        if child is output and type(child) is torch.nn.Linear:
            setattr(head, name, linear(child))
    return LogitsHead(head)
