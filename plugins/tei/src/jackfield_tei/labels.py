"""`/predict` and `/rerank`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from jackfield import BadRequest, Context, EmptyPrompt, FloatArray, PairPrompt, PoolingParams, Prompt, Route, TextPrompt
from jackfield_tei.tasks import check_batch, cut
from jackfield_tei.wire import Pairs, Prediction, PredictRequest, Rank, RerankRequest

__all__ = ["Predict", "Rerank"]


class Predict:
    """All labels of a text or of a pair, the likeliest first."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/predict",),
        request=PredictRequest,
        response=list[Prediction | list[Prediction]],
        operations=("classify",),
        summary="Labels of texts, or of pairs of texts.",
        description="`[a, b]` is one pair; a batch is a list of lists, of one text or two each.",
        example={"inputs": [["I like you."], ["I hate pineapples"]]},
    )

    def prompts(self, ctx: Context[Any], request: PredictRequest) -> list[Prompt]:
        options = cut(ctx, request)
        if not _is_batch(request.inputs):
            return [_text_or_pair(request.inputs, "inputs", options)]
        check_batch(ctx, len(request.inputs), "inputs")
        return [_text_or_pair(item, f"inputs[{position}]", options) for position, item in enumerate(request.inputs)]

    def params(self, ctx: Context[Any], request: PredictRequest) -> PoolingParams:
        return PoolingParams(outputs=("classify",), use_activation=not request.raw_scores)

    def response(self, ctx: Context[Any], request: PredictRequest) -> list[Prediction | list[Prediction]]:
        names = [label_name(ctx, number) for number in range(len(ctx.model.card.labels))]
        found = [_predictions(names, scores) for scores in ctx.outputs["classify"]]
        return [*found] if _is_batch(request.inputs) else [*found[0]]


class Rerank:
    """Texts by falling score; of equal ones the last first, as text-embeddings-inference has it."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/rerank",),
        request=RerankRequest,
        response=list[Rank],
        operations=("score",),
        summary="Texts by their relevance for a query.",
        example={"query": "What is Deep Learning?", "texts": ["Deep Learning is not...", "Deep learning is..."]},
    )

    def prompts(self, ctx: Context[Any], request: RerankRequest) -> list[Prompt]:
        check_batch(ctx, len(request.texts), "texts")
        if not request.query:
            raise EmptyPrompt("`query` cannot be empty", param="query")
        options = cut(ctx, request)
        return [
            PairPrompt(text=request.query, second=text, first_param="query", param=f"texts[{position}]", **options)
            for position, text in enumerate(request.texts)
        ]

    def params(self, ctx: Context[Any], request: RerankRequest) -> PoolingParams:
        # Always logits: a sigmoid is what text-embeddings-inference makes of them, whatever the model's files say.
        return PoolingParams(outputs=("score",), use_activation=False)

    def response(self, ctx: Context[Any], request: RerankRequest) -> list[Rank]:
        scores = np.concatenate(ctx.outputs["score"])
        if not request.raw_scores:
            scores = _sigmoid(scores)
        order = np.argsort(scores, kind="stable")[::-1]
        texts = request.texts
        return [Rank(index=int(i), text=texts[i] if request.return_text else None, score=float(scores[i])) for i in order]


def label_name(ctx: Context[Any], number: int) -> str:
    """The name of a class; transformers' own for one that the model's files do not name."""
    return ctx.model.card.labels[number] or f"LABEL_{number}"


def _sigmoid(logits: FloatArray) -> FloatArray:
    # By tanh, which overflows for no logit.
    values: FloatArray = 0.5 * (1 + np.tanh(0.5 * logits))
    return values


def _is_batch(inputs: Pairs) -> bool:
    return isinstance(inputs, list) and any(isinstance(item, list) for item in inputs)


def _text_or_pair(item: Any, param: str, options: dict[str, Any]) -> Prompt:
    texts = [item] if isinstance(item, str) else item
    if not all(isinstance(text, str) for text in texts) or not 1 <= len(texts) <= 2:
        raise BadRequest(
            "A text, or a list of one text or of the two of a pair, is expected; a batch is a list of such lists.", param=param
        )
    if not any(texts):
        raise EmptyPrompt("`inputs` cannot be empty", param=param)
    if len(texts) == 1:
        return TextPrompt(text=texts[0], param=param, **options)
    return PairPrompt(text=texts[0], second=texts[1], param=param, **options)


def _predictions(names: list[str], scores: FloatArray) -> list[Prediction]:
    return [Prediction(score=float(scores[i]), label=names[i]) for i in np.argsort(scores, kind="stable")[::-1]]
