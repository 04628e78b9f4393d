"""`/pooling`: what a model computes of each prompt, as it is: vectors, labels and hidden states, of whole texts or of each token."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from jackfield import BadRequest, Context, Endpoint, InputRequest, PoolingParams, Prompt, Route, Usage, Vector, aliased, input_prompts

__all__ = ["PoolingEndpoint", "PoolingRequest", "PoolingResponse"]

Task = Literal["embed", "classify", "token_embed", "token_classify", "hidden_states"]


class PoolingRequest(InputRequest, frozen=True, kw_only=True):
    """Texts, token ids or a conversation; one of `input` and `messages`."""

    task: Annotated[Task | None, Meta(description="What to compute; left out: the first of these that the model can.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="`float` (the default), or base64 of little-endian float32, row by row.")
    ] = None
    use_activation: Annotated[
        bool | None, Meta(description="Vectors of length 1, probabilities instead of logits; null leaves it to the model's files.")
    ] = None
    normalize: Annotated[bool | None, Meta(description="An older name for `use_activation`.")] = None
    dimensions: Annotated[int | None, Meta(description="Of `embed` only: keep this many leading numbers and normalise again.")] = None


class PoolingItem(Struct, frozen=True, kw_only=True):
    """The numbers of one prompt: a list, or a list for each token."""

    index: int
    data: Vector
    object: str = "pooling"


class PoolingResponse(Struct, frozen=True, kw_only=True):
    """Numbers in the order of the input."""

    id: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: Usage
    object: str = "list"


class PoolingEndpoint(Endpoint[PoolingRequest, PoolingResponse]):
    """Whatever a model computes."""

    name = "pooling"
    id_prefix = "pooling"
    operations = ("embed", "classify", "token_classify", "token_embed", "hidden_states")
    routes = (
        Route(
            method="POST",
            paths=("/pooling", "/v1/pooling"),
            request=PoolingRequest,
            response=PoolingResponse,
            summary="What a model computes, as it is.",
            example={"input": ["The cat sits outside"]},
        ),
    )

    def preprocess(self, ctx: Context[PoolingRequest]) -> list[Prompt]:
        return input_prompts(ctx.request)

    def pooling_params(self, ctx: Context[PoolingRequest]) -> PoolingParams:
        request = ctx.request
        output = _output(ctx)
        if request.dimensions is not None:
            if output != "embed":
                raise BadRequest(f"dimensions has no meaning for {output}, only for embed.", param="dimensions")
            ctx.model.check_dimensions(request.dimensions)
        activation = aliased(request, "use_activation", "normalize")
        return PoolingParams(outputs=(output,), use_activation=activation, dimensions=request.dimensions)

    def build_response(self, ctx: Context[PoolingRequest]) -> PoolingResponse:
        encoding = ctx.request.encoding_format or "float"
        data = [PoolingItem(index=index, data=Vector(array, encoding)) for index, array in enumerate(ctx.outputs[_output(ctx)])]
        return PoolingResponse(id=ctx.id, created=ctx.created, model=ctx.model.id, data=data, usage=ctx.usage())


def _output(ctx: Context[PoolingRequest]) -> str:
    """The task that the request names, or what the core has chosen for this model."""
    return ctx.request.task or ctx.operation or "embed"
