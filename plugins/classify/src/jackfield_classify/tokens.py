"""`/token_classify`: the entities that a model finds in texts, with their places."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from jackfield import (
    Context,
    EmptyPrompt,
    Endpoint,
    EndpointRegistry,
    PoolingParams,
    Prompt,
    Request,
    Route,
    TextPrompt,
    Usage,
    hookimpl,
)
from jackfield_classify.entities import Entity, Strategy, Tokens, find_entities

__all__ = ["TokenClassifyEndpoint", "TokenClassifyRequest", "TokenClassifyResponse"]

PLUGIN_API = 1


class TokenClassifyRequest(Request, frozen=True, kw_only=True):
    """Texts, and how their tokens are put together to entities."""

    input: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    aggregation_strategy: Annotated[
        Strategy | None,
        Meta(
            description="`none` gives each token; `simple` (the default) joins neighbours of one label; `first`, `average` and `max` give "
            "the tokens of a word one label before that: the first token's, that of the mean, or the surest token's."
        ),
    ] = None
    ignore_labels: Annotated[list[str] | None, Meta(description='Labels that are left out of the answer; default `["O"]`.')] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut to this many tokens, special tokens included; -1 cuts to the model's maximum."),
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, Meta(description="Which end is cut off.")] = None


class TokenClassifyItem(Struct, frozen=True, kw_only=True):
    """The entities of one text, in its order; `start` and `end` count characters (Unicode code points)."""

    index: int
    entities: list[Entity]


class TokenClassifyResponse(Struct, frozen=True, kw_only=True):
    """Entities in the order of the input."""

    id: str
    created: int
    model: str
    data: list[TokenClassifyItem]
    usage: Usage
    object: str = "list"


class TokenClassifyEndpoint(Endpoint[TokenClassifyRequest, TokenClassifyResponse]):
    """Entities in texts: names, places, parts of speech."""

    name = "token_classify"
    id_prefix = "tokcls"
    operations = ("token_classify",)
    routes = (
        Route(
            method="POST",
            paths=("/token_classify", "/v1/token_classify"),
            request=TokenClassifyRequest,
            response=TokenClassifyResponse,
            summary="The entities in texts, and where they stand.",
            example={"input": ["Ada Lovelace lived in London."]},
        ),
    )

    def preprocess(self, ctx: Context[TokenClassifyRequest]) -> list[Prompt]:
        request = ctx.request
        alone = isinstance(request.input, str)
        texts = _texts(request)
        if not texts:
            raise EmptyPrompt("input is empty; at least one text is needed.", param="input")
        return [
            TextPrompt(
                text=text,
                truncate=request.truncate_prompt_tokens,
                truncation_side=request.truncation_side,
                with_offsets=True,
                with_token_strs=True,
                param="input" if alone else f"input[{position}]",
            )
            for position, text in enumerate(texts)
        ]

    def pooling_params(self, ctx: Context[TokenClassifyRequest]) -> PoolingParams:
        return PoolingParams()

    def build_response(self, ctx: Context[TokenClassifyRequest]) -> TokenClassifyResponse:
        request, info = ctx.request, ctx.model.tokenizer_info
        strategy = request.aggregation_strategy or "simple"
        ignored = ("O",) if request.ignore_labels is None else request.ignore_labels
        data: list[TokenClassifyItem] = []
        for index, (text, prompt) in enumerate(zip(_texts(request), ctx.prompts, strict=True)):
            tokens = Tokens(
                text=text,
                offsets=prompt.offsets or [],
                strings=prompt.token_strs or [],
                continuing=info.get("continuing_subword_prefix", ""),
                unknown=info.get("unk_token"),
            )
            found = find_entities(tokens, ctx.outputs["token_classify"][index], ctx.model.card.labels, strategy)
            data.append(TokenClassifyItem(index=index, entities=[entity for entity in found if entity.name not in ignored]))
        return TokenClassifyResponse(id=ctx.id, created=ctx.created, model=ctx.model.id, data=data, usage=ctx.usage())


def _texts(request: TokenClassifyRequest) -> list[str]:
    return [request.input] if isinstance(request.input, str) else request.input


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(TokenClassifyEndpoint())
