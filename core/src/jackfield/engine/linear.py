"""Faster linear layers on a CPU, put in place of a model's own: modelling code stays untouched, the load-time check holds them equal.

What pays, measured on 2 cores with AVX-512 and AMX, MiniLM's layers (benchmarks/ledger.md): weights reordered once for oneDNN instead of
at every product (32 tokens float32 0.83 to 0.46 ms a layer, 256 tokens bfloat16 1.9 to 1.2); query, key and value as one product; the
exact GELU inside the product before it (0.9 of 10 ms float32, a tenth of a bfloat16 pass).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.activations import GELUActivation

from jackfield.engine.cpu import cpu_flags

__all__ = ["activated_linear", "direct", "is_exact_gelu", "joined_linear", "linear", "linear_of", "replace_linears"]

# Names of linear layers of one module that all take the module's input.
_JOINED = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
# A linear layer and the activation that its module applies to its output, and to nothing else.
_ACTIVATED = (("dense", "intermediate_act_fn"), ("lin1", "activation"))


def _pays(weight: torch.Tensor) -> bool:
    """Only where it was measured: processors with AVX-512. oneDNN refuses float16 on those that have no products of it."""
    if weight.dtype == torch.float16 and not cpu_flags() & {"avx512_fp16", "avx_ne_convert"}:
        return False
    return weight.device.type == "cpu" and "avx512f" in cpu_flags() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear(layer: torch.nn.Linear) -> torch.nn.Module:
    """The same, as fast as it gets here."""
    return ReorderedLinear(layer.weight, layer.bias) if _pays(layer.weight) else layer


def activated_linear(layer: torch.nn.Linear) -> torch.nn.Module:
    """The layer and the exact GELU of its output."""
    return ReorderedLinear(layer.weight, layer.bias, gelu=True) if _pays(layer.weight) else torch.nn.Sequential(layer, torch.nn.GELU())


def joined_linear(layers: list[torch.nn.Linear]) -> torch.nn.Module:
    """Layers of one input as one product: their outputs side by side. All of them have a bias, or none."""
    biases: list[torch.Tensor | None] = [layer.bias for layer in layers]
    present = [bias for bias in biases if bias is not None]
    return linear_of(torch.cat([layer.weight for layer in layers]), torch.cat(present) if present else None)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """A linear layer of these, as fast as it gets here."""
    if _pays(weight):
        return ReorderedLinear(weight, bias)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


def direct(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """How to call a layer of ours without what torch does around a module's call: 3 us of a hundred."""
    return module.forward if isinstance(module, ReorderedLinear) else module


def is_exact_gelu(function: object) -> bool:
    """Whether an activation is the GELU itself and none of its approximations."""
    return isinstance(function, GELUActivation) or (isinstance(function, torch.nn.GELU) and function.approximate == "none")


def replace_linears(model: torch.nn.Module) -> int:
    """Replace what can be replaced, in place; returns how many layers were."""
    if not _pays(next(model.parameters())):
        return 0
    count = 0
    for module in list(model.modules()):
        for names in _JOINED:
            count += _join(module, names)
        for linear, activation in _ACTIVATED:
            count += _activate(module, linear, activation)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, ReorderedLinear(child.weight, child.bias))
                count += 1
    return count


def _join(module: torch.nn.Module, names: tuple[str, ...]) -> int:
    layers = [getattr(module, name, None) for name in names]
    if any(type(layer) is not torch.nn.Linear for layer in layers):
        return 0
    linears = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    if len({(layer.in_features, layer.bias is None) for layer in linears}) != 1:
        return 0
    joined = JoinedLinear(linears)
    for position, name in enumerate(names):
        setattr(module, name, JoinedPart(joined, position))
    return len(names)


def _activate(module: torch.nn.Module, linear: str, activation: str) -> int:
    layer, function = getattr(module, linear, None), getattr(module, activation, None)
    if type(layer) is not torch.nn.Linear or not is_exact_gelu(function):
        return 0
    setattr(module, linear, ReorderedLinear(layer.weight, layer.bias, gelu=True))
    setattr(module, activation, torch.nn.Identity())
    return 1


# What torch's own compiler calls.
_product: Any = torch.ops.mkldnn._linear_pointwise.default if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None  # noqa: SLF001


class ReorderedLinear(torch.nn.Module):
    """A linear layer whose weight lies in oneDNN's own order; the original is let go."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gelu: bool = False) -> None:
        super().__init__()
        self.out_features = weight.shape[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())  # noqa: SLF001
        self._bias = None if bias is None else bias.detach().clone()  # a view would keep the whole file of weights mapped
        self._post: tuple[str, list[Any], str] = ("gelu", [], "none") if gelu else ("none", [], "")

    @property
    def weight(self) -> torch.Tensor:
        """Whose dtype models ask for; not to be computed with."""
        weight: torch.Tensor = self._weight
        return weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        result: torch.Tensor = _product(states, self._weight, self._bias, *self._post)
        return result


class JoinedLinear(torch.nn.Module):
    """Several linear layers of one input as one product. The parts ask one after the other; the first to ask computes for all."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        self._linear = joined_linear(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._kept = _Kept()

    def part(self, states: torch.Tensor, position: int) -> torch.Tensor:
        """The output of one layer. Kept only until every part was asked for once, and only for this very input."""
        kept = self._kept
        if kept.input is not states or position not in kept.pending:
            kept.input = states
            kept.pending = dict(enumerate(self._linear(states).split(self._sizes, dim=-1)))
        output = kept.pending.pop(position)
        if not kept.pending:
            kept.input = None
        return output


class _Kept(threading.local):
    """The input and the parts not yet asked for, of each thread that runs a step."""

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.pending: dict[int, torch.Tensor] = {}


class JoinedPart(torch.nn.Module):
    """Stands where one of the joined layers stood."""

    def __init__(self, joined: JoinedLinear, position: int) -> None:
        super().__init__()
        self._joined = joined
        self._position = position

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        return self._joined.part(states, self._position)
