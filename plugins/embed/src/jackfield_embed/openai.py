"""The wire types of `/v1/embeddings`, and what they mean as prompts and parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jackfield import (
    BadRequest,
    ChatMessage,
    ChatPrompt,
    Context,
    EmptyPrompt,
    Model,
    PoolingParams,
    Prompt,
    Request,
    TextPrompt,
    TokensPrompt,
    Usage,
    Vector,
    Vectors,
    template_messages,
)
from jackfield_embed.instructions import instruction

__all__ = ["EmbeddingItem", "EmbeddingRequest", "EmbeddingResponse", "params", "prompts", "response"]

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


class EmbeddingRequest(Request, frozen=True, kw_only=True):
    """Texts, token ids or a conversation; one of `input` and `messages`."""

    input: Input | None = None
    messages: Annotated[
        list[ChatMessage] | None, Meta(description="A conversation, rendered by the model's chat template into one prompt.")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="`float` (the default), or base64 of little-endian float32.")
    ] = None
    dimensions: Annotated[
        int | None,
        Meta(
            description="Keep this many leading numbers and normalise again; sizes below the model's own only where it is trained for it."
        ),
    ] = None
    normalize: Annotated[bool | None, Meta(description="Scale to length 1; null leaves it to the model's files.")] = None
    use_activation: Annotated[bool | None, Meta(description="vLLM's name for `normalize`.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut to this many tokens, special tokens included; -1 cuts to the model's maximum."),
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, Meta(description="Which end is cut off.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default true for texts, false for messages.")] = None
    prompt_name: Annotated[str | None, Meta(description="One of the model's instructions, put before each text.")] = None
    input_type: Annotated[
        str | None,
        Meta(description="The same by kind of text: query, document, search_query, search_document, classification, clustering."),
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="For messages; default false.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="For messages; default false.")] = None
    chat_template: Annotated[str | None, Meta(description="Refused: templates come from the model alone.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables for the model's template.")] = None


class EmbeddingItem(Struct, frozen=True, kw_only=True):
    """The vector of one prompt; `index` is its place in the input."""

    index: int
    embedding: Vector
    object: str = "embedding"


class EmbeddingResponse(Struct, frozen=True, kw_only=True):
    """Vectors in the order of the input."""

    id: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: Usage
    object: str = "list"


def prompts(model: Model, request: EmbeddingRequest) -> list[Prompt]:
    """The request's prompts. Raises: BadRequest naming the field."""
    if request.chat_template is not None:
        raise BadRequest("Chat templates of a request are refused; the model's own is used.", param="chat_template")
    if request.truncate_prompt_tokens == 0:
        raise BadRequest("truncate_prompt_tokens is 0, which would leave no prompt.", param="truncate_prompt_tokens")
    if (request.input is None) == (request.messages is None):
        raise BadRequest("One of `input` and `messages` is needed, and not both.", param="input")
    if request.messages is not None:
        _refuse(request, "messages", ("prompt_name", "input_type"))
        return [_conversation(request, request.messages)]
    assert request.input is not None
    _refuse(request, "input", ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"))
    return _inputs(model, request, request.input)


def params(model: Model, request: EmbeddingRequest) -> PoolingParams:
    """How the vectors are to be. Raises: BadRequest when both names of one switch contradict each other, or for dimensions."""
    if request.normalize is not None and request.use_activation not in (None, request.normalize):
        raise BadRequest("normalize and use_activation are two names of one switch, and they differ.", param="normalize")
    if request.dimensions is not None:
        model.check_dimensions(request.dimensions)
    activation = request.use_activation if request.normalize is None else request.normalize
    return PoolingParams(use_activation=activation, dimensions=request.dimensions)


def response(ctx: Context[Any], request: EmbeddingRequest) -> EmbeddingResponse:
    """The answer."""
    vectors = Vectors(ctx.outputs["embed"], request.encoding_format or "float")
    data = [EmbeddingItem(index=index, embedding=vector) for index, vector in enumerate(vectors)]
    return EmbeddingResponse(id=ctx.id, created=ctx.created, model=ctx.model.id, data=data, usage=ctx.usage())


def _refuse(request: EmbeddingRequest, kind: str, fields: tuple[str, ...]) -> None:
    """What cannot be honoured for this kind of input is refused rather than ignored."""
    for name in fields:
        if getattr(request, name):
            raise BadRequest(f"{name} has no meaning for {kind}; leave it out.", param=name)


def _conversation(request: EmbeddingRequest, messages: list[ChatMessage]) -> ChatPrompt:
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


def _inputs(model: Model, request: EmbeddingRequest, given: str | list[str | int | list[int]]) -> list[Prompt]:
    prefix = instruction(model, prompt_name=request.prompt_name, input_type=request.input_type)
    if isinstance(given, str):
        return [_text(request, given, "input", prefix)]
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
    _refuse(request, "token ids", ("prompt_name", "input_type", "add_special_tokens"))
    if kinds == {int}:
        return [_tokens(request, items, "input")]
    return [_tokens(request, ids, f"input[{position}]") for position, ids in enumerate(items)]


_NAMES: dict[type, str] = {str: "a text", int: "a token id", list: "a list of token ids"}


def _text(request: EmbeddingRequest, text: str, param: str, prefix: str) -> TextPrompt:
    return TextPrompt(
        text=text,
        prefix=prefix,
        add_special_tokens=request.add_special_tokens is not False,
        truncate=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        param=param,
    )


def _tokens(request: EmbeddingRequest, ids: list[int], param: str) -> TokensPrompt:
    return TokensPrompt(token_ids=ids, truncate=request.truncate_prompt_tokens, truncation_side=request.truncation_side, param=param)
