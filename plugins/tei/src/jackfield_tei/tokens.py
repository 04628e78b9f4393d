"""`/tokenize`, `/decode` and `/info`, which never meet the engine."""

from __future__ import annotations

from importlib.metadata import version
from itertools import accumulate
from typing import Any, ClassVar

from jackfield import Context, EmptyPrompt, PoolingParams, Prompt, Route, TextPrompt, TokenizedPrompt, TokensPrompt
from jackfield_tei.labels import label_name
from jackfield_tei.tasks import check_batch
from jackfield_tei.wire import DecodeRequest, Info, InfoRequest, SimpleToken, TokenizeRequest

__all__ = ["Decode", "GetInfo", "Tokenize"]


class _Unasked:
    """For routes without an engine."""

    def params(self, ctx: Context[Any], request: Any) -> PoolingParams:
        raise AssertionError("a route without operations has no parameters")


class Tokenize(_Unasked):
    """Tokens of texts, with their places."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/tokenize",),
        request=TokenizeRequest,
        response=list[list[SimpleToken]],
        operations=(),
        summary="Tokens of texts.",
        example={"inputs": "What is Deep Learning?"},
    )

    def prompts(self, ctx: Context[Any], request: TokenizeRequest) -> list[Prompt]:
        texts = _texts(ctx, request)
        special = request.add_special_tokens is not False
        single = isinstance(request.inputs, str)
        return [
            TextPrompt(
                text=text,
                add_special_tokens=special,
                with_offsets=True,
                with_token_strs=True,
                param="inputs" if single else f"inputs[{position}]",
            )
            for position, text in enumerate(texts)
        ]

    def response(self, ctx: Context[Any], request: TokenizeRequest) -> list[list[SimpleToken]]:
        return [_tokens(text, prompt) for text, prompt in zip(_texts(ctx, request), ctx.prompts, strict=True)]


class Decode(_Unasked):
    """Texts of token ids."""

    route: ClassVar[Route] = Route(
        method="POST",
        paths=("/decode",),
        request=DecodeRequest,
        response=list[str],
        operations=(),
        summary="Texts of token ids.",
        example={"ids": [72, 73]},
    )

    def prompts(self, ctx: Context[Any], request: DecodeRequest) -> list[Prompt]:
        single = all(isinstance(item, int) for item in request.ids)
        rows: list[Any] = [request.ids] if single else request.ids
        check_batch(ctx, len(rows), "ids")
        params = ["ids"] if single else [f"ids[{position}]" for position in range(len(rows))]
        for ids, param in zip(rows, params, strict=True):
            if not ids or isinstance(ids, int):
                raise EmptyPrompt("`ids` takes token ids, or a list of lists of them; none may be empty", param=param)
        skip = request.skip_special_tokens is not False
        return [
            TokensPrompt(token_ids=ids, with_text=True, skip_special_tokens=skip, param=param)
            for ids, param in zip(rows, params, strict=True)
        ]

    def response(self, ctx: Context[Any], request: DecodeRequest) -> list[str]:
        return [prompt.text or "" for prompt in ctx.prompts]


class GetInfo(_Unasked):
    """The model and the limits."""

    route: ClassVar[Route] = Route(
        method="GET", paths=("/info",), request=InfoRequest, response=Info, operations=(), summary="The model, and limits.", example={}
    )

    def prompts(self, ctx: Context[Any], request: InfoRequest) -> list[Prompt]:
        return []

    def response(self, ctx: Context[Any], request: InfoRequest) -> Info:
        card = ctx.model.card
        return Info(
            model_id=ctx.model.id,
            model_sha=None,
            model_dtype=card.dtype,
            model_type=_model_type(ctx),
            max_input_length=card.max_length,
            max_client_batch_size=ctx.settings.max_client_batch_size,
            auto_truncate=ctx.settings.auto_truncate,
            version=version("jackfield-tei"),
        )


def _model_type(ctx: Context[Any]) -> dict[str, Any]:
    card = ctx.model.card
    if not card.labels or "embed" in card.operations:
        return {"embedding": {"pooling": {"lasttoken": "last_token"}.get(card.pooling or "", card.pooling)}}
    names = [label_name(ctx, number) for number in range(len(card.labels))]
    labels = {"id2label": {str(number): name for number, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    return {"reranker" if "score" in card.operations else "classifier": labels}


def _texts(ctx: Context[Any], request: TokenizeRequest) -> list[str]:
    """With the model's instruction, which places count from."""
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    check_batch(ctx, len(texts), "inputs")
    prefix = ctx.model.instruction(request.prompt_name)
    return [prefix + text for text in texts]


def _tokens(text: str, prompt: TokenizedPrompt) -> list[SimpleToken]:
    """Places in bytes of UTF-8, as text-embeddings-inference counts them."""
    places = [0, *accumulate(len(character.encode()) for character in text)]
    tokens: list[SimpleToken] = []
    for number, string, offset in zip(prompt.token_ids, prompt.token_strs or (), prompt.offsets or (), strict=True):
        if offset is None:
            tokens.append(SimpleToken(id=number, text=string, special=True, start=None, stop=None))
        else:
            start, stop = offset
            tokens.append(SimpleToken(id=number, text=text[start:stop], special=False, start=places[start], stop=places[stop]))
    return tokens
