"""Decoder layers of Llama's kind in few calls, put in place of a model's own; the load-time check holds them equal.

A layer of transformers takes ten calls of modules and some thirty operations, and of a step that makes one token for each of a few texts
that is more than half. Here are four products (query, key and value in one, gate and up in one) and what cannot be left out between them.
Figures: benchmarks/ledger.md, "Steps that generate".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.linalg import vector_norm
from torch.nn.functional import gelu, silu
from transformers.activations import GELUTanh, SiLUActivation

from jackfield.engine.attention import Reach, attend
from jackfield.engine.blocks import Blocks
from jackfield.engine.generation.paged import PagedBatch, attend_rows, current_batch
from jackfield.engine.int4 import Call, Int4Linear, Product, find_limit, stored_blocks
from jackfield.engine.linear import direct, linear, linear_of
from jackfield.errors import ModelError

__all__ = ["DecoderLayer", "quantize_decoders", "replace_decoders"]

# The calls of a layer: query, key and value; out; gate and up; down.
_Four = tuple[Call, Call, Call, Call]
# The linear layers of each of the four products, as the files name them.
_NAMES = (
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
)
_JOINED_NAMES = (["self_attn.qkv_proj"], ["self_attn.o_proj"], ["mlp.gate_up_proj"], ["mlp.down_proj"])

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


def quantize_decoders(base: Any, folder: Path, prefix: str) -> int:
    """Give the layers of `replace_decoders` 4-bit products for steps of few tokens; returns up to how many, 0 where that is never faster.

    folder: of the weights. prefix: of the base's names in it. Raises: ModelError, without the model's name.
    """
    layers: list[Any] = list(getattr(base, "layers", ()))
    if not layers or not all(isinstance(layer, DecoderLayer) for layer in layers):
        raise ModelError(f"4-bit products need layers of Llama's kind, and {type(base).__name__} runs with its own")
    parameter = next(base.parameters())
    if parameter.device.type != "cpu":
        raise ModelError(f"4-bit products run on the CPU, and the model is on {parameter.device}")
    with stored_blocks(folder) as read:
        products = [layer.products(read, f"{prefix}layers.{number}", parameter.dtype) for number, layer in enumerate(layers)]
    limit = find_limit([product for four in products for product in four], parameter.dtype)
    for layer, four in zip(layers, products, strict=True):
        qkv, out, gate_up, down = (product.few for product in four)
        if limit:  # else they are let go
            layer.use_few((qkv, out, gate_up, down), limit)
    return limit


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
    """Root mean square (Zhang and Sennrich 2019) of the last dimension, times a weight. torch's own takes 56 us for one row."""

    __slots__ = ("_eps", "_share", "weight")

    def __init__(self, module: Any) -> None:
        """module: transformers'; Gemma's adds one to its weight."""
        weight = module.weight.detach()
        # A copy in any case: a view would keep the whole file of weights mapped.
        self.weight = weight.float().add(1.0 if type(module).__name__.startswith("Gemma") else 0.0)
        eps = getattr(module, "variance_epsilon", None) or module.eps
        self._eps = torch.tensor([eps], dtype=torch.float32, device=weight.device)
        self._share = 1.0 / weight.shape[-1]

    def factor(self, states: torch.Tensor) -> torch.Tensor:
        """What each row is multiplied by, before the weight: `[..., 1]`, float32."""
        norm = vector_norm(states, 2, (-1,), keepdim=True, dtype=torch.float32)
        return torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return (states * self.factor(states)).mul_(self.weight).to(states.dtype)


