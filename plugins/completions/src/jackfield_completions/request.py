"""The request: OpenAI's, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from jackfield import BadRequest, EmptyPrompt, Prompt, SamplingRequest, TextPrompt, TokensPrompt, check_generation, refuse_unserved

__all__ = ["DEFAULT_MAX_TOKENS", "CompletionRequest", "check", "given_prompts", "make_prompts"]

# OpenAI's own.
DEFAULT_MAX_TOKENS = 16

Given = Annotated[
    str | list[str | int | list[int]],
    Meta(
        description="A text, a list of texts, the token ids of one prompt, or a list of such lists. None may be empty.",
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
            ]
        },
    ),
]
_NAMES: dict[type, str] = {str: "a text", int: "a token id", list: "a list of token ids"}


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """Texts that are to be gone on with."""

    prompt: Given | None = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        Meta(description="Tokens that each choice may have; 16 by default. 0 with `echo` alone, for the prompt itself."),
    ] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        Meta(description="Tell the log-probability of each token, and of so many of the likeliest in its place."),
    ] = None
    suffix: Annotated[str | None, Meta(description="Refused, unless it is empty.")] = None


# As the core's table of the same kind: fields that are known and not served, with the values by which they ask for nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


def check(request: CompletionRequest) -> None:
    """What the fields' own bounds do not say. Raises: BadRequest naming the field."""
    check_generation(request)
    refuse_unserved(request, UNSERVED)
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest("max_tokens is 0, and without echo there would be nothing to answer; it must be at least 1.", param="max_tokens")
    if request.logprob_token_ids and request.logprobs is None:
        raise BadRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")


def given_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, each a text or token ids. Raises: BadRequest, EmptyPrompt, naming the field."""
    given = request.prompt
    if not given:
        raise EmptyPrompt("prompt is missing or empty; at least one prompt of at least one token is needed.", param="prompt")
    if isinstance(given, str):
        return [given]
    for position, item in enumerate(given):
        if type(item) is not type(given[0]):
            raise BadRequest(
                f"prompt mixes kinds: prompt[{position}] is {_NAMES[type(item)]}, and prompt[0] is {_NAMES[type(given[0])]}.",
                param=f"prompt[{position}]",
            )
        if item in ("", []):
            raise EmptyPrompt(f"prompt[{position}] is empty.", param=f"prompt[{position}]")
    items: list[Any] = given  # of one kind
    return [items] if isinstance(items[0], int) else items


def make_prompts(request: CompletionRequest, *, truncate: int | None) -> list[Prompt]:
    """What is to be tokenized. truncate: tokens that are left of each, or None. Raises: BadRequest, EmptyPrompt, naming the field."""
    given = given_prompts(request)
    if isinstance(given[0], list) and request.add_special_tokens:
        raise BadRequest("add_special_tokens has no meaning for token ids; leave it out.", param="add_special_tokens")
    is_list = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
    return [_prompt(request, item, f"prompt[{place}]" if is_list else "prompt", truncate) for place, item in enumerate(given)]


def _prompt(request: CompletionRequest, given: str | list[int], param: str, truncate: int | None) -> Prompt:
    side, echo = request.truncation_side or "left", bool(request.echo)
    # Names of the prompt's tokens are for its log-probabilities.
    named = echo and request.logprobs is not None
    if isinstance(given, list):
        return TokensPrompt(token_ids=given, truncate=truncate, truncation_side=side, param=param, with_text=echo, with_token_texts=named)
    return TextPrompt(
        text=given,
        add_special_tokens=request.add_special_tokens is not False,
        truncate=truncate,
        truncation_side=side,
        param=param,
        with_offsets=echo,
        with_token_texts=named,
    )
