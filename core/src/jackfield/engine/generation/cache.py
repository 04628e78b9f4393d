"""Keys and values of past tokens, in blocks, a tensor a layer."""

from __future__ import annotations

import math

import numpy as np
import torch

__all__ = ["BLOCK_SIZE", "KVCache"]

# Tokens a block on a CPU: small enough that little is wasted at a sequence's end, large enough that gathering copies whole lines.
BLOCK_SIZE = 16
# Pages of flash attention's second version have a multiple of this. No GPU has run it yet.
GPU_BLOCK_SIZE = 256


class KVCache:
    """The cache of one model. shapes: key-value heads and their size, for keys and for values, by layer.

    A token's keys and values lie side by side, so that one call writes or reads both. Raises: ValueError when the bytes are not enough for
    one block.
    """

    def __init__(self, shapes: list[tuple[int, int, int]], num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE
        per_token = sum(heads * (key + value) for heads, key, value in shapes) * dtype.itemsize
        self.block_bytes = per_token * self.block_size
        self.num_blocks = num_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ValueError(f"a block of {self.block_size} tokens takes {self.block_bytes} bytes, and the cache has {num_bytes}")
        self.shapes = shapes
        self.device = device
        tokens = self.num_blocks * self.block_size
        self._tokens = [_zeros((tokens, heads * (key + value)), dtype, device) for heads, key, value in shapes]
        self._blocks = [states.view(self.num_blocks, -1) for states in self._tokens]

    def clear(self, blocks: list[int]) -> None:
        """Let blocks hold zeros again: a sequence reads its last block as a whole, what lies behind its end with a weight of 0, and a NaN
        survives that."""
        places = torch.tensor(blocks, dtype=torch.long, device=self._blocks[0].device)
        for states in self._blocks:
            states.index_fill_(0, places, 0.0)

    def write(self, layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """states: `[tokens, heads * (key + value)]`, the keys of all heads and then their values, into the places that `slots` names."""
        self._tokens[layer].index_copy_(0, slots, states)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, `[blocks, block size, heads, size]`, as they lie."""
        heads, key, value = self.shapes[layer]
        states = self._tokens[layer].view(self.num_blocks, self.block_size, -1)
        keys, values = states.split_with_sizes((heads * key, heads * value), dim=-1)
        return keys.view(*keys.shape[:-1], heads, key), values.view(*values.shape[:-1], heads, value)

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of sequences whose blocks are the rows of `table`: keys and values as `[sequences, heads, tokens, size]`, whole blocks."""
        heads, key, value = self.shapes[layer]
        states = self._blocks[layer].index_select(0, table.view(-1)).view(table.shape[0], -1, heads * (key + value))
        keys, values = states.split_with_sizes((heads * key, heads * value), dim=-1)
        return keys.view(*keys.shape[:-1], heads, key).transpose(1, 2), values.view(*values.shape[:-1], heads, value).transpose(1, 2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU of pages that the system gives when they are first written: torch's own zeros write all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
