"""What comes back from the engine, and how vectors leave in an answer.

numpy is the one library that this layer takes besides msgspec: arrays are the words of an engine's answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

__all__ = ["Delta", "Encoding", "FloatArray", "PoolingOutputs", "Vector", "Vectors"]

FloatArray = NDArray[np.float32]
Encoding = Literal["float", "base64"]


class PoolingOutputs(Struct, frozen=True, kw_only=True):
    """The engine's answer to a pooling request.

    values[operation] has one float32 array a prompt, in the request's order, whatever order they were computed in: `[dim]` for embed,
    classify and score, `[tokens, dim]` for token_embed, token_classify and hidden_states.
    """

    values: dict[str, list[FloatArray]]

    def __getitem__(self, operation: str) -> list[FloatArray]:
        return self.values[operation]


class Delta(Struct, frozen=True, kw_only=True):
    """A piece of a generated answer.

    index: which choice (prompt * n + sample). text: what is new. token_ids: the new tokens. finish_reason: set on a choice's last piece.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class Vector:
    """One vector in a response struct: the core writes it as a JSON array of shortest float32 digits, or as base64.

    The array is `[dim]`, of any dtype numpy can write; float arrays must be finite, which the core checks when it encodes.
    base64 is that of the little-endian bytes in the array's own dtype (float32 for the OpenAI client).
    """

    __slots__ = ("array", "encoding")

    def __init__(self, array: NDArray[np.generic], encoding: Encoding = "float") -> None:
        self.array = array
        self.encoding: Encoding = encoding


class Vectors:
    """Many vectors of one encoding: a JSON array of what `Vector` gives; iterating or indexing gives each as a `Vector`."""

    __slots__ = ("arrays", "encoding")

    def __init__(self, arrays: list[NDArray[np.generic]] | list[FloatArray], encoding: Encoding = "float") -> None:
        self.arrays = arrays
        self.encoding: Encoding = encoding

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Vector:
        return Vector(self.arrays[index], self.encoding)

    def __iter__(self) -> Iterator[Vector]:
        return (Vector(array, self.encoding) for array in self.arrays)
