"""The wire types of Cohere's `/v2/embed`, and what they mean as prompts and parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field

from jackfield import (
    BadRequest,
    ContentPart,
    Context,
    EmptyPrompt,
    FloatArray,
    Model,
    PoolingParams,
    Prompt,
    Request,
    TextPrompt,
    Vectors,
)
from jackfield_embed.instructions import instruction

__all__ = ["CohereRequest", "CohereResponse", "params", "prompts", "response"]

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereInput(Struct, frozen=True, kw_only=True):
    """An input of several parts, all of them text here."""

    content: list[ContentPart]


class CohereRequest(Request, frozen=True, kw_only=True):
    """Exactly one of `texts` and `inputs`."""

    texts: Annotated[list[str] | None, Meta(description="Texts to embed.")] = None
    inputs: Annotated[list[CohereInput] | None, Meta(description="Inputs of text parts, which are joined.")] = None
    images: Annotated[list[str] | None, Meta(description="Refused: no model here takes images.")] = None
    input_type: Annotated[str | None, Meta(description="Chooses the model's instruction, where it has one for this kind.")] = None
    embedding_types: Annotated[list[EmbeddingType] | None, Meta(description="Forms of the vectors; default float.")] = None
    output_dimension: Annotated[int | None, Meta(description="As `dimensions` of /v1/embeddings.")] = None
    truncate: Annotated[Literal["NONE", "START", "END"] | None, Meta(description="Which end of a long text is cut; END by default.")] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Tokens a text may have; the model's maximum by default.")
    ] = None


class CohereEmbeddings(Struct, frozen=True, kw_only=True):
    """Vectors by form, those that were asked for. int8: each vector scaled so that its largest absolute number is 127. uint8: int8 + 128.
    ubinary: one bit a number (1 where it is not negative), most significant first; binary: ubinary - 128."""

    float_: Vectors | UnsetType = field(name="float", default=UNSET)
    int8: Vectors | UnsetType = UNSET
    uint8: Vectors | UnsetType = UNSET
    binary: Vectors | UnsetType = UNSET
    ubinary: Vectors | UnsetType = UNSET
    base64: Vectors | UnsetType = UNSET


class CohereResponse(Struct, frozen=True, kw_only=True):
    """Vectors in the order of the texts."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"


def prompts(model: Model, request: CohereRequest) -> list[Prompt]:
    """The request's prompts. Raises: BadRequest naming the field."""
    if request.images is not None:
        raise BadRequest("Images are not served; send texts.", param="images")
    name, texts = _texts(request)
    if not texts:
        raise EmptyPrompt(f"{name} is empty; at least one text is needed.", param=name)
    prefix = instruction(model, prompt_name=None, input_type=request.input_type)
    limit = model.card.max_length
    if request.max_tokens is not None and request.max_tokens > limit:
        raise BadRequest(f"max_tokens is {request.max_tokens}, over the model's maximum of {limit}.", param="max_tokens")
    cut = request.truncate != "NONE"
    return [
        TextPrompt(
            text=text,
            prefix=prefix,
            truncate=(request.max_tokens or -1) if cut else None,
            max_tokens=None if cut else request.max_tokens,
            truncation_side="left" if request.truncate == "START" else "right",
            param=f"{name}[{position}]",
        )
        for position, text in enumerate(texts)
    ]


def params(model: Model, request: CohereRequest) -> PoolingParams:
    """How the vectors are to be. Raises: BadRequest."""
    size = request.output_dimension or model.card.embedding_size or 0
    if request.output_dimension is not None:
        model.check_dimensions(request.output_dimension, param="output_dimension")
    if size % 8 and {"binary", "ubinary"} & set(request.embedding_types or ()):
        raise BadRequest(f"Binary vectors need a size divisible by 8, and this one is {size}.", param="embedding_types")
    return PoolingParams(dimensions=request.output_dimension)


def response(ctx: Context[Any], request: CohereRequest) -> CohereResponse:
    """The answer."""
    vectors = ctx.outputs["embed"]
    forms = {_FIELDS.get(name, name): _form(vectors, name) for name in request.embedding_types or _DEFAULT_TYPES}
    units = {"input_tokens": ctx.num_prompt_tokens}
    return CohereResponse(
        id=ctx.id,
        embeddings=CohereEmbeddings(**forms),
        texts=_texts(request)[1],
        meta={"api_version": {"version": "2"}, "billed_units": units},
    )


_FIELDS: dict[str, str] = {"float": "float_"}
_DEFAULT_TYPES: list[EmbeddingType] = ["float"]


def _texts(request: CohereRequest) -> tuple[str, list[str]]:
    if (request.texts is None) == (request.inputs is None):
        raise BadRequest("Exactly one of `texts` and `inputs` is needed.", param="texts")
    if request.texts is not None:
        return "texts", request.texts
    assert request.inputs is not None
    joined: list[str] = []
    for position, given in enumerate(request.inputs):
        for part_position, part in enumerate(given.content):
            if part.type != "text" or part.text is None:
                where = f"inputs[{position}].content[{part_position}]"
                raise BadRequest(f"A part of type {part.type[:50]!r} is not served; only text is.", param=where)
        joined.append("\n".join(part.text or "" for part in given.content))
    return "inputs", joined


def _form(vectors: list[FloatArray], name: EmbeddingType) -> Vectors:
    if name in ("float", "base64"):
        return Vectors(vectors, "base64" if name == "base64" else "float")
    matrix = np.stack(vectors)
    if name in ("int8", "uint8"):
        scale = np.maximum(np.abs(matrix).max(axis=1, keepdims=True), 1e-12)
        scaled = np.rint(matrix / scale * 127)
        return Vectors(list(scaled.astype(np.int8) if name == "int8" else (scaled + 128).astype(np.uint8)))
    bits = np.packbits(matrix >= 0, axis=1)
    return Vectors(list(bits if name == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)))
