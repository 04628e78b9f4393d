"""Pairs of a query and a document: as prompts for whatever the model can, and as scores from its outputs.

A cross-encoder reads each pair as one prompt. An embedder reads each text once, and the score is the cosine of two vectors.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec import Struct

from jackfield import BadRequest, Context, EmptyPrompt, Model, PairPrompt, PoolingParams, Prompt, TextPrompt

__all__ = ["Cut", "Pairs"]

# What models call the instruction that goes before a query, and before a document, likeliest first.
_QUERY_PROMPTS = ("query", "search_query")
_DOCUMENT_PROMPTS = ("document", "passage", "search_document")


class Cut(Struct, frozen=True, kw_only=True):
    """How long texts are cut. total: tokens of a pair (a text, for an embedder), -1 the model's maximum, None not at all."""

    total: int | None = None
    document: int | None = None
    side: Literal["left", "right"] | None = None


class Pairs(Struct, frozen=True, kw_only=True):
    """One query for all documents, or one for each. names: the request's fields, for error messages."""

    queries: list[str]
    documents: list[str]
    names: tuple[str, str]
    one_query: bool
    one_document: bool = False

    def check(self) -> None:
        """Raises: EmptyPrompt, BadRequest, naming the field."""
        first, second = self.names
        for name, texts in ((first, self.queries), (second, self.documents)):
            if not texts:
                raise EmptyPrompt(f"{name} is empty; at least one text is needed.", param=name)
        if len(self.queries) not in (1, len(self.documents)):
            raise BadRequest(
                f"{first} has {len(self.queries)} texts and {second} has {len(self.documents)}; one to one, one to many and as many "
                "as there are of the other can be paired.",
                param=first,
            )
        for position, text in enumerate(self.queries):
            if not text:
                raise EmptyPrompt("A query is empty; it needs at least one character.", param=self._param(0, position))

    def prompts(self, ctx: Context[Any], cut: Cut) -> list[Prompt]:
        """For a cross-encoder a prompt a pair; for an embedder one a text, queries first. Raises: as `check`."""
        self.check()
        if ctx.operation == "score":
            places = range(len(self.documents)) if len(self.queries) > 1 else [0] * len(self.documents)
            return [
                PairPrompt(
                    text=self.queries[place],
                    second=document,
                    first_param=self._param(0, place),
                    max_second_tokens=cut.document,
                    truncate=cut.total,
                    truncation_side=cut.side,
                    param=self._param(1, position),
                )
                for position, (place, document) in enumerate(zip(places, self.documents, strict=True))
            ]
        limit = ctx.model.card.max_length
        document_cut = cut.total if cut.document is None else min(cut.document, limit)
        texts = [(0, position, text, cut.total) for position, text in enumerate(self.queries)]
        texts += [(1, position, text, document_cut) for position, text in enumerate(self.documents)]
        prefixes = (_instruction(ctx.model, _QUERY_PROMPTS), _instruction(ctx.model, _DOCUMENT_PROMPTS))
        return [
            TextPrompt(text=text, prefix=prefixes[side], truncate=total, truncation_side=cut.side, param=self._param(side, position))
            for side, position, text, total in texts
        ]

    def scores(self, ctx: Context[Any]) -> list[float]:
        """One a document, in their order."""
        if ctx.operation == "score":
            return [float(score[0]) for score in ctx.outputs["score"]]
        vectors = np.stack(ctx.outputs["embed"])
        queries, documents = vectors[: len(self.queries)], vectors[len(self.queries) :]
        cosines = np.einsum("nd,nd->n", np.broadcast_to(queries, documents.shape), documents)
        return [float(cosine) for cosine in cosines.clip(-1, 1)]

    def num_cut(self, ctx: Context[Any]) -> list[int]:
        """Tokens that each document has lost."""
        return [prompt.num_cut for prompt in ctx.prompts[-len(self.documents) :]]

    def _param(self, side: int, position: int) -> str:
        alone = (self.one_query, self.one_document)[side]
        return self.names[side] if alone else f"{self.names[side]}[{position}]"


def params(ctx: Context[Any], use_activation: bool | None) -> PoolingParams:
    """What the engine is asked for. Raises: BadRequest for a switch that an embedder has not."""
    if ctx.operation == "score":
        return PoolingParams(use_activation=use_activation)
    if use_activation is False:
        raise BadRequest(f"Model `{ctx.model.id}` scores by cosine, which has no activation to leave out.", param="use_activation")
    return PoolingParams(use_activation=True)


def _instruction(model: Model, names: tuple[str, ...]) -> str:
    prompts = model.card.prompts
    return next((prompts[name] for name in names if name in prompts), model.instruction(None))
