"""`/rerank`: documents in the order of their scores for one query, in the shapes of Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from jackfield import BadRequest, Context, Endpoint, EndpointRegistry, PoolingParams, Prompt, Request, Route, Usage, hookimpl
from jackfield_score.pairs import Cut, Pairs, params

__all__ = ["RerankEndpoint", "RerankRequest", "RerankResponse"]

PLUGIN_API = 1

Document = str | dict[str, Any]


class RerankRequest(Request, frozen=True, kw_only=True):
    """A query and the documents to be put in order. Long documents are cut, the query never is."""

    query: Annotated[str, Meta(description="What the documents are compared with.")]
    documents: Annotated[
        list[Document], Meta(description="Texts, or objects with fields; an object's `text` is read, or all of its fields, one a line.")
    ]
    top_n: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Only the best so many; 0 for all.")] = None
    return_documents: Annotated[bool | None, Meta(description="Default true; false leaves the documents out of the answer.")] = None
    rank_fields: Annotated[list[str] | None, Meta(description="Fields of documents that are objects, in this order.")] = None
    max_tokens_per_doc: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Tokens of a document; 0 for no bound.")] = None
    max_chunks_per_doc: Annotated[int | None, Meta(description="1 is what is done; more is refused.")] = None
    relevant_spans: Annotated[dict[str, Any] | None, Meta(description="Refused: no span is marked.")] = None
    use_activation: Annotated[bool | None, Meta(description="False leaves a cross-encoder's logits as they are.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None, Meta(description="Tokens of a pair; left out or -1: the model's maximum.")
    ] = None
    return_truncation: Annotated[bool | None, Meta(description="True tells for each result how many tokens of its document were cut.")] = (
        None
    )


class RerankResult(Struct, frozen=True, kw_only=True):
    """A document: its place in the request, its score, and itself."""

    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET
    truncated_tokens: int | UnsetType = UNSET


class RerankResponse(Struct, frozen=True, kw_only=True):
    """Documents by falling score; equal scores keep the order of the request."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: dict[str, Any]


class RerankEndpoint(Endpoint[RerankRequest, RerankResponse]):
    """Reranks by a cross-encoder, or by the cosine of an embedder's vectors."""

    name = "rerank"
    id_prefix = "rerank"
    operations = ("score", "embed")
    routes = (
        Route(
            method="POST",
            paths=("/v1/rerank", "/rerank", "/v2/rerank"),
            request=RerankRequest,
            response=RerankResponse,
            summary="Documents in the order of their relevance for a query.",
            example={"query": "What is AI?", "documents": ["Machines that learn.", "Pizza with cheese."], "top_n": 1},
        ),
    )

    def preprocess(self, ctx: Context[RerankRequest]) -> list[Prompt]:
        request = ctx.request
        if request.max_chunks_per_doc not in (None, 1):
            raise BadRequest("Documents are not cut into chunks; max_chunks_per_doc must be 1 or left out.", param="max_chunks_per_doc")
        if request.relevant_spans is not None:
            raise BadRequest("Spans of documents are not marked; leave relevant_spans out.", param="relevant_spans")
        texts = [_text(request, document, position) for position, document in enumerate(request.documents)]
        pairs = Pairs(queries=[request.query], documents=texts, names=("query", "documents"), one_query=True)
        ctx.state["pairs"] = pairs
        total = -1 if request.truncate_prompt_tokens is None else request.truncate_prompt_tokens
        return pairs.prompts(ctx, Cut(total=total, document=request.max_tokens_per_doc or None, side="right"))

    def pooling_params(self, ctx: Context[RerankRequest]) -> PoolingParams:
        return params(ctx, ctx.request.use_activation)

    def build_response(self, ctx: Context[RerankRequest]) -> RerankResponse:
        request = ctx.request
        pairs: Pairs = ctx.state["pairs"]
        scores, cut = pairs.scores(ctx), pairs.num_cut(ctx)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        return RerankResponse(
            id=ctx.id,
            model=ctx.model.id,
            results=[
                RerankResult(
                    index=index,
                    relevance_score=scores[index],
                    document=UNSET if request.return_documents is False else _echo(request.documents[index]),
                    truncated_tokens=cut[index] if request.return_truncation else UNSET,
                )
                for index in order
            ],
            usage=ctx.usage(),
            meta={"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": {"input_tokens": ctx.num_prompt_tokens}},
        )


def _echo(document: Document) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document


def _text(request: RerankRequest, document: Document, position: int) -> str:
    """What is read of a document. Raises: BadRequest naming it."""
    param = f"documents[{position}]"
    if isinstance(document, str):
        return document
    if request.rank_fields is None and isinstance(document.get("text"), str):
        text: str = document["text"]
        return text
    names = request.rank_fields or list(document)
    missing = next((name for name in names if name not in document), None)
    if missing is not None:
        raise BadRequest(f"The document has no field {missing[:100]!r}, which rank_fields names.", param=param)
    wrong = next((name for name in names if not isinstance(document[name], str | int | float)), None)
    if wrong is not None or not names:
        what = f"its field {wrong[:100]!r} is neither text nor a number" if wrong is not None else "it has no field"
        raise BadRequest(f"The document cannot be read: {what}.", param=param)
    return "\n".join(f"{name}: {document[name]}" for name in names)


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(RerankEndpoint())