class _NormedProduct(torch.nn.Module):
    """A norm and the product of its output, `[..., in]` to `[..., out]`.

    The norm's weight lies in the product's. Its factor, one number a row, is applied to the output, which comes to the same.
    """

    def __init__(self, norm: _Norm, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        self._norm = norm
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases: list[torch.Tensor | None] = [layer.bias for layer in layers]
        present = [bias.detach() for bias in biases if bias is not None]
        self._bias = torch.cat(present) if present else None
        # In float16 rows that are not normalised may be beyond its range.
        self._folded = weight.dtype != torch.float16
        folded = weight.float().mul_(norm.weight).to(weight.dtype) if self._folded else weight
        self._product = linear_of(folded, None if self._folded else self._bias)
        self._call = direct(self._product)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not self._folded:
            result: torch.Tensor = self._call(self._norm(states))
            return result
        return self._finished(self._call(states), states)

    def _finished(self, result: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        result.mul_(self._norm.factor(states))
        return result if self._bias is None else result.add_(self._bias)

    def of_few_bits(self, blocks: Blocks, dtype: torch.dtype) -> Call:
        """The same from 4-bit weights, into which the norm's cannot be folded: 32 inputs share a scale."""
        product, weight = Int4Linear(blocks, dtype=dtype), self._norm.weight.to(dtype)
        return lambda states: self._finished(product(states * weight), states)


class DecoderLayer(torch.nn.Module):
    """Attention and a gated feed-forward part, each normalised first and then added to its input (Touvron et al. 2023)."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        kind = type(layer).__name__
        before_mlp = layer.pre_feedforward_layernorm if kind in _GEMMA else layer.post_attention_layernorm
        inputs = [own.qkv_proj] if kind in _JOINED else [own.q_proj, own.k_proj, own.v_proj]
        gates = [mlp.gate_up_proj] if kind in _JOINED else [mlp.gate_proj, mlp.up_proj]
        self._qkv = _NormedProduct(_Norm(layer.input_layernorm), inputs)
        self._gate_up = _NormedProduct(_Norm(before_mlp), gates)
        self._out, self._down = linear(own.o_proj), linear(mlp.down_proj)
        self._biases = tuple(None if part.bias is None else part.bias.detach().clone() for part in (own.o_proj, mlp.down_proj))
        self._calls: _Four = (self._qkv.forward, direct(self._out), self._gate_up.forward, direct(self._down))
        self._few: _Four = self._calls
        self._limit = 0
        self._stored = _JOINED_NAMES if kind in _JOINED else _NAMES
        self._size = own.head_dim
        self._kv_heads = own.config.num_key_value_heads
        self._heads = own.config.num_attention_heads
        self._layer = own.layer_idx
        self._scale = own.scaling
        self._causal = bool(own.is_causal)
        self._window = _window(own, kind)
        self._softcap = getattr(own, "attn_logit_softcapping", None)
        self._rotates = bool(getattr(own, "use_rope", True))
        self._query_norm = _Norm(own.q_norm) if hasattr(own, "q_norm") else None
        self._key_norm = _Norm(own.k_norm) if hasattr(own, "k_norm") else None
        self._activation = _activation(mlp)
        self._after = _Norm(layer.post_attention_layernorm) if kind in _GEMMA else None
        self._after_mlp = _Norm(layer.post_feedforward_layernorm) if kind in _GEMMA else None

    def products(self, read: Callable[[list[str]], Blocks], name: str, dtype: torch.dtype) -> list[Product]:
        """The four, with a form of 4 bits. read: the blocks of linear layers by their names. name: of this layer among them."""
        qkv, out, gate_up, down = (read([f"{name}.{part}" for part in parts]) for parts in self._stored)
        few: list[Call] = [
            self._qkv.of_few_bits(qkv, dtype),
            Int4Linear(out, self._biases[0], dtype=dtype),
            self._gate_up.of_few_bits(gate_up, dtype),
            Int4Linear(down, self._biases[1], dtype=dtype),
        ]
        sizes = [2 * q.shape[1] for q, _, _ in (qkv, out, gate_up, down)]
        return [Product(*both) for both in zip(few, self._calls, sizes, strict=True)]

    def use_few(self, calls: _Four, limit: int) -> None:
        """Take these four in steps that generate and have up to `limit` tokens. Vectors are made by the plain ones, whatever the number."""
        self._few, self._limit = calls, limit

    def forward(self, states: torch.Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> torch.Tensor:
        """`[B, T, H]` to the same; B is 1 unless the model runs in buckets. What else is passed is about masks and caches: unused."""
        batch = current_batch()
        qkv, out, gate_up, down = self._few if batch is not None and states.shape[1] <= self._limit else self._calls
        attended = out(self._attend(qkv(states), position_embeddings, batch))
        if self._after is not None:
            attended = self._after(attended)
        states = attended.add_(states)  # in place: the output of a product is nobody else's
        gate, up = gate_up(states).chunk(2, dim=-1)
        more = down(self._activation(gate).mul_(up))
        if self._after_mlp is not None:
            more = self._after_mlp(more)
        result: torch.Tensor = more.add_(states)
        return result

    def _attend(self, joined: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], batch: PagedBatch | None) -> torch.Tensor:
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
