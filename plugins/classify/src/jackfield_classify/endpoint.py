"""`/classify`: the probabilities of a model's labels for texts, token ids or a conversation."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from jackfield import Context, Endpoint, InputRequest, PoolingParams, Prompt, Route, Usage, Vector, aliased, input_prompts

__all__ = ["ClassifyEndpoint", "ClassifyRequest", "ClassifyResponse"]


class ClassifyRequest(InputRequest, frozen=True, kw_only=True):
    """Texts, token ids or a conversation; one of `input` and `messages`."""

    use_activation: Annotated[bool | None, Meta(description="False gives the logits instead of probabilities.")] = None
    activation: Annotated[bool | None, Meta(description="An older name for `use_activation`.")] = None


class ClassifyItem(Struct, frozen=True, kw_only=True):
    """One prompt: the likeliest label, and a number for each label in the order of the model's labels."""

    index: int
    label: Annotated[str | None, Meta(description="Null where the model's files name no label for this number.")]
    probs: Vector
    num_classes: int


class ClassifyResponse(Struct, frozen=True, kw_only=True):
    """Labels in the order of the input."""

    id: str
    created: int
    model: str
    data: list[ClassifyItem]
    usage: Usage
    object: str = "list"


class ClassifyEndpoint(Endpoint[ClassifyRequest, ClassifyResponse]):
    """Probabilities of labels."""

    name = "classify"
    id_prefix = "classify"
    operations = ("classify",)
    routes = (
        Route(
            method="POST",
            paths=("/classify", "/v1/classify"),
            request=ClassifyRequest,
            response=ClassifyResponse,
            summary="The probabilities of a model's labels.",
            example={"input": ["I loved it", "Never again"]},
        ),
    )

    def preprocess(self, ctx: Context[ClassifyRequest]) -> list[Prompt]:
        return input_prompts(ctx.request)

    def pooling_params(self, ctx: Context[ClassifyRequest]) -> PoolingParams:
        return PoolingParams(use_activation=aliased(ctx.request, "use_activation", "activation"))

    def build_response(self, ctx: Context[ClassifyRequest]) -> ClassifyResponse:
        labels = ctx.model.card.labels
        data = [
            ClassifyItem(index=index, label=labels[int(numbers.argmax())], probs=Vector(numbers), num_classes=len(numbers))
            for index, numbers in enumerate(ctx.outputs["classify"])
        ]
        return ClassifyResponse(id=ctx.id, created=ctx.created, model=ctx.model.id, data=data, usage=ctx.usage())
