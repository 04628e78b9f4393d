"""The shapes of an answer and of a stream's chunks."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from jackfield import FINGERPRINT, PromptLogprob, Usage

__all__ = ["ChunkChoice", "CompletionChoice", "CompletionChunk", "CompletionLogprobs", "CompletionResponse"]


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """One entry a token in each list. text_offset: where the token begins in the choice's text, in characters. token_logprobs,
    top_logprobs: null for the first token of a prompt. top_logprobs: the token itself and the likeliest in its place, by their texts."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One text, of prompt p and sample j: index is p * n + j. stop_reason: the stop text or stop token that ended it, null for the model's
    own end."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None


class CompletionResponse(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str = FINGERPRINT
    usage: Usage


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """A piece of one text. prompt_token_ids: in its first chunk alone, where asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class CompletionChunk(Struct, frozen=True, kw_only=True):
    """An event of a stream: a piece of one choice, or, without choices, the usage."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
