"""The endpoint: two dialects over the operation `embed`."""

from __future__ import annotations

from jackfield import Context, Endpoint, PoolingParams, Prompt, Route
from jackfield_embed import cohere, openai

__all__ = ["EmbedEndpoint"]

EmbedRequest = openai.EmbeddingRequest | cohere.CohereRequest
EmbedResponse = openai.EmbeddingResponse | cohere.CohereResponse

OPENAI = Route(
    method="POST",
    paths=("/v1/embeddings",),
    request=openai.EmbeddingRequest,
    response=openai.EmbeddingResponse,
    summary="Embeddings, as OpenAI's clients ask for them.",
    example={"input": ["The cat sits outside", "A man is playing guitar"]},
)
COHERE = Route(
    method="POST",
    paths=("/v2/embed",),
    request=cohere.CohereRequest,
    response=cohere.CohereResponse,
    summary="Embeddings, as Cohere's clients ask for them.",
    example={"texts": ["The cat sits outside"], "input_type": "search_document", "embedding_types": ["float"]},
)


class EmbedEndpoint(Endpoint[EmbedRequest, EmbedResponse]):
    """One vector a text."""

    name = "embed"
    id_prefix = "embd"
    operations = ("embed",)
    routes = (OPENAI, COHERE)

    def preprocess(self, ctx: Context[EmbedRequest]) -> list[Prompt]:
        request = ctx.request
        return cohere.prompts(ctx.model, request) if isinstance(request, cohere.CohereRequest) else openai.prompts(ctx.model, request)

    def pooling_params(self, ctx: Context[EmbedRequest]) -> PoolingParams:
        request = ctx.request
        return cohere.params(ctx.model, request) if isinstance(request, cohere.CohereRequest) else openai.params(ctx.model, request)

    def build_response(self, ctx: Context[EmbedRequest]) -> EmbedResponse:
        request = ctx.request
        return cohere.response(ctx, request) if isinstance(request, cohere.CohereRequest) else openai.response(ctx, request)
