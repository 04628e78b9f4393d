"""The prompt as the beginning of a choice's text, and where in that text each token lies."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from jackfield import MIN_LOGPROB, Choice, TokenizedPrompt, TokenLogprob, token_name
from jackfield_completions.answer import CompletionLogprobs

__all__ = ["Places", "echoed_text", "prompt_entries", "token_logprobs"]


class Places:
    """Where in a text each token begins that is told to it. A token that ends no character begins where the character does."""

    def __init__(self, start: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = start

    def __call__(self, data: bytes) -> int:
        """The place of the next token. data: the bytes that it stands for."""
        place = self._place
        self._place += len(self._decoder.decode(data))
        return place


def echoed_text(given: str | list[int], prompt: TokenizedPrompt) -> str:
    """A prompt's text: as it was given, without what truncation has cut off; that of token ids with special tokens in it."""
    if not isinstance(given, str):
        return prompt.text or ""
    if not prompt.num_cut:
        return given
    kept = [offset for offset in prompt.offsets or () if offset is not None]
    return given[kept[0][0] : kept[-1][1]] if kept else ""


def prompt_entries(
    given: str | list[int], prompt: TokenizedPrompt, first: Choice, *, as_ids: bool
) -> Iterator[tuple[int, str, TokenLogprob | None]]:
    """Each token of a prompt: its place in the echoed text, its name, its log-probability. first: the prompt's first choice."""
    texts = prompt.token_texts or []
    entries = first.prompt_logprobs or (None,) * len(texts)
    for place, token_id, text, entry in zip(_prompt_places(given, prompt, entries), prompt.token_ids, texts, entries, strict=True):
        yield place, f"token_id:{token_id}" if as_ids else text, entry


def _prompt_places(given: str | list[int], prompt: TokenizedPrompt, entries: Sequence[TokenLogprob | None]) -> Iterator[int]:
    if not isinstance(given, str):
        places = Places(0)
        for text, entry in zip(prompt.token_texts or (), entries, strict=True):
            yield places(text.encode() if entry is None else entry.data)
        return
    offsets = prompt.offsets or []
    kept = [offset for offset in offsets if offset is not None]
    start = kept[0][0] if kept and prompt.num_cut else 0
    place = 0
    for offset in offsets:  # a token of the frame has no text, and no place of its own
        if offset is not None:
            yield offset[0] - start
            place = offset[1] - start
        else:
            yield place


def token_logprobs(tokens: Sequence[tuple[int, str, TokenLogprob | None]], *, as_ids: bool) -> CompletionLogprobs:
    """The log-probabilities of tokens with their places and names."""
    return CompletionLogprobs(
        text_offset=[place for place, _, _ in tokens],
        token_logprobs=[None if entry is None else max(entry.logprob, MIN_LOGPROB) for _, _, entry in tokens],
        tokens=[name for _, name, _ in tokens],
        top_logprobs=[None if entry is None else _top(entry, as_ids) for _, _, entry in tokens],
    )


def _top(entry: TokenLogprob, as_ids: bool) -> dict[str, float]:
    """Of tokens with one text (parts of characters) the first: the one that was taken, then the likelier."""
    told: dict[str, float] = {}
    for other in (entry, *entry.top):
        told.setdefault(token_name(other, as_id=as_ids), max(other.logprob, MIN_LOGPROB))
    return told
