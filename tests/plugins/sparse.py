"""A plugin that adds an operation: sparse vectors of the words that a text is about, as SPLADE makes them of a masked-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from jackfield import (
    Context,
    Endpoint,
    EndpointRegistry,
    InputRequest,
    ModelCard,
    PoolerRegistry,
    PoolingParams,
    Prompt,
    Route,
    hookimpl,
    input_prompts,
)


class SparseResponse(Struct, frozen=True, kw_only=True):
    """Weights by token id, one a text."""

    data: list[dict[str, float]]


class SparseEndpoint(Endpoint[InputRequest, SparseResponse]):
    """Sparse vectors."""

    name = "sparse"
    id_prefix = "sparse"
    operations = ("sparse",)
    routes = (Route(method="POST", paths=("/sparse",), request=InputRequest, response=SparseResponse, example={"input": ["a text"]}),)

    def preprocess(self, ctx: Context[InputRequest]) -> list[Prompt]:
        return input_prompts(ctx.request)

    def pooling_params(self, ctx: Context[InputRequest]) -> PoolingParams:
        return PoolingParams()

    def build_response(self, ctx: Context[InputRequest]) -> SparseResponse:
        rows = ctx.outputs["sparse"]
        return SparseResponse(data=[{str(token): float(weight) for token, weight in enumerate(row) if weight > 0} for row in rows])


# --8<-- [start:register]
def fits(card: ModelCard, config: Mapping[str, Any]) -> bool:
    return card.architecture.endswith("ForMaskedLM")


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    registry.add(SparseEndpoint())


@hookimpl
def jackfield_poolers(registry: PoolerRegistry) -> None:
    registry.add("sparse", "tests.plugins.sparse_pooler:SparsePooler", fits=fits)


# --8<-- [end:register]
