"""Encoder layers of BERT's kind in few calls, put in place of a model's own; the load-time check holds them equal.

A layer computes twelve operations, and transformers spends 0.6 ms of Python on each layer to get to them (decorators, signatures, the
configuration's own attribute access, a module for every operation), which is a third of the pass of a short text. Figures:
benchmarks/ledger.md, "Layers".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from jackfield.engine.attention import attend, is_packed
from jackfield.engine.linear import activated_linear, is_exact_gelu, joined_linear, linear

__all__ = ["PostNormLayer", "replace_layers"]

# The classes whose forward pass, without cross attention, is the one below, by the names of their parts. Looked up by name, so that no
# modelling file is imported for it.
_BERT = frozenset({"BertLayer", "CamembertLayer", "Data2VecTextLayer", "ElectraLayer", "ErnieLayer", "RobertaLayer", "XLMRobertaLayer"})
_DISTILBERT = frozenset({"TransformerBlock"})


def replace_layers(model: torch.nn.Module) -> int:
    """Replace the layers that are known, in place; returns how many."""
    count = 0
    for module in list(model.modules()):
        if not isinstance(module, torch.nn.ModuleList):
            continue
        for position, layer in enumerate(module):
            replacement = _replacement(layer)
            if replacement is not None:
                module[position] = replacement
                count += 1
    return count


def _replacement(layer: Any) -> PostNormLayer | None:
    kind = type(layer).__name__
    if not type(layer).__module__.startswith("transformers.models."):
        return None
    if kind in _BERT and not layer.is_decoder:
        own, out = layer.attention.self, layer.attention.output
        return PostNormLayer(
            inputs=[own.query, own.key, own.value],
            num_heads=own.num_attention_heads,
            scale=own.scaling,
            output=out.dense,
            attention_norm=out.LayerNorm,
            up=layer.intermediate.dense,
            activation=layer.intermediate.intermediate_act_fn,
            down=layer.output.dense,
            output_norm=layer.output.LayerNorm,
        )
    if kind in _DISTILBERT:
        own, ffn = layer.attention, layer.ffn
        return PostNormLayer(
            inputs=[own.q_lin, own.k_lin, own.v_lin],
            num_heads=own.n_heads,
            scale=own.scaling,
            output=own.out_lin,
            attention_norm=layer.sa_layer_norm,
            up=ffn.lin1,
            activation=ffn.activation,
            down=ffn.lin2,
            output_norm=layer.output_layer_norm,
        )
    return None


class PostNormLayer(torch.nn.Module):
    """Attention and a feed-forward part, each added to its input and then normalised (Devlin et al. 2018, after Vaswani et al. 2017)."""

    def __init__(
        self,
        *,
        inputs: list[torch.nn.Linear],
        num_heads: int,
        scale: float,
        output: torch.nn.Linear,
        attention_norm: torch.nn.LayerNorm,
        up: torch.nn.Linear,
        activation: torch.nn.Module,
        down: torch.nn.Linear,
        output_norm: torch.nn.LayerNorm,
    ) -> None:
        super().__init__()
        self._inputs = joined_linear(inputs)
        self._num_heads = num_heads
        self._scale = scale
        self._output = linear(output)
        self._attention_norm = attention_norm
        self._up = activated_linear(up) if is_exact_gelu(activation) else torch.nn.Sequential(linear(up), activation)
        self._down = linear(down)
        self._output_norm = output_norm

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`[B, T, H]` to the same; B is 1 in a packed batch. What else a model passes to its layers is about masks and caches: unused."""
        batch, tokens, width = states.shape
        query, key, value = self._inputs(states).view(batch, tokens, 3, self._num_heads, -1).transpose(1, 3).unbind(2)
        if is_packed():
            attended = attend(query, key, value, self._scale)
        else:
            attended = scaled_dot_product_attention(query, key, value, scale=self._scale).transpose(1, 2)
        # In place: the outputs of these products are nobody else's.
        states = self._attention_norm(self._output(attended.reshape(batch, tokens, width)).add_(states))
        normed: torch.Tensor = self._output_norm(self._down(self._up(states)).add_(states))
        return normed
