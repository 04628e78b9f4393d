"""Linear layers over 4-bit weights on a CPU: torch's weight-only product, from the blocks beside a converted folder (`blocks.py`).

It reads a third of the bytes, and pays for it in arithmetic: for a few rows it is faster than the plain product, for many slower, and where
that turns is measured at load. Figures: benchmarks/ledger.md, "Weights of 4 bits". In float32 torch has no fast kernel.

Relative error of the product against the same weights in full: 1e-7 to 7e-7 in float32, 3e-3 in bfloat16, whose scales are rounded too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from jackfield.engine.blocks import GROUP, INT4_FILE, Blocks
from jackfield.errors import ModelError

__all__ = ["ROWS", "Call", "Int4Linear", "Product", "find_limit", "stored_blocks"]

# The product wants so many outputs, or a multiple.
ROWS = 16
# Numbers of rows that are tried, and how often; how much faster 4 bits must be.
TRIED = (1, 2, 4, 8, 16, 32)
ROUNDS = 3
GAIN = 0.95

Call = Callable[[torch.Tensor], torch.Tensor]


class Product(NamedTuple):
    """A product of `size` inputs in two forms: of 4 bits, and the plain one."""

    few: Call
    many: Call
    size: int


class Int4Linear:
    """`[..., in]` to `[..., out]`, for activations of one dtype, which its bias has too.

    q, scale, least: as `blocks.py` stores them. Raises: ValueError for a number of outputs that the product does not take.
    """

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None = None, *, dtype: torch.dtype) -> None:
        q, scale, least = blocks
        self.out_features, self.in_features = q.shape[0], 2 * q.shape[1]
        if self.out_features % ROWS:
            raise ValueError(f"4-bit products have a multiple of {ROWS} outputs, not {self.out_features}")
        whole = torch.stack((q & 15, q >> 4), dim=-1).reshape(self.out_features, self.in_features).to(torch.int32)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(whole, 1)  # noqa: SLF001  (torch's only way)
        # torch counts a weight from the middle: (q - 8) * scale + zero.
        zero = least.float() + 8 * scale.float()
        self._scales = torch.stack((scale.float().T, zero.T), dim=-1).to(dtype).contiguous()
        self._bias = None if bias is None else bias.detach().clone()  # a view would keep the whole file of weights mapped

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product, with the bias added."""
        rows = states.reshape(-1, self.in_features)
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(  # noqa: SLF001
            rows.contiguous(), self._packed, GROUP, self._scales
        )
        if self._bias is not None:
            result = result.add_(self._bias)
        return result.view(*states.shape[:-1], self.out_features)


@contextmanager
def stored_blocks(folder: Path) -> Iterator[Callable[[list[str]], Blocks]]:
    """A function from the names of linear layers to their blocks, one below the other.

    Raises: ModelError, without the model's name, for a folder without blocks; and the function, for a layer that has none.
    """
    path = folder / INT4_FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {INT4_FILE}: 4-bit products need a model from a GGUF file whose weights are Q4_0 or Q4_1")
    with safe_open(path, "pt") as stored:
        names = set(stored.keys())

        def read(layers: list[str]) -> Blocks:
            missing = [name for name in layers if f"{name}.weight.q" not in names]
            if missing:
                raise ModelError(f"{missing[0]} is not stored in 4 bits (Q4_0 or Q4_1) in the file that the model came from")
            q, scale, least = (torch.cat([stored.get_tensor(f"{name}.weight.{part}") for name in layers]) for part in ("q", "scale", "min"))
            return q, scale, least

        yield read


@torch.inference_mode()
def find_limit(products: list[Product], dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter) -> int:
    """The largest number of rows tried for which 4 bits are faster, here and now; 0 for none.

    All products are run in turn, as a step does, so that none finds its weights in the processor's cache.
    """
    best = 0
    for rows in TRIED:
        inputs = [torch.ones(1, rows, product.size, dtype=dtype) for product in products]
        few: list[float] = []
        many: list[float] = []
        for _ in range(ROUNDS):
            few.append(_seconds([product.few for product in products], inputs, clock))
            many.append(_seconds([product.many for product in products], inputs, clock))
        if min(few) > GAIN * min(many):
            break
        best = rows
    return best


def _seconds(calls: list[Call], inputs: list[torch.Tensor], clock: Callable[[], float]) -> float:
    started = clock()
    for call, states in zip(calls, inputs, strict=True):
        call(states)
    return clock() - started
