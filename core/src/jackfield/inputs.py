"""The `input` and `messages` of OpenAI's embedding requests, which many endpoints take: as a base for request types, and as prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jackfield.errors import BadRequest, EmptyPrompt
from jackfield.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from jackfield.schema import ChatMessage, Request, template_messages

__all__ = ["InputRequest", "aliased", "input_prompts"]

Input = Annotated[
    str | list[str | int | list[int]],
    Meta(
        description="A text, a list of texts, the token ids of one prompt, or a list of such lists.",
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
            ]
        },
    ),
]
_NAMES: dict[type, str] = {str: "a text", int: "a token id", list: "a list of token ids"}


class InputRequest(Request, frozen=True, kw_only=True):
    """Texts, token ids or a conversation; one of `input` and `messages`."""

    input: Input | None = None
    messages: Annotated[
        list[ChatMessage] | None, Meta(description="A conversation, rendered by the model's chat template into one prompt.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut to this many tokens, special tokens included; -1 cuts to the model's maximum."),
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, Meta(description="Which end is cut off.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default true for texts, false for messages.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="For messages; default false.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="For messages; default false.")] = None
    chat_template: Annotated[str | None, Meta(description="Refused: templates come from the model alone.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables for the model's template.")] = None


def input_prompts(request: InputRequest, *, prefix: str = "", text_only: tuple[str, ...] = ()) -> list[Prompt]:
    """The request's prompts. prefix: put before each text. text_only: fields of the request that have no meaning for ids and messages.

    Raises: BadRequest, EmptyPrompt, naming the field.
    """
    if request.chat_template is not None:
        raise BadRequest("Chat templates of a request are refused; the model's own is used.", param="chat_template")
    if (request.input is None) == (request.messages is None):
        raise BadRequest("One of `input` and `messages` is needed, and not both.", param="input")
    if request.messages is not None:
        _refuse(request, "messages", text_only)
        return [_conversation(request, request.messages)]
    assert request.input is not None
    _refuse(request, "input", ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"))
    if isinstance(request.input, str):
        return [_text(request, request.input, "input", prefix)]
    return _list(request, request.input, prefix, text_only)


def aliased(request: Request, name: str, alias: str) -> Any:
    """The value of a field that has an older name; None if neither is given. Raises: BadRequest when both are, and differ."""
    value, other = getattr(request, name), getattr(request, alias)
    if value is None or other is None:
        return other if value is None else value
    if value != other:
        raise BadRequest(f"{name} and {alias} are two names of one switch, and they differ.", param=alias)
    return value


def _list(request: InputRequest, given: list[str | int | list[int]], prefix: str, text_only: tuple[str, ...]) -> list[Prompt]:
    if not given:
        raise EmptyPrompt("input is empty; at least one prompt is needed.", param="input")
    kinds = set(map(type, given))
    if len(kinds) > 1:
        position, item = next((at, item) for at, item in enumerate(given) if type(item) is not type(given[0]))
        raise BadRequest(
            f"input mixes kinds: input[{position}] is {_NAMES[type(item)]}, and input[0] is {_NAMES[type(given[0])]}.",
            param=f"input[{position}]",
        )
    items: list[Any] = given  # of one kind
    if kinds == {str}:
        return [_text(request, text, f"input[{position}]", prefix) for position, text in enumerate(items)]
    _refuse(request, "token ids", (*text_only, "add_special_tokens"))
    if kinds == {int}:
        return [_tokens(request, items, "input")]
    return [_tokens(request, ids, f"input[{position}]") for position, ids in enumerate(items)]


def _refuse(request: InputRequest, kind: str, fields: tuple[str, ...]) -> None:
    """What cannot be honoured for this kind of input is refused rather than ignored."""
    for name in fields:
        if getattr(request, name):
            raise BadRequest(f"{name} has no meaning for {kind}; leave it out.", param=name)


def _conversation(request: InputRequest, messages: list[ChatMessage]) -> ChatPrompt:
    if request.add_generation_prompt and request.continue_final_message:
        raise BadRequest("add_generation_prompt and continue_final_message exclude each other.", param="add_generation_prompt")
    return ChatPrompt(
        messages=template_messages(messages),
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        template_kwargs=request.chat_template_kwargs or {},
        truncate=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        param="messages",
    )


def _text(request: InputRequest, text: str, param: str, prefix: str) -> TextPrompt:
    return TextPrompt(
        text=text,
        prefix=prefix,
        add_special_tokens=request.add_special_tokens is not False,
        truncate=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        param=param,
    )


def _tokens(request: InputRequest, ids: list[int], param: str) -> TokensPrompt:
    return TokensPrompt(token_ids=ids, truncate=request.truncate_prompt_tokens, truncation_side=request.truncation_side, param=param)
