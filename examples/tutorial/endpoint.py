"""`/duplicates`: texts that say nearly the same."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from jackfield import BadRequest, Context, Endpoint, EndpointSettings, PoolingParams, Prompt, Request, Route, TextPrompt, Usage
from msgspec import Meta, Struct

__all__ = ["DuplicatesEndpoint", "DuplicatesRequest", "DuplicatesResponse", "DuplicatesSettings"]


class DuplicatesSettings(EndpointSettings, frozen=True, kw_only=True):
    """The keys of [endpoints.duplicates]; those of every endpoint are inherited."""

    max_texts: Annotated[int, Meta(ge=2, description="Texts that a request may have.")] = 64


class DuplicatesRequest(Request, frozen=True, kw_only=True):
    """Texts to be compared with each other."""

    texts: Annotated[list[str], Meta(min_length=2, description="Two texts or more.")]
    threshold: Annotated[float, Meta(ge=0, le=1, description="From which cosine on two texts are the same.")] = 0.9


class Pair(Struct, frozen=True, kw_only=True):
    """The places of two texts, the earlier first, and the cosine of their vectors."""

    first: int
    second: int
    cosine: float


class DuplicatesResponse(Struct, frozen=True, kw_only=True):
    """Pairs, the likest first."""

    id: str
    model: str
    data: list[Pair]
    usage: Usage


class DuplicatesEndpoint(Endpoint[DuplicatesRequest, DuplicatesResponse]):
    """Finds duplicates."""

    name = "duplicates"
    id_prefix = "duplicates"
    operations = ("embed",)
    settings = DuplicatesSettings
    routes = (
        Route(
            method="POST",
            paths=("/duplicates",),
            request=DuplicatesRequest,
            response=DuplicatesResponse,
            summary="Texts that say nearly the same.",
            example={"texts": ["a cat", "a dog", "a cat"]},
        ),
    )

    def preprocess(self, ctx: Context[DuplicatesRequest]) -> list[Prompt]:
        """What the model is to read: one prompt a text."""
        texts, limit = ctx.request.texts, ctx.settings.max_texts
        if len(texts) > limit:
            raise BadRequest(f"texts has {len(texts)}; this server takes {limit} ([endpoints.duplicates] max_texts).", param="texts")
        return [TextPrompt(text=text, param=f"texts[{place}]") for place, text in enumerate(texts)]

    def pooling_params(self, ctx: Context[DuplicatesRequest]) -> PoolingParams:
        """What to compute of each prompt."""
        return PoolingParams(use_activation=True)

    def build_response(self, ctx: Context[DuplicatesRequest]) -> DuplicatesResponse:
        """The answer, from one vector a prompt."""
        vectors = np.stack(ctx.outputs["embed"])
        cosines = np.triu(vectors @ vectors.T, k=1)
        places = np.argwhere(cosines >= ctx.request.threshold)
        found = [Pair(first=int(i), second=int(j), cosine=float(cosines[i, j])) for i, j in places if i < j]
        found.sort(key=lambda pair: -pair.cosine)
        return DuplicatesResponse(id=ctx.id, model=ctx.model.id, data=found, usage=ctx.usage())
