"""The endpoint: each route has its task; the root finds out which one a request is for."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct, to_builtins

from jackfield import BadRequest, Context, Endpoint, PoolingParams, Prompt, Route, convert_body
from jackfield_tei.labels import Predict, Rerank
from jackfield_tei.settings import TeiSettings
from jackfield_tei.tasks import Task, num_characters
from jackfield_tei.tokens import Decode, GetInfo, Tokenize
from jackfield_tei.vectors import Embed, EmbedAll, Similarity
from jackfield_tei.wire import EmbedAllRequest, RootRequest

__all__ = ["TeiEndpoint"]

_EMBED, _SIMILARITY, _PREDICT, _RERANK = Embed(), Similarity(), Predict(), Rerank()
_TASKS: tuple[Task, ...] = (_EMBED, EmbedAll(), _SIMILARITY, _RERANK, _PREDICT, Tokenize(), Decode(), GetInfo())
_TASK_OF: dict[str, Task] = {task.route.paths[0]: task for task in _TASKS}
# What the root is, by what its model does.
_ROOT_TASKS: dict[str, Task] = {"embed": _EMBED, "score": _RERANK, "classify": _PREDICT}

_ROOT = Route(
    method="POST",
    paths=("/",),
    request=RootRequest,
    response=list[Any],
    operations=tuple(_ROOT_TASKS),
    summary="What the model does: `/embed`, `/similarity`, `/rerank` or `/predict`.",
    example={"inputs": "What is Deep Learning?"},
)
_SPARSE = Route(
    method="POST",
    paths=("/embed_sparse",),
    request=EmbedAllRequest,
    response=list[Any],
    operations=(),
    summary="Not served.",
    example={"inputs": "What is Deep Learning?"},
    refusal="/embed_sparse is not served: sparse vectors need a SPLADE head, which this server has not. /embed gives dense ones.",
)


class _Work(Struct, frozen=True):
    """What a request was found to be."""

    task: Task
    request: Any
    num_characters: int


class TeiEndpoint(Endpoint[Any, Any]):
    """The API of text-embeddings-inference."""

    name = "tei"
    id_prefix = "tei"
    settings = TeiSettings
    operations = ("embed", "token_embed", "score", "classify")
    routes = (*(task.route for task in _TASKS), _ROOT, _SPARSE)

    def preprocess(self, ctx: Context[Any]) -> list[Prompt]:
        task, request = _found(ctx)
        prompts = task.prompts(ctx, request)
        ctx.state["tei"] = _Work(task, request, num_characters(prompts))
        return prompts

    def pooling_params(self, ctx: Context[Any]) -> PoolingParams:
        work: _Work = ctx.state["tei"]
        return work.task.params(ctx, work.request)

    def build_response(self, ctx: Context[Any]) -> Any:
        work: _Work = ctx.state["tei"]
        if ctx.operation is not None:
            _add_headers(ctx, work.num_characters)
        return work.task.response(ctx, work.request)


def _found(ctx: Context[Any]) -> tuple[Task, Any]:
    """The task of a request, and the request in its form. Raises: InvalidBody, BadRequest, for a request to the root of another form."""
    request = ctx.request
    if not isinstance(request, RootRequest):
        return _TASK_OF[ctx.route.paths[0]], request
    task = _ROOT_TASKS[ctx.operation or ""]
    if task is _EMBED and isinstance(request.inputs, dict):
        task = _SIMILARITY
    if request.query is not None and task is not _RERANK:
        raise BadRequest(f"Model `{ctx.model.id}` does not rerank, which a query is for; name one that does in `model`.", param="query")
    given = {name: value for name, value in to_builtins(request).items() if value is not None}
    return task, convert_body(given, task.route.request)


def _add_headers(ctx: Context[Any], count: int) -> None:
    """Times in milliseconds. Waiting for a place in a batch is part of x-inference-time: there is no x-queue-time."""
    total = f"{(time.monotonic() - ctx.started) * 1e3:.0f}"
    ctx.response_headers |= {
        "x-compute-type": ctx.model.card.device or "unknown",
        "x-compute-time": total,
        "x-total-time": total,
        "x-compute-characters": str(count),
        "x-compute-tokens": str(ctx.num_prompt_tokens),
        "x-tokenization-time": f"{ctx.timings_s.get('tokenize', 0) * 1e3:.0f}",
        "x-inference-time": f"{ctx.timings_s.get('engine', 0) * 1e3:.0f}",
    }
