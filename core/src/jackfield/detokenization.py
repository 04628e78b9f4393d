"""Text of tokens that come one by one: whole characters only, and no part of a text that ends the generation."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

__all__ = ["TextStream"]

# Tokens of the prompt that are decoded with the first new ones: decoders leave out a leading space, or join what follows a piece.
CONTEXT = 6
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one choice.

    prompt_ids: what comes before. skip_special_tokens: leave special tokens out. stop: texts that end it; include_stop keeps the one that
    did in the text. `stopped_by`: that one, once it was met; what comes afterwards is ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT:])
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
        text: str = self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)
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
