"""What `preprocess` returns: prompts, in the forms that the core turns into token ids.

A prompt describes; the tokenizer pool of the core does. All lengths are in tokens.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

__all__ = ["ChatPrompt", "PairPrompt", "Prompt", "TextPrompt", "TokenizedPrompt", "TokensPrompt", "TruncationSide"]

TruncationSide = Literal["left", "right"]


class Prompt(Struct, frozen=True, kw_only=True):
    """Fields that every form shares. Use one of the subclasses.

    truncate: keep at most this many tokens, special tokens included; -1 keeps the model's maximum; None refuses a prompt that is too long.
    max_tokens: refuse a prompt of more tokens than this; None leaves it to the model's maximum.
    truncation_side: the end that is cut off; None is the model's own, right unless its tokenizer says left.
    param: the request's field that this prompt came from, for error messages (`input[3]`).
    with_text, with_token_strs, with_token_texts: also give back the text of the ids, each id's vocabulary piece, or each id's own text.
    skip_special_tokens: leave special tokens out of the text of the ids.
    """

    truncate: int | None = None
    max_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    param: str | None = None
    with_text: bool = False
    with_token_strs: bool = False
    with_token_texts: bool = False
    skip_special_tokens: bool = False


class TextPrompt(Prompt, frozen=True, kw_only=True):
    """A text.

    prefix: put before the text (a model's instruction for queries, say); a pooler of a model that leaves its instruction out of the
    vector is told how many tokens it has. with_offsets: also tell where in the text each token lies.
    """

    text: str
    prefix: str = ""
    add_special_tokens: bool = True
    with_offsets: bool = False


class PairPrompt(Prompt, frozen=True, kw_only=True):
    """Two texts that a model reads as one prompt, a query and a document say, joined as its tokenizer joins them.

    truncate cuts the second text only, so the first is always whole. max_second_tokens: the second text's own bound, before that.
    first_param: the field of the first text, where `param` is that of the second.
    """

    text: str
    second: str
    first_param: str | None = None
    max_second_tokens: int | None = None


class TokensPrompt(Prompt, frozen=True, kw_only=True):
    """Token ids, used as they are: no special token is added."""

    token_ids: list[int]


class ChatPrompt(Prompt, frozen=True, kw_only=True):
    """A conversation, rendered by the model's chat template in a sandbox.

    A message is a dict with a role and a content, which is a text, None, or a list of parts (`{"type": "text", "text": ...}`). Templates
    that go through parts get parts, others their texts joined by line ends. The name of a special token within what a client wrote stays
    text; so do marks (`<tool_call>`, `</think>`), but for those in the content of an assistant.
    continue_final_message: the prompt ends with the last message's content, white space included; its calls are left out.
    template_kwargs are variables for the template; they never override an argument of the server's own (`messages`, `tokenize`, ...).
    chat_template: another template than the model's own; it is a program, so it must come from whoever runs the server.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    template_kwargs: dict[str, Any] | UnsetType = UNSET


class TokenizedPrompt(Struct, frozen=True, kw_only=True):
    """A prompt after the tokenizer.

    prefix_length: how many leading tokens are the model's instruction (0 when it counts like the rest). segment: how many are the first
    part of a pair (0 for no pair). num_cut: tokens that truncation has left out.
    text, token_strs, token_texts, offsets: filled where the prompt asked for them. An offset is where a token begins in the prompt's text
    and where it ends, in characters (Unicode code points); None for a special token of the frame, and for one of the prefix.
    tail: the end of a conversation's rendered text, 64 characters; a template may have begun the answer (`<think>`). Names of special
    tokens that a client wrote are U+FFFD in it, since they are no such tokens.
    """

    token_ids: list[int]
    prefix_length: int = 0
    segment: int = 0
    num_cut: int = 0
    text: str | None = None
    token_strs: list[str] | None = None
    token_texts: list[str] | None = None
    offsets: list[tuple[int, int] | None] | None = None
    tail: str = ""
    param: str | None = None
