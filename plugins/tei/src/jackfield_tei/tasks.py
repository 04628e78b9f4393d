"""What the routes have in common: a task for each, and how texts are cut and counted."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

from jackfield import BadRequest, Context, EmptyPrompt, PairPrompt, PoolingParams, Prompt, Route, ServingError, TextPrompt, TokensPrompt
from jackfield_tei.wire import Inputs

__all__ = ["BatchTooLarge", "Cuts", "Task", "check_batch", "cut", "input_prompts", "num_characters"]


class BatchTooLarge(ServingError):
    """More texts than `max_client_batch_size`, with the status that text-embeddings-inference gives it."""

    status: ClassVar[int] = 413
    type: ClassVar[str] = "RequestTooLargeError"

    def __init__(self, got: int, limit: int, param: str) -> None:
        super().__init__(f"batch size {got} > maximum allowed batch size {limit} ([endpoints.tei] max_client_batch_size)", param=param)


class Task(Protocol):
    """A route and its three stages. request: `ctx.request`, or what was found in a request to the root."""

    route: ClassVar[Route]

    def prompts(self, ctx: Context[Any], request: Any) -> list[Prompt]:
        """What the model is to read."""
        ...

    def params(self, ctx: Context[Any], request: Any) -> PoolingParams:
        """What to compute of it."""
        ...

    def response(self, ctx: Context[Any], request: Any) -> Any:
        """The bare answer."""
        ...


class Cuts(Protocol):
    """A request that says how long texts are cut."""

    @property
    def truncate(self) -> bool | None:
        """Whether."""
        ...

    @property
    def truncation_direction(self) -> str | None:
        """Which end."""
        ...


def cut(ctx: Context[Any], request: Cuts) -> dict[str, Any]:
    """The fields of a prompt that cut it."""
    wanted = ctx.settings.auto_truncate if request.truncate is None else request.truncate
    side: Literal["left", "right"] = "left" if (request.truncation_direction or "").lower() == "left" else "right"
    return {"truncate": -1 if wanted else None, "truncation_side": side}


def check_batch(ctx: Context[Any], count: int, param: str) -> None:
    """Raises: EmptyPrompt, BatchTooLarge."""
    if not count:
        raise EmptyPrompt(f"`{param}` cannot be empty", param=param)
    limit: int = ctx.settings.max_client_batch_size
    if count > limit:
        raise BatchTooLarge(count, limit, param)


def input_prompts(ctx: Context[Any], inputs: Inputs, options: dict[str, Any], prefix: str) -> list[Prompt]:
    """Prompts of `inputs`: a text, the ids of one, or a list of both. prefix: goes before texts. Raises: BadRequest naming the place."""
    if isinstance(inputs, str):
        return [_prompt(inputs, "inputs", options, prefix)]
    if inputs and all(isinstance(item, int) for item in inputs):
        return [_prompt(inputs, "inputs", options, prefix)]
    check_batch(ctx, len(inputs), "inputs")
    for position, item in enumerate(inputs):
        if isinstance(item, int):
            raise BadRequest("A token id stands beside texts or lists; the ids of a text are a list.", param=f"inputs[{position}]")
    return [_prompt(item, f"inputs[{position}]", options, prefix) for position, item in enumerate(inputs)]


def _prompt(item: Any, param: str, options: dict[str, Any], prefix: str) -> Prompt:
    if not item:
        raise EmptyPrompt("`inputs` cannot be empty", param=param)
    if isinstance(item, str):
        return TextPrompt(text=item, prefix=prefix, param=param, **options)
    if prefix:
        raise BadRequest("The model's instruction can be put before a text and not before token ids; send text.", param=param)
    return TokensPrompt(token_ids=item, param=param, **options)


def num_characters(prompts: list[Prompt]) -> int:
    """Unicode characters of all texts; token ids count as one each, and both texts of each pair."""
    count = 0
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            count += len(prompt.text)
        elif isinstance(prompt, PairPrompt):
            count += len(prompt.text) + len(prompt.second)
        elif isinstance(prompt, TokensPrompt):
            count += len(prompt.token_ids)
    return count
