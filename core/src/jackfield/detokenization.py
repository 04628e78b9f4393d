"""Text of tokens that come one by one: whole characters only, and no part of a text that ends the generation."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cache

from tokenizers import Tokenizer

__all__ = ["TextStream", "token_bytes"]

# Tokens of the prompt that are decoded with the first new ones: decoders leave out a leading space, or join what follows a piece.
CONTEXT = 6
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one choice.

    prompt_ids: what comes before. hidden: tokens that are left out. stop: texts that end it; include_stop keeps the one that did in the
    text. `stopped_by`: that one, once it was met; what comes afterwards is ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        hidden: Collection[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = [token_id for token_id in prompt_ids[-CONTEXT:] if token_id not in hidden]
        # `[done:read]` has been decoded and given, and is decoded again beside what comes next: the difference is new text.
        self._done = 0
        self._read = len(self._ids)
        self._before = self._decode(0, self._read)
        self._stop = [text for text in stop if text]
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def add(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str:
        """Tokens that were generated; gives the text that is certain by now. may_stop: whether a stop text counts yet."""
        text = ""
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            if token_id not in self._hidden:
                self._ids.append(token_id)
            text += self._release(self._fresh(final=False), may_stop=may_stop)
        return text

    def finish(self) -> str:
        """Nothing comes any more: what was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._fresh(final=True), may_stop=True)
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _fresh(self, *, final: bool) -> str:
        """New characters, once they are whole."""
        text = self._decode(self._done, len(self._ids))
        if len(text) <= len(self._before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        fresh = text[len(self._before) :]
        self._done, self._read = self._read, len(self._ids)
        self._before = self._decode(self._done, self._read)
        return fresh

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False)
        return text

    def _release(self, fresh: str, *, may_stop: bool) -> str:
        """Of held and fresh text what cannot be the beginning of a stop text."""
        if not self._stop:
            return fresh
        text = self._held + fresh
        if may_stop:
            found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
            if found:
                place, self.stopped_by = min(found)
                self._held = ""
                return text[: place + len(self.stopped_by)] if self._include_stop else text[:place]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop text begins with, fewer than all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that a token stands for within a text: of byte-level vocabularies, of those with byte tokens (`<0xE2>`), and of words.

    A special token stands for its own name. A piece that begins a word keeps its space.
    """
    piece = tokenizer.id_to_token(token_id)
    if piece is None:
        return b""
    if token_id in _added(tokenizer):
        return str(piece).encode()
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        table = _byte_level()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
    if "ByteFallback" in kinds and (match := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)):
        return bytes([int(match.group(1), 16)])
    if "Replace" in kinds or "Metaspace" in kinds:
        return piece.replace("\u2581", " ").encode()
    return str(tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _added(tokenizer: Tokenizer) -> set[int]:
    return set(tokenizer.get_added_tokens_decoder())


def _decoders(tokenizer: Tokenizer) -> frozenset[str]:
    """The kinds of a tokenizer's decoders."""
    if tokenizer.decoder is None:
        return frozenset()
    described = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(part["type"] for part in described.get("decoders", [described]))


@cache
def _byte_level() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's vocabulary (Radford et al. 2019, `bytes_to_unicode`): printable ones are their own."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
