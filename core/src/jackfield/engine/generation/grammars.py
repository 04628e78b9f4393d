"""Grammars at work: which tokens may come next in a text, and which must. llguidance computes it, behind few methods."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from transformers import AutoTokenizer

from jackfield.errors import BadRequest, NotSupported
from jackfield.params import GRAMMAR_FUEL, Grammar

__all__ = ["Grammars", "Matcher", "cut", "start_masks"]

# Compiled grammars that are kept, and the bytes of their sources together: of 2 KB of schema one takes 0.1 MB, of 200 KB 5 MB.
MAX_KEPT = 64
MAX_KEPT_BYTES = 1024 * 1024
# Of a parser's row. llguidance takes 50,000, with which one mask may take 1.6 s.
MAX_ITEMS = 10_000
WORD = 32


class Matcher(Protocol):
    """A grammar and the tokens of a text that it has seen. width: tokens that a mask has bits for, the vocabulary's or more."""

    width: int

    @property
    def error(self) -> str:
        """Why it can go no further, or nothing."""
        ...

    def finished(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        ...

    def fill(self, mask: NDArray[np.int32], end_ids: Collection[int]) -> None:
        """Set the bits of the tokens that may come next, 32 a word; those of `end_ids` where the text may end."""
        ...

    def accept(self, token_id: int) -> bool:
        """The text goes on with this token; False, and an error from then on, if it may not."""
        ...

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write them; none where it would depend on what follows, or is a special
        token's name."""
        ...

    def copy(self) -> Matcher:
        """Another text that has begun alike."""
        ...


class _Matcher:
    """By llguidance. start: at the begin of a text; it is shared, and never moves. forget: told once it errs."""

    def __init__(
        self,
        start: LLMatcher,
        width: int,
        size: int,
        own_ends: Sequence[int],
        forget: Callable[[], None],
        inner: LLMatcher | None = None,
        seen: Sequence[int] = (),
    ) -> None:
        self._start = start
        self._inner = inner or start.deep_copy()
        self._seen = list(seen)
        self.width = width
        self._size = size
        self._own_ends = own_ends
        self._forget = forget

    @property
    def error(self) -> str:
        error = self._inner.get_error()
        if error:  # copies share a lexer, which is of no use to any of them once it has grown too large
            self._forget()
        return error.replace("<non-verbose/>", "").strip()

    def finished(self) -> bool:
        return self._inner.is_stopped() and not self._inner.is_error()

    def fill(self, mask: NDArray[np.int32], end_ids: Collection[int]) -> None:
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        for token_id in self._own_ends:  # a request may not want them (ignore_eos), or want others
            mask[token_id // WORD] &= ~_bit(token_id)
        if self._inner.is_accepting():
            for token_id in end_ids:
                mask[token_id // WORD] |= _bit(token_id)

    def accept(self, token_id: int) -> bool:
        fits = self._inner.consume_token(token_id)
        if fits:
            self._seen.append(token_id)
        return fits

    def rollback(self, count: int) -> None:
        # Not by llguidance's own (1.9.1): after a token that the grammar names by its id it is at another place than it was.
        del self._seen[len(self._seen) - count :]
        self._inner = self._start.deep_copy()
        self._inner.consume_tokens(self._seen)

    def forced(self) -> list[int]:
        tokens = list(takewhile(lambda token_id: token_id < self._size, self._inner.compute_ff_tokens()))
        # Not those that would read as a special token, which the text of a grammar is not.
        return tokens[: self._inner.validate_tokens(tokens)]

    def copy(self) -> _Matcher:
        return _Matcher(self._start, self.width, self._size, self._own_ends, self._forget, self._inner.deep_copy(), self._seen)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % WORD).view(np.int32)


class Grammars:
    """Compiles the grammars of a model, and keeps those that were used last. Safe to call from any thread.

    Texts of one grammar share a lexer: where one makes it grow beyond its bounds, all of them end with an error, and the next request
    compiles it anew. folder: where the model's tokenizer is; nothing is read before the first grammar. size: numbers of a row of logits.
    end_ids: the model's own.
    """

    def __init__(self, folder: str, size: int, end_ids: Sequence[int]) -> None:
        self._folder = folder
        self._size = size
        self._end_ids = tuple(token_id for token_id in end_ids if 0 <= token_id < size)
        self._tokenizer: LLTokenizer | None = None
        self._width = size
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the begin of a text. Raises: BadRequest for what cannot be compiled, NotSupported for a tokenizer that is not understood."""
        source = grammar.source
        with self._lock:
            found = self._kept.get(source)
            if found is None:
                found = self._kept[source] = self._compile(grammar)
                while len(self._kept) > MAX_KEPT or (len(self._kept) > 1 and sum(map(len, self._kept)) > MAX_KEPT_BYTES):
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source)
            return _Matcher(found, self._width, self._size, self._end_ids, partial(self._forget, source))

    def _forget(self, source: str) -> None:
        with self._lock:
            self._kept.pop(source, None)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._read()
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=GRAMMAR_FUEL, step_max_items=MAX_ITEMS)
        made = LLMatcher(self._tokenizer, grammar.source, log_level=0, limits=limits)
        if made.is_error():
            raise BadRequest(f"{grammar.param} cannot be honoured: {made.get_error()[:500]}", param=grammar.param)
        return made

    def _read(self) -> LLTokenizer:
        try:
            return self._made()
        except Exception as error:  # of a tokenizer that it has no form for, or whose files have gone
            raise NotSupported(f"This model's tokenizer takes no grammars: {str(error)[:300]}") from error

    def _made(self) -> LLTokenizer:
        # With what tokenizer_config.json adds to tokenizer.json.
        tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False, local_files_only=True).backend_tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # A tokenizer may have tokens that the model's rows have no number for.
        self._width = max(self._size, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
        return LLTokenizer(tokenizer.to_str(), n_vocab=self._width, eos_token=list(self._end_ids) or None)


# One thread: a mask takes 10 to 50 us where the lexer knows its state.
_filling = ThreadPoolExecutor(1, thread_name_prefix="masks")


class Bound(Protocol):
    """A text that a grammar may bind. end_ids: the tokens that may end it."""

    @property
    def matcher(self) -> Matcher | None: ...

    @property
    def end_ids(self) -> Collection[int]: ...


def start_masks(texts: Sequence[Bound]) -> Future[NDArray[np.int32]] | None:
    """Begin to compute which tokens may come next, of those texts of a model that have a grammar, while the model runs: `[them, words]`, a
    bit a token."""
    bound = [(text.matcher, text.end_ids) for text in texts if text.matcher is not None]
    return _filling.submit(_fill, bound) if bound else None


def _fill(bound: list[tuple[Matcher, Collection[int]]]) -> NDArray[np.int32]:
    masks = np.zeros((len(bound), -(-bound[0][0].width // WORD)), np.int32)
    for mask, (matcher, end_ids) in zip(masks, bound, strict=True):
        matcher.fill(mask, end_ids)
    return masks


# Of each byte of a mask what its eight tokens may have at most: anything, or nothing.
_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf).astype(np.float32)


def cut(logits: torch.Tensor, rows: Sequence[int], masks: NDArray[np.int32]) -> None:
    """Take those rows' logits of tokens that may not come down to -inf; a NaN stays.

    By a minimum, which takes a fortieth of `masked_fill_`'s time on a CPU (16 rows of 49,152: 0.04 ms and 1.5, and 0.1 for what the bits
    stand for).
    """
    if logits.device.type == "cpu":
        ceilings = torch.from_numpy(_CEILINGS.take(masks.view(np.uint8), axis=0).reshape(len(masks), -1))
    else:  # the bits are a thirty-second of what they stand for
        bits = torch.from_numpy(masks).to(logits.device)[..., None] >> torch.arange(WORD, device=logits.device)
        ceilings = torch.where((bits & 1).flatten(1).bool(), math.inf, -math.inf)
    for row, ceiling in zip(rows, ceilings[:, : logits.shape[1]], strict=True):  # row by row: an index of many copies them, twice
        torch.minimum(logits[row], ceiling, out=logits[row])
