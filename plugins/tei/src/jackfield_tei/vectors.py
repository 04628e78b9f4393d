"""`/embed`, `/embed_all` and `/similarity`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from jackfield import Context, EmptyPrompt, PoolingParams, Prompt, Route, TextPrompt, Vector
from jackfield_tei.tasks import check_batch, cut, input_prompts
from jackfield_tei.wire import EmbedAllRequest, EmbedRequest, SimilarityParameters, SimilarityRequest

__all__ = ["Embed", "EmbedAll", "Similarity"]

TokenVectors = Annotated[
    Vector, Meta(extra_json_schema={"oneOf": [{"type": "array", "items": {"type": "array", "items": {"type": "number"}}}]})
]


class Embed:
    """A vector a text."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/embed",),
        request=EmbedRequest,
        response=list[Vector],
        operations=("embed",),
        summary="Vectors of texts.",
        example={"inputs": "What is Deep Learning?"},
    )

    def prompts(self, ctx: Context[Any], request: EmbedRequest) -> list[Prompt]:
        return input_prompts(ctx, request.inputs, cut(ctx, request), ctx.model.instruction(request.prompt_name))

    def params(self, ctx: Context[Any], request: EmbedRequest) -> PoolingParams:
        return PoolingParams(outputs=("embed",), use_activation=request.normalize is not False, dimensions=request.dimensions)

    def response(self, ctx: Context[Any], request: EmbedRequest) -> list[Vector]:
        return [Vector(array) for array in ctx.outputs["embed"]]


class EmbedAll:
    """A vector a token, as the model gives it: no pooling, no length."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/embed_all",),
        request=EmbedAllRequest,
        response=list[TokenVectors],
        operations=("token_embed",),
        summary="Vectors of all tokens of texts.",
        example={"inputs": "What is Deep Learning?"},
    )

    def prompts(self, ctx: Context[Any], request: EmbedAllRequest) -> list[Prompt]:
        return input_prompts(ctx, request.inputs, cut(ctx, request), ctx.model.instruction(request.prompt_name))

    def params(self, ctx: Context[Any], request: EmbedAllRequest) -> PoolingParams:
        return PoolingParams(outputs=("token_embed",), use_activation=False)

    def response(self, ctx: Context[Any], request: EmbedAllRequest) -> list[Vector]:
        return [Vector(array) for array in ctx.outputs["token_embed"]]


class Similarity:
    """The cosine of a sentence with each of the others."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/similarity",),
        request=SimilarityRequest,
        response=list[float],
        operations=("embed",),
        summary="Cosines of one sentence with others.",
        example={"inputs": {"source_sentence": "That is a happy person", "sentences": ["That is a happy dog", "Today is a sunny day"]}},
    )

    def prompts(self, ctx: Context[Any], request: SimilarityRequest) -> list[Prompt]:
        sentences = request.inputs.sentences
        if not sentences:
            raise EmptyPrompt("`inputs.sentences` cannot be empty", param="inputs.sentences")
        check_batch(ctx, len(sentences) + 1, "inputs.sentences")
        parameters = request.parameters or SimilarityParameters()
        options = cut(ctx, parameters)
        prefix = ctx.model.instruction(parameters.prompt_name, param="parameters.prompt_name")
        places = ["inputs.source_sentence", *(f"inputs.sentences[{place}]" for place in range(len(sentences)))]
        texts = [request.inputs.source_sentence, *sentences]
        empty = next((place for place, text in zip(places, texts, strict=True) if not text), None)
        if empty is not None:
            raise EmptyPrompt(f"`{empty}` cannot be empty", param=empty)
        return [TextPrompt(text=text, prefix=prefix, param=place, **options) for place, text in zip(places, texts, strict=True)]

    def params(self, ctx: Context[Any], request: SimilarityRequest) -> PoolingParams:
        return PoolingParams(outputs=("embed",), use_activation=True)

    def response(self, ctx: Context[Any], request: SimilarityRequest) -> list[float]:
        source, *sentences = ctx.outputs["embed"]
        cosines = (np.stack(sentences) @ source).clip(-1, 1)
        return [float(cosine) for cosine in cosines]
