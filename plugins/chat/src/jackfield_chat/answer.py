"""The shapes of an answer and of a stream's chunks. What is null here is null on the wire; what is UNSET is left out of it."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from jackfield import FINGERPRINT, PromptLogprob, Usage

__all__ = [
    "CallDelta",
    "ChatChoice",
    "ChatChunk",
    "ChatLogprobs",
    "ChatResponse",
    "ChunkChoice",
    "ChunkDelta",
    "FunctionCall",
    "FunctionDelta",
    "Message",
    "TokenEntry",
    "ToolCall",
    "TopToken",
]


class TopToken(Struct, frozen=True, kw_only=True):
    """A token at a place. logprob: natural, -9999.0 for none at all. bytes: also of a part of a character, which has no text."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenEntry(Struct, frozen=True, kw_only=True):
    """The token that was taken, and the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """One entry a token."""

    content: list[TokenEntry]


class FunctionCall(Struct, frozen=True, kw_only=True):
    """The function, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, frozen=True, kw_only=True):
    """What the model said. The fields that are always null are those that OpenAI's clients know.

    content: null where it has called tools, or only reasoned. reasoning_content: the same as reasoning, by its older name.
    """

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer. stop_reason: the stop text or stop token that ended it, null for the model's own end."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatResponse(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str = FINGERPRINT
    usage: Usage
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None


class FunctionDelta(Struct, kw_only=True):
    """The next piece of the arguments. name: in the first piece alone."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Struct, kw_only=True):
    """A piece of a call. index: which one of the choice. id, type: in the first piece alone."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChunkDelta(Struct, frozen=True, kw_only=True):
    """What is new. role: in the first chunk of a choice alone."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """A piece of one answer. stop_reason: in its last chunk alone."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """An event of a stream: a piece of one choice, or, without choices, the usage."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
