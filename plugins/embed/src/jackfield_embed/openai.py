"""The wire types of `/v1/embeddings`, and what they mean as prompts and parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jackfield import (
    Context,
    InputRequest,
    Model,
    PoolingParams,
    Prompt,
    Usage,
    Vector,
    Vectors,
    aliased,
    input_prompts,
)
from jackfield_embed.instructions import instruction

__all__ = ["EmbeddingItem", "EmbeddingRequest", "EmbeddingResponse", "params", "prompts", "response"]

# Fields that choose an instruction, which goes before texts alone.
_TEXT_ONLY = ("prompt_name", "input_type")


class EmbeddingRequest(InputRequest, frozen=True, kw_only=True):
    """Texts, token ids or a conversation; one of `input` and `messages`."""

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
    prompt_name: Annotated[str | None, Meta(description="One of the model's instructions, put before each text.")] = None
    input_type: Annotated[
        str | None,
        Meta(description="The same by kind of text: query, document, search_query, search_document, classification, clustering."),
    ] = None


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
    prefix = instruction(model, prompt_name=request.prompt_name, input_type=request.input_type) if _takes_texts(request) else ""
    return input_prompts(request, prefix=prefix, text_only=_TEXT_ONLY)


def params(model: Model, request: EmbeddingRequest) -> PoolingParams:
    """How the vectors are to be. Raises: BadRequest when both names of one switch contradict each other, or for dimensions."""
    if request.dimensions is not None:
        model.check_dimensions(request.dimensions)
    return PoolingParams(use_activation=aliased(request, "use_activation", "normalize"), dimensions=request.dimensions)


def response(ctx: Context[Any], request: EmbeddingRequest) -> EmbeddingResponse:
    """The answer."""
    vectors = Vectors(ctx.outputs["embed"], request.encoding_format or "float")
    data = [EmbeddingItem(index=index, embedding=vector) for index, vector in enumerate(vectors)]
    return EmbeddingResponse(id=ctx.id, created=ctx.created, model=ctx.model.id, data=data, usage=ctx.usage())


def _takes_texts(request: EmbeddingRequest) -> bool:
    given = request.input
    return isinstance(given, str) or (given is not None and len(given) > 0 and isinstance(given[0], str))
