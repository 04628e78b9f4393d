"""`/score`: how well texts go together, in pairs of one to one, one to many, or many to as many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jackfield import BadRequest, Context, Endpoint, EndpointRegistry, PoolingParams, Prompt, Request, Route, Usage, hookimpl
from jackfield_score.pairs import Cut, Pairs, params

__all__ = ["ScoreEndpoint", "ScoreRequest", "ScoreResponse"]

PLUGIN_API = 1

Texts = str | list[str]


class ScoreRequest(Request, frozen=True, kw_only=True):
    """`queries` and `documents`, or `text_1` and `text_2`: two names of the same."""

    queries: Annotated[Texts | None, Meta(description="A query for all documents, or one for each.")] = None
    documents: Annotated[Texts | None, Meta(description="A document, or a list of them.")] = None
    text_1: Annotated[Texts | None, Meta(description="vLLM's name for `queries`.")] = None
    text_2: Annotated[Texts | None, Meta(description="vLLM's name for `documents`.")] = None
    use_activation: Annotated[bool | None, Meta(description="False leaves a cross-encoder's logits as they are.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut documents so that a pair has this many tokens; -1 is the model's maximum. Left out: too long is an error."),
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, Meta(description="Which end of a document is cut off.")] = None
    max_tokens_per_doc: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Tokens of a document; 0 for no bound.")] = None
    return_truncation: Annotated[bool | None, Meta(description="True tells for each pair how many tokens of its document were cut.")] = None


class ScoreItem(Struct, frozen=True, kw_only=True):
    """The score of one pair; `index` is the place of its document."""

    index: int
    score: float
    object: str = "score"
    truncated_tokens: int | UnsetType = UNSET


class ScoreResponse(Struct, frozen=True, kw_only=True):
    """Scores in the order of the documents."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage
    object: str = "list"


class ScoreEndpoint(Endpoint[ScoreRequest, ScoreResponse]):
    """Scores by a cross-encoder, or by the cosine of an embedder's vectors."""

    name = "score"
    id_prefix = "score"
    operations = ("score", "embed")
    routes = (
        Route(
            method="POST",
            paths=("/score", "/v1/score"),
            request=ScoreRequest,
            response=ScoreResponse,
            summary="How well pairs of texts go together.",
            example={"queries": "What is AI?", "documents": ["Machines that learn.", "Pizza with cheese."]},
        ),
    )

    def preprocess(self, ctx: Context[ScoreRequest]) -> list[Prompt]:
        request = ctx.request
        cut = Cut(total=request.truncate_prompt_tokens, document=request.max_tokens_per_doc or None, side=request.truncation_side)
        pairs = _pairs(request)
        ctx.state["pairs"] = pairs
        return pairs.prompts(ctx, cut)

    def pooling_params(self, ctx: Context[ScoreRequest]) -> PoolingParams:
        return params(ctx, ctx.request.use_activation)

    def build_response(self, ctx: Context[ScoreRequest]) -> ScoreResponse:
        pairs: Pairs = ctx.state["pairs"]
        cut: Sequence[int | UnsetType] = pairs.num_cut(ctx) if ctx.request.return_truncation else [UNSET] * len(pairs.documents)
        data = [
            ScoreItem(index=index, score=score, truncated_tokens=num)
            for index, (score, num) in enumerate(zip(pairs.scores(ctx), cut, strict=True))
        ]
        return ScoreResponse(id=ctx.id, created=ctx.created, model=ctx.model.id, data=data, usage=ctx.usage())


def _pairs(request: ScoreRequest) -> Pairs:
    """Raises: BadRequest for fields of both names, or none."""
    given = {name for name in ("queries", "documents", "text_1", "text_2") if getattr(request, name) is not None}
    for names in (("queries", "documents"), ("text_1", "text_2")):
        if given == set(names):
            first, second = (getattr(request, name) for name in names)
            return Pairs(
                queries=[first] if isinstance(first, str) else first,
                documents=[second] if isinstance(second, str) else second,
                names=names,
                one_query=isinstance(first, str),
                one_document=isinstance(second, str),
            )
    missing = {"queries": "documents", "documents": "queries", "text_1": "text_2", "text_2": "text_1"}
    param = missing[next(iter(given))] if len(given) == 1 else "queries"
    raise BadRequest("`queries` and `documents` are needed, or `text_1` and `text_2`, and not both pairs.", param=param)


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(ScoreEndpoint())
