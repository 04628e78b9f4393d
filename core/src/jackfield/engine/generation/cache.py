"""Keys and values of past tokens, in blocks, a tensor a layer."""

from __future__ import annotations

import torch

__all__ = ["BLOCK_SIZE", "KVCache"]

# Tokens a block on a CPU: small enough that little is wasted at a sequence's end, large enough that gathering copies whole lines.
BLOCK_SIZE = 16


class KVCache:
    """The cache of one model. shapes: key-value heads and their size, for keys and for values, by layer.

    Raises: ValueError when the bytes are not enough for one block.
    """

    def __init__(self, shapes: list[tuple[int, int, int]], num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = BLOCK_SIZE
        per_token = sum(heads * (key + value) for heads, key, value in shapes) * dtype.itemsize
        self.block_bytes = per_token * self.block_size
        self.num_blocks = num_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ValueError(f"a block of {self.block_size} tokens takes {self.block_bytes} bytes, and the cache has {num_bytes}")
        tokens = self.num_blocks * self.block_size
        # Not cleared: what was never written is never read, and the pages of it are never touched.
        self.keys = [torch.empty(tokens, heads, key, dtype=dtype, device=device) for heads, key, _ in shapes]
        self.values = [torch.empty(tokens, heads, value, dtype=dtype, device=device) for heads, _, value in shapes]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: `[tokens, heads, size]`, into the places that `slots` names."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of sequences whose blocks are the rows of `table`: keys and values as `[sequences, tokens, heads, size]`, whole blocks."""
        return self._gather(self.keys[layer], table), self._gather(self.values[layer], table)

    def _gather(self, states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        blocks = states.view(self.num_blocks, -1)
        return blocks.index_select(0, table.flatten()).view(len(table), -1, *states.shape[1:])
