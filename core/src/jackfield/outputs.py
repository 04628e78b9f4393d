"""What comes back from the engine, and how vectors leave in an answer.

numpy is the one library that this layer takes besides msgspec: arrays are the words of an engine's answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

__all__ = ["Choice", "Delta", "Encoding", "FinishReason", "FloatArray", "PoolingOutputs", "TokenLogprob", "Vector", "Vectors"]

FloatArray = NDArray[np.float32]
Encoding = Literal["float", "base64"]
# "stop": an end token, a stop token or a stop text; "length": max_tokens, or the end of the context.
FinishReason = Literal["stop", "length"]


class PoolingOutputs(Struct, frozen=True, kw_only=True):
    """The engine's answer to a pooling request.

    values[operation] has one float32 array a prompt, in the request's order, whatever order they were computed in: `[dim]` for embed,
    classify and score, `[tokens, dim]` for token_embed, token_classify and hidden_states.
    """

    values: dict[str, list[FloatArray]]

    def __getitem__(self, operation: str) -> list[FloatArray]:
        return self.values[operation]


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token's log-probability by the model's own logits, before any of the request's parameters.

    logprob: natural, finite (-9999.0 stands for less). rank: 1 for the likeliest; 0 where it was not asked for. text, data: the token as
    text and as bytes, filled by the core; the text of a part of a character is U+FFFD. top: the likeliest tokens at this place, likeliest
    first, and those of `logprob_token_ids`; empty within itself.
    """

    token_id: int
    logprob: float
    rank: int = 0
    text: str = ""
    data: bytes = b""
    top: tuple[TokenLogprob, ...] = ()


class Delta(Struct, frozen=True, kw_only=True):
    """A piece of a generated choice; its last one has a finish_reason.

    index: which choice (prompt * n + sample). token_ids: the new tokens; an end token is the last of them. text: what is certain of the
    text by now, filled by the core: whole characters, and nothing that may be part of a stop text. logprobs: one a token, where asked for.
    stop_reason: the stop text or the stop token's id that ended the choice, None for the model's own end. ends_in_text: the choice stops,
    and its last token is text and no end token, since its grammar was whole with it.

    On the first delta of a choice: num_cached_tokens, of the prompt those that were not computed again. On the first of a prompt's first
    choice, which comes before any of its other choices: prompt_logprobs, where asked for, one a token of the prompt, None for its first.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    ends_in_text: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class Choice:
    """A generated choice as far as it is known: its deltas put together."""

    __slots__ = ("finish_reason", "index", "logprobs", "num_cached_tokens", "prompt_logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """The next piece."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens or self.num_cached_tokens
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs


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
