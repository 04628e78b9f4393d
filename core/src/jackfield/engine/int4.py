"""Linear layers over 4-bit weights on a CPU: torch's weight-only product, from the blocks beside a converted folder (`blocks.py`).

What it gives, measured on 2 cores with AVX-512 and AMX, torch 2.13, December 2026, on a machine with other work (microseconds of a layer,
bfloat16, 4-bit against plain): 576 to 576 for 1 row 16 and 24, for 4 rows 26 and 25, for 16 rows 82 and 31; 576 to 1536 for 1 row 33 and
32, for 4 rows 58 and 34. In float32 torch has no fast kernel: 375 against 28 for 1 row. So it saves memory, and time for a few rows of
bfloat16 in layers that are larger than the cache.

Relative error of the product against the same weights in full: 1e-7 to 7e-7 in float32, 3e-3 in bfloat16, whose scales are rounded too.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn.functional import linear

from jackfield.engine.blocks import GROUP, INT4_FILE, dequantized
from jackfield.errors import ModelError

__all__ = ["ROWS", "Int4Linear", "use_int4"]

# The product wants so many outputs, or a multiple.
ROWS = 16


class Int4Linear(torch.nn.Module):
    """`[..., in]` to `[..., out]`, for activations of one dtype, which its bias has too.

    q, scale, least: as `blocks.py` stores them. plain_from: the number of rows from which on a plain weight, kept beside, is faster;
    None keeps none. Raises: ValueError for a number of outputs that the product does not take.
    """

    def __init__(
        self,
        q: torch.Tensor,
        scale: torch.Tensor,
        least: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        plain_from: int | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape[0], 2 * q.shape[1]
        if self.out_features % ROWS:
            raise ValueError(f"4-bit products have a multiple of {ROWS} outputs, not {self.out_features}")
        whole = torch.stack((q & 15, q >> 4), dim=-1).reshape(self.out_features, self.in_features).to(torch.int32)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(whole, 1)  # noqa: SLF001  (torch's only way)
        # torch counts a weight from the middle: (q - 8) * scale + zero.
        zero = least.float() + 8 * scale.float()
        self._scales = torch.stack((scale.float().T, zero.T), dim=-1).to(dtype).contiguous()
        self._bias = None if bias is None else bias.detach().clone()  # a view would keep the whole file of weights mapped
        self._plain_from = plain_from
        self._plain = None if plain_from is None else dequantized((q, scale, least)).to(dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The product, with the bias added."""
        rows = states.reshape(-1, self.in_features)
        if self._plain is not None and self._plain_from is not None and len(rows) >= self._plain_from:
            return linear(states, self._plain, self._bias)
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(  # noqa: SLF001
            rows.contiguous(), self._packed, GROUP, self._scales
        )
        if self._bias is not None:
            result = result + self._bias
        return result.reshape(*states.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What torch prints."""
        return f"in_features={self.in_features}, out_features={self.out_features}, plain_from={self._plain_from}"


def use_int4(model: torch.nn.Module, folder: Path, *, plain_from: int | None = None) -> int:
    """Replace the linear layers of a loaded model, causal or its base, for which the folder has 4-bit blocks; returns how many.

    They take activations in the dtype of the weight that they replace. plain_from: see `Int4Linear`; None frees the plain weights.
    Raises: ModelError, without the model's name, for a folder without blocks, or a model that is not on the CPU.
    """
    path = folder / INT4_FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {INT4_FILE}: 4-bit products need a model from a GGUF file whose weights are Q4_0 or Q4_1")
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ModelError(f"4-bit products run on the CPU, and the model is on {device}")
    modules = dict(model.named_modules())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    count = 0
    with safe_open(path, "pt") as stored:
        for weight in sorted(name.removesuffix(".q") for name in stored.keys() if name.endswith(".q")):  # noqa: SIM118  (it is no dict)
            layer = weight.removesuffix(".weight")
            name = layer if layer in modules else layer.removeprefix(prefix)
            module = modules.get(name)
            if type(module) is not torch.nn.Linear or module.out_features % ROWS:
                continue
            q, scale, least = (stored.get_tensor(f"{weight}.{part}") for part in ("q", "scale", "min"))
            if (module.out_features, module.in_features) != (q.shape[0], 2 * q.shape[1]):
                raise ModelError(f"{path} holds {weight} of {q.shape[0]} x {2 * q.shape[1]}, and the model {tuple(module.weight.shape)}")
            model.set_submodule(name, Int4Linear(q, scale, least, module.bias, dtype=module.weight.dtype, plain_from=plain_from))
            count += 1
    return count
