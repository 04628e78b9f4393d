"""The endpoint: texts in, what comes after them out, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct

from jackfield import (
    FINGERPRINT,
    Choice,
    Context,
    Delta,
    Endpoint,
    Prompt,
    Route,
    SamplingParams,
    TokenLogprob,
    make_sampling_params,
    prompt_limit,
    prompt_logprobs,
    token_name,
)
from jackfield_completions.answer import ChunkChoice, CompletionChoice, CompletionChunk, CompletionLogprobs, CompletionResponse
from jackfield_completions.echo import Places, echoed_text, prompt_entries, token_logprobs
from jackfield_completions.request import DEFAULT_MAX_TOKENS, CompletionRequest, check, given_prompts, make_prompts
from jackfield_completions.settings import CompletionsSettings

__all__ = ["CompletionsEndpoint"]

CompletionContext = Context[CompletionRequest]


class CompletionsEndpoint(Endpoint[CompletionRequest, CompletionResponse]):
    """Text completions."""

    name = "completions"
    id_prefix = "cmpl"
    operations = ("generate",)
    settings = CompletionsSettings
    routes = (
        Route(
            method="POST",
            paths=("/v1/completions",),
            request=CompletionRequest,
            response=CompletionResponse,
            chunk=CompletionChunk,
            streams=True,
            summary="What comes after a text.",
            example={"prompt": "Once upon a time", "max_tokens": 16},
        ),
    )

    def preprocess(self, ctx: CompletionContext) -> list[Prompt]:
        check(ctx.request)
        return make_prompts(ctx.request, truncate=prompt_limit(ctx.request, ctx.model, max_tokens=DEFAULT_MAX_TOKENS))

    def sampling_params(self, ctx: CompletionContext) -> SamplingParams:
        request = ctx.request
        told = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            told = max(told or 0, request.logprobs)
        return make_sampling_params(request, ctx.model, max_tokens=DEFAULT_MAX_TOKENS, logprobs=request.logprobs, prompt_logprobs=told)

    def build_response(self, ctx: CompletionContext) -> CompletionResponse:
        return CompletionResponse(
            id=ctx.id, created=ctx.created, model=ctx.model.id, choices=[_choice(ctx, choice) for choice in ctx.choices], usage=ctx.usage()
        )

    def build_chunk(self, ctx: CompletionContext, delta: Delta) -> list[CompletionChunk]:
        request, options = ctx.request, ctx.request.stream_options
        begun: dict[int, Places] = ctx.state.setdefault(self.name, {})
        head = None
        if delta.index not in begun:
            head = _head(ctx, delta.index)
            begun[delta.index] = head.places
        text = delta.text if head is None else head.text + delta.text
        logprobs = _logprobs(ctx, head, begun[delta.index], delta.logprobs)
        ids = list(delta.token_ids) if request.return_token_ids else None
        chunks: list[CompletionChunk] = []
        if delta.finish_reason is not None or text or logprobs is not None or ids or (head is not None and ids is not None):
            choice = ChunkChoice(
                index=delta.index,
                text=text,
                logprobs=logprobs,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                prompt_token_ids=ctx.prompts[_prompt_of(ctx, delta.index)].token_ids if head is not None and ids is not None else None,
                token_ids=ids,
            )
            continuous = options is not None and bool(options.continuous_usage_stats)
            chunks.append(_chunk(ctx, [choice], with_usage=continuous, ends=delta.finish_reason is not None))
        if ctx.is_complete and ((options is not None and options.include_usage) or ctx.settings.force_include_usage):
            chunks.append(_chunk(ctx, [], with_usage=True))
        return chunks


class _Head(Struct, frozen=True, kw_only=True):
    """What comes before the generated text: nothing, or the echoed prompt. places: of what follows."""

    text: str
    places: Places
    tokens: list[tuple[int, str, TokenLogprob | None]]


def _prompt_of(ctx: CompletionContext, index: int) -> int:
    return index // (len(ctx.choices) // len(ctx.prompts))


def _head(ctx: CompletionContext, index: int) -> _Head:
    request = ctx.request
    if not request.echo:
        return _Head(text="", places=Places(0), tokens=[])
    number = _prompt_of(ctx, index)
    prompt, given = ctx.prompts[number], given_prompts(request)[number]
    text = echoed_text(given, prompt)
    tokens = []
    if request.logprobs is not None:
        first = ctx.choices[number * (len(ctx.choices) // len(ctx.prompts))]
        tokens = list(prompt_entries(given, prompt, first, as_ids=bool(request.return_tokens_as_token_ids)))
    return _Head(text=text, places=Places(len(text)), tokens=tokens)


def _logprobs(ctx: CompletionContext, head: _Head | None, places: Places, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
    """Of the echoed prompt, if this is a choice's beginning, and of generated tokens."""
    if ctx.request.logprobs is None:
        return None
    as_ids = bool(ctx.request.return_tokens_as_token_ids)
    tokens = [] if head is None else list(head.tokens)
    tokens += [(places(entry.data), token_name(entry, as_id=as_ids), entry) for entry in entries]
    return token_logprobs(tokens, as_ids=as_ids) if tokens else None


def _choice(ctx: CompletionContext, choice: Choice) -> CompletionChoice:
    request = ctx.request
    head = _head(ctx, choice.index)
    as_ids = bool(request.return_tokens_as_token_ids)
    return CompletionChoice(
        index=choice.index,
        text=head.text + choice.text,
        logprobs=_logprobs(ctx, head, head.places, choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if request.return_token_ids else None,
        prompt_logprobs=prompt_logprobs(choice.prompt_logprobs, as_ids=as_ids),
        prompt_token_ids=ctx.prompts[_prompt_of(ctx, choice.index)].token_ids if request.return_token_ids else None,
    )


def _chunk(ctx: CompletionContext, choices: list[ChunkChoice], *, with_usage: bool, ends: bool = False) -> CompletionChunk:
    return CompletionChunk(
        id=ctx.id,
        created=ctx.created,
        model=ctx.model.id,
        choices=choices,
        system_fingerprint=FINGERPRINT if ends else UNSET,
        usage=ctx.usage() if with_usage else UNSET,
    )
