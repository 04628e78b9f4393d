"""The wire types, those of vLLM's routes of the same names."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from jackfield import ChatMessage, Request, TokenId

__all__ = ["DetokenizeRequest", "DetokenizeResponse", "InfoRequest", "TokenizeRequest", "TokenizeResponse"]


class TokenizeRequest(Request, frozen=True, kw_only=True):
    """A text or a conversation; one of `prompt` and `messages`."""

    prompt: Annotated[str | None, Meta(description="The text.")] = None
    messages: Annotated[list[ChatMessage] | None, Meta(description="A conversation, rendered by the model's chat template.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default true for a text, false for messages.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="Also give each token as its piece of the vocabulary.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="For messages; default true.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="For messages; default false.")] = None
    chat_template: Annotated[str | None, Meta(description="Refused: templates come from the model alone.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables for the model's template.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Tools for the model's template.")] = None


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """Token ids, not cut at the model's maximum length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Request, frozen=True, kw_only=True):
    """Token ids of the model's vocabulary."""

    tokens: Annotated[list[TokenId], Meta(description="Token ids; special tokens become text, too.")]


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    """The text of the ids."""

    prompt: str


class InfoRequest(Request, frozen=True, kw_only=True):
    """Which model's tokenizer."""
