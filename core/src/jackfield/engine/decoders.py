"""Decoder layers of Llama's kind in few calls, put in place of a model's own; the load-time check holds them equal.

A layer of transformers takes ten calls of modules and some thirty operations, and of a step that makes one token for each of a few texts
that is more than half. Here are four products (query, key and value in one, gate and up in one) and what cannot be left out between them.
Figures: benchmarks/ledger.md, "Steps that generate".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, rms_norm, silu
from transformers.activations import GELUTanh, SiLUActivation

from jackfield.engine.attention import Reach, attend
from jackfield.engine.generation.paged import attend_rows, current_batch
from jackfield.engine.linear import joined_linear, linear

__all__ = ["DecoderLayer", "replace_decoders"]

# Classes whose forward pass is the one below, by name, so that no modelling file is imported for it. Those with a norm before and one after
# each part, whose norms multiply by one more than their weight, are Gemma's.
_PLAIN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "SmolLM3DecoderLayer"})
_JOINED = frozenset({"Phi3DecoderLayer"})
_GEMMA = frozenset({"Gemma2DecoderLayer", "Gemma3DecoderLayer"})


def replace_decoders(base: Any) -> int:
    """Replace a model's decoder layers and its rotary positions, in place, if all layers are known; returns how many."""
    layers, rotary = getattr(base, "layers", None), getattr(base, "rotary_emb", None)
    if not isinstance(layers, torch.nn.ModuleList) or rotary is None or not all(map(_is_known, layers)):
        return 0
    for position, layer in enumerate(layers):
        layers[position] = DecoderLayer(layer)
    base.rotary_emb = _Rotary(rotary)
    return len(layers)


def _is_known(layer: torch.nn.Module) -> bool:
    kind = type(layer)
    if not kind.__module__.startswith("transformers.models.") or kind.__name__ not in _PLAIN | _JOINED | _GEMMA:
        return False
    attention: Any = layer.self_attn
    return _activation(layer.mlp) is not None and attention.head_dim % 2 == 0


def _activation(mlp: Any) -> Any:
    """What a layer does to its gate, in place of the module; None for an unknown one."""
    module = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    if isinstance(module, SiLUActivation | torch.nn.SiLU):
        return silu
    if isinstance(module, GELUTanh):
        return _gelu_tanh
    return None


def _gelu_tanh(states: torch.Tensor) -> torch.Tensor:
    return gelu(states, approximate="tanh")


class _Rotary(torch.nn.Module):
    """A model's rotary positions, as the layers below take them: `[T, 1, size]`, the sine with the sign of the half that it goes to."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self._own = own

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model's own takes."""
        cos, sin = self._own(*args, **kwargs)
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[0].unsqueeze(1), signed[0].unsqueeze(1)


class _Norm:
    """Root mean square (Zhang and Sennrich 2019) of the last dimension, times a weight."""

    __slots__ = ("_eps", "_shape", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = (weight.shape[-1],)

    @classmethod
    def of(cls, module: Any) -> _Norm:
        """transformers' module; Gemma's adds one to its weight."""
        weight = module.weight.detach()
        eps = getattr(module, "variance_epsilon", None) or module.eps
        return cls((1.0 + weight.float()).to(weight.dtype) if type(module).__name__.startswith("Gemma") else weight.clone(), eps)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states, self._shape, self._weight, self._eps)


class DecoderLayer(torch.nn.Module):
    """Attention and a gated feed-forward part, each normalised first and then added to its input (Touvron et al. 2023)."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        kind = type(layer).__name__
        if kind in _JOINED:
            self._qkv, self._gate_up = linear(own.qkv_proj), linear(mlp.gate_up_proj)
        else:
            self._qkv = joined_linear([own.q_proj, own.k_proj, own.v_proj])
            self._gate_up = joined_linear([mlp.gate_proj, mlp.up_proj])
        self._out, self._down = linear(own.o_proj), linear(mlp.down_proj)
        self._size = own.head_dim
        self._kv_heads = own.config.num_key_value_heads
        self._heads = own.config.num_attention_heads
        self._layer = own.layer_idx
        self._scale = own.scaling
        self._causal = bool(own.is_causal)
        self._window = _window(own, kind)
        self._softcap = getattr(own, "attn_logit_softcapping", None)
        self._rotates = bool(getattr(own, "use_rope", True))
        self._query_norm = _Norm.of(own.q_norm) if hasattr(own, "q_norm") else None
        self._key_norm = _Norm.of(own.k_norm) if hasattr(own, "k_norm") else None
        self._activation = _activation(mlp)
        self._before = _Norm.of(layer.input_layernorm)
        if kind in _GEMMA:
            self._after: _Norm | None = _Norm.of(layer.post_attention_layernorm)
            self._before_mlp = _Norm.of(layer.pre_feedforward_layernorm)
            self._after_mlp: _Norm | None = _Norm.of(layer.post_feedforward_layernorm)
        else:
            self._after = self._after_mlp = None
            self._before_mlp = _Norm.of(layer.post_attention_layernorm)

    def forward(self, states: torch.Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> torch.Tensor:
        """`[B, T, H]` to the same; B is 1 unless the model runs in buckets. What else is passed is about masks and caches: unused."""
        attended = self._out(self._attend(self._qkv(self._before(states)), position_embeddings))
        if self._after is not None:
            attended = self._after(attended)
        states = attended.add_(states)  # in place: the output of a product is nobody else's
        gate, up = self._gate_up(self._before_mlp(states)).chunk(2, dim=-1)
        more = self._down(self._activation(gate).mul_(up))
        if self._after_mlp is not None:
            more = self._after_mlp(more)
        result: torch.Tensor = more.add_(states)
        return result

    def _attend(self, joined: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """joined: query, key and value of each token, `[1, T, heads + 2 * key-value heads, size]` flattened."""
        rows = joined.view(joined.shape[1], -1, self._size)
        turning = rows[:, : self._heads + self._kv_heads]
        if self._query_norm is not None and self._key_norm is not None:
            normed = torch.cat([self._query_norm(turning[:, : self._heads]), self._key_norm(turning[:, self._heads :])], dim=1)
        else:
            normed = turning
        if self._rotates:
            cos, sin = positions
            torch.addcmul(normed * cos, normed.roll(self._size // 2, -1), sin, out=turning)
        elif normed is not turning:
            turning.copy_(normed)
        batch = current_batch()
        if batch is not None:
            query, cached = rows[:, : self._heads], rows[:, self._heads :].flatten(1)
            out = attend_rows(batch, self._layer, query, cached, self._scale, self._window, self._softcap)
            return out.reshape(1, len(rows), -1)
        query, key, value = (
            part[None].transpose(1, 2) for part in rows.split_with_sizes((self._heads, self._kv_heads, self._kv_heads), dim=1)
        )
        return attend(query, key, value, self._scale, Reach(self._causal, self._window), self._softcap).reshape(1, len(rows), -1)


def _window(attention: Any, kind: str) -> int | None:
    """How far a layer sees."""
    if hasattr(attention, "sliding_window"):
        own: int | None = attention.sliding_window
        return own
    return getattr(attention.config, "sliding_window", None) if kind in ("MistralDecoderLayer", "Phi3DecoderLayer") else None
