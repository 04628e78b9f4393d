"""The life of a request between the HTTP handler and the engine: one fixed order for every endpoint, every await of it here.

    admission -> preprocess -> tokenize -> parameters -> validate -> charge tokens -> engine -> build_response -> encode -> finished

What can be decided once is bound at start-up (`BoundRoute`); the request only runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, structs

from jackfield.admission import Admission, Ticket
from jackfield.checker import GrammarChecker
from jackfield.client import EngineClient, EngineRequest, ModelCard
from jackfield.context import Context, Model
from jackfield.encoding import BodyDecoder, check_finite, encode_response, num_numbers
from jackfield.endpoint import Endpoint, Route
from jackfield.errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    EmptyPrompt,
    EngineUnavailable,
    ModelNotFound,
    PromptTooLong,
    ServingError,
    TokenOutOfVocabulary,
    UnsupportedOperation,
)
from jackfield.generation import check_lengths, check_sampling, with_text
from jackfield.hookspecs import Stream, Submit
from jackfield.outputs import Choice, Delta, PoolingOutputs
from jackfield.params import PoolingParams, SamplingParams
from jackfield.schema import Request
from jackfield.settings import EndpointSettings
from jackfield.stages import NO_ERRORS, Stages
from jackfield.tokenization import ModelTokenizer, TokenizerPool, pack_ids
from jackfield.watchdog import Watchdog

__all__ = ["BoundModel", "BoundRoute", "Call", "Pipeline", "engine_stream", "engine_submit"]

log = logging.getLogger("jackfield.pipeline")

# An answer of so many numbers or more is encoded in a thread: 100,000 take 2 ms.
OFFLOAD_NUMBERS = 100_000
_ID_CHARS = re.compile(r"[^A-Za-z0-9._:\-]")
MAX_ID_CHARS = 128

_engine_ids = itertools.count(1)
T = TypeVar("T")


class BoundModel(Struct, frozen=True, kw_only=True):
    """A model with what serves it."""

    model: Model
    tokenizer: ModelTokenizer
    engine: EngineClient | None


class BoundRoute(Struct, frozen=True, kw_only=True):
    """A route with everything that a request of it needs, made at start-up.

    models: by id and alias, with the operation that the core chose for this route; the empty name is the default. others: models of this
    server that cannot do what the route needs, with what they can. Both are filled when the models' cards are known.
    """

    endpoint: Endpoint[Any, Any]
    route: Route
    settings: EndpointSettings
    decoder: BodyDecoder
    stages: Stages
    id_prefix: str
    models: dict[str, tuple[BoundModel, str | None]]
    others: dict[str, ModelCard]
    submit: Submit
    stream: Stream

    def model(self, name: str | None) -> tuple[BoundModel, str | None]:
        """The model that a request names. Raises: ModelNotFound, UnsupportedOperation."""
        found = self.models.get(name or "")
        if found is not None:
            return found
        if name in self.others:
            raise UnsupportedOperation(_cannot(name, self), param="model")
        raise ModelNotFound(model=name or "(default)", known=sorted({bound.model.id for bound, _ in self.models.values()}))


class Call(Struct, frozen=True, kw_only=True):
    """A request that is in: what `begin` gives and `run` or `stream` takes, exactly one of them, once."""

    bound: BoundRoute
    ctx: Context[Any]
    model: BoundModel
    ticket: Ticket


class Pipeline:
    """Runs requests. One a server.

    max_prompts: prompts a request may have. default_deadline_s: for requests that name none; 0 for none at all. clamp_max_tokens: cut a
    max_tokens that the context has no room for. tokenizers: set before the first request. watchdog: times the stages. blame: told each
    exception that is no answer to a client, gives the name of the plugin whose it is. not_ready: why no request can be served yet, or an
    empty text.
    """

    tokenizers: TokenizerPool

    def __init__(
        self,
        *,
        admission: Admission,
        max_prompts: int,
        watchdog: Watchdog,
        default_deadline_s: float = 0.0,
        clamp_max_tokens: bool = False,
        observe: Callable[[Context[Any], BaseException | None], None] | None = None,
        blame: Callable[[BaseException], str] | None = None,
    ) -> None:
        self.admission = admission
        self.watchdog = watchdog
        self.max_prompts = max_prompts
        self.default_deadline_s = default_deadline_s
        self.clamp_max_tokens = clamp_max_tokens
        self.not_ready = ""
        self.grammars = GrammarChecker()
        self._observe = observe
        self._blame = blame

    def admit(self, num_bytes: int) -> Ticket:
        """Let a request in, before its body is read. num_bytes: what it says of its body. The ticket goes to `begin`, or back to `leave`.

        Raises: EngineUnavailable while the models load, Overloaded.
        """
        if self.not_ready:
            raise EngineUnavailable(f"The server is not ready: {self.not_ready}.")
        return self.admission.enter(num_bytes)

    def leave(self, ticket: Ticket) -> None:
        """A request that was let in has ended before it began."""
        self.admission.release(ticket, served=False)

    def begin(
        self,
        bound: BoundRoute,
        ticket: Ticket,
        decode: Callable[[], Any],
        headers: Mapping[str, str],
        *,
        timeout_s: float | None,
        request_id: str,
    ) -> Call:
        """Decode a request and find its model. request_id: the server's own, for when the client gave none.

        Raises: InvalidBody, ModelNotFound, UnsupportedOperation.
        """
        request: Request = decode()
        model, operation = bound.model(request.model)
        timeout = timeout_s or self.default_deadline_s
        ctx: Context[Any] = Context(
            request=request,
            endpoint=bound.endpoint,
            route=bound.route,
            settings=bound.settings,
            id=f"{bound.id_prefix}-{_clean(headers.get('x-request-id')) or _clean(request.request_id) or request_id}",
            model=model.model,
            operation=operation,
            headers=headers,
            deadline=time.monotonic() + timeout if timeout else None,
        )
        return Call(bound=bound, ctx=ctx, model=model, ticket=ticket)

    async def run(self, call: Call) -> bytes:
        """The answer's body. Raises: ServingError, or whatever a plugin's stage raises."""
        ctx = call.ctx
        error: BaseException | None = None
        try:
            return await _within(ctx, self._answer(call))
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(call, error)

    async def _answer(self, call: Call) -> bytes:
        ctx = call.ctx
        work = await self._prepare(call)
        if work is not None:
            started = time.monotonic()
            if isinstance(work.params, SamplingParams):
                async with aclosing(self._deltas(call, work)) as deltas:
                    async for _ in deltas:
                        pass  # the context has put them together
            else:
                ctx.outputs = await _plugins_own(call.bound.submit(ctx, work))
            ctx.timings_s["engine"] = time.monotonic() - started
        return await self._finish(call)

    async def stream(self, call: Call) -> AsyncIterator[bytes]:
        """The bodies of a stream's events. What goes wrong before the first is raised before anything is sent."""
        error: BaseException | None = None
        try:
            work = await _within(call.ctx, self._prepare(call))
            if work is None:
                raise BadRequest("This route has no stream.", param="stream")
            async with aclosing(self._deltas(call, work)) as deltas:
                async for delta in deltas:
                    for chunk in await self._stage(call, "build_chunk", call.bound.stages.build_chunk, delta):
                        yield encode_response(chunk)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(call, error)

    async def _deltas(self, call: Call, work: EngineRequest) -> AsyncGenerator[Delta]:
        """What is generated, piece by piece; the context's choices grow with it."""
        ctx = call.ctx
        started = time.monotonic()
        async with aclosing(call.bound.stream(ctx, work)) as deltas:  # type: ignore[type-var]
            while (delta := await _within(ctx, _plugins_own(anext(deltas, None)))) is not None:
                ctx.timings_s.setdefault("first_token", time.monotonic() - started)
                ctx.choices[delta.index].add(delta)
                yield delta
        if not ctx.is_complete:
            raise RuntimeError(f"what wraps the stream of endpoint {ctx.endpoint.name!r} ended before every choice had ended")

    async def _prepare(self, call: Call) -> EngineRequest | None:
        """Stages, tokens, checks and the charge: all that comes before the engine, which an endpoint may not need."""
        ctx, stages = call.ctx, call.bound.stages
        started = time.monotonic()
        prompts = await self._stage(call, "preprocess", stages.preprocess)
        if len(prompts) > self.max_prompts:
            raise BadRequest(f"The request has {len(prompts)} prompts; this server takes {self.max_prompts} ([server] max_prompts).")
        prepared = time.monotonic()
        ctx.timings_s["preprocess"] = prepared - started
        if prompts:
            ctx.prompts = await self.tokenizers.tokenize(call.model.tokenizer, prompts)
            ctx.timings_s["tokenize"] = time.monotonic() - prepared
        if ctx.operation is None:
            return None
        params = await self._stage(call, stages.params_stage(ctx), stages.params)
        _check_prompts(ctx)
        params = self._complete(params, call)
        if isinstance(params, SamplingParams) and params.grammar is not None:
            params = structs.replace(params, grammar=await self.grammars.check(params.grammar))
        self.admission.charge(call.ticket, ctx.num_prompt_tokens)
        prefixes = [prompt.prefix_length for prompt in ctx.prompts]
        segments = [prompt.segment for prompt in ctx.prompts]
        return EngineRequest(
            id=next(_engine_ids),
            model=ctx.model.id,
            token_ids=[pack_ids(prompt.token_ids) for prompt in ctx.prompts],
            params=params,
            prefix_lengths=prefixes if any(prefixes) else None,
            segments=segments if any(segments) else None,
            priority=ctx.request.priority or 0,
            deadline=ctx.deadline,
            cache_salt=str(getattr(ctx.request, "cache_salt", None) or ""),
        )

    def _complete(self, params: PoolingParams | SamplingParams, call: Call) -> PoolingParams | SamplingParams:
        """Fill in what the core knows, and check what needs the model. Raises: BadRequest."""
        ctx = call.ctx
        if isinstance(params, PoolingParams):
            return _complete_pooling(params, ctx)
        params = check_sampling(params, ctx.model.card, call.model.tokenizer)
        asked = next((name for name in ("max_completion_tokens", "max_tokens") if getattr(ctx.request, name, None) is not None), None)
        # A maximum that the client did not name is one that the client cannot mend.
        check_lengths(params, ctx.model.card, ctx.prompts, clamp=self.clamp_max_tokens or asked is None, param=asked or "max_tokens")
        count = len(ctx.prompts) * params.n
        if count > self.max_prompts:
            raise BadRequest(
                f"{len(ctx.prompts)} prompts with n = {params.n} make {count} choices; this server takes {self.max_prompts} ([server] "
                "max_prompts).",
                param="n",
            )
        ctx.choices = [Choice(index) for index in range(count)]
        return params

    async def _finish(self, call: Call) -> bytes:
        ctx = call.ctx
        started = time.monotonic()
        if call.bound.settings.threaded or num_numbers(ctx.outputs.values) >= OFFLOAD_NUMBERS:
            body = await asyncio.to_thread(_build, call)
        else:
            body = self.watchdog.run(ctx.endpoint.name, "build_response", _build, call)
        ctx.timings_s["build_response"] = time.monotonic() - started
        return body

    async def _stage(self, call: Call, name: str, stage: Callable[..., Any], *more: Any) -> Any:
        if call.bound.settings.threaded:
            return await asyncio.to_thread(stage, call.ctx, *more)
        return self.watchdog.run(call.ctx.endpoint.name, name, stage, call.ctx, *more)

    def _end(self, call: Call, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            error = ClientGone()  # only a client that leaves, or the end of the server, cancels a request
        self.admission.release(call.ticket, served=error is None)
        self._find_culprit(call, error)
        for fault in self.watchdog.run(call.ctx.endpoint.name, "request_finished", call.bound.stages.request_finished, call.ctx, error):
            self._find_culprit(call, fault)
        if self._observe is not None:
            self._observe(call.ctx, error)

    def _find_culprit(self, call: Call, error: BaseException | None) -> None:
        """For the log, which shows an exception's notes, and the metrics."""
        if error is not None and not isinstance(error, ServingError) and self._blame is not None:
            error.add_note(f"jackfield: on a request to endpoint {call.ctx.endpoint.name!r}, in code of {self._blame(error)!r}")


def _cannot(name: str, bound: BoundRoute) -> str:
    """Why a route does not serve a model."""
    card, wanted = bound.others[name], bound.route.operations or bound.endpoint.operations
    can = ", ".join(card.operations) or "nothing that this server serves"
    text = f"Model `{name}` cannot {' or '.join(wanted)}, which {bound.route.paths[0]} needs; it can: {can}."
    if "score" in wanted and len(card.labels) > 1:
        text += f" It has {len(card.labels)} labels, and a score takes a model of one."
    return text


def _build(call: Call) -> bytes:
    # Here and not in the encoder alone: a stage may turn the numbers into integers or bits, which hide what they came from.
    for arrays in call.ctx.outputs.values.values():
        for array in arrays:
            check_finite(array)
    return encode_response(call.bound.stages.build_response(call.ctx))


def engine_submit(models: Mapping[str, BoundModel]) -> Submit:
    """The innermost `submit`: whatever engine serves the request's model."""

    async def submit(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
        engine = models[request.model].engine
        if engine is None:
            raise EngineUnavailable(f"No engine serves model `{request.model}`.")
        return await engine.submit(request)

    return submit


def engine_stream(models: Mapping[str, BoundModel]) -> Stream:
    """The innermost `stream`: the engine's deltas, with their texts."""

    async def stream(ctx: Context[Any], request: EngineRequest) -> AsyncIterator[Delta]:
        bound = models[request.model]
        engine, params = bound.engine, request.params
        if engine is None:
            raise EngineUnavailable(f"No engine serves model `{request.model}`.")
        assert isinstance(params, SamplingParams)
        deltas = with_text(engine.stream(request), bound.tokenizer, ctx.prompts, params, partial(engine.end_choice, request.id))
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    return stream


async def _plugins_own(work: Awaitable[T]) -> T:
    """Await what plugins may have wrapped: an end that nobody asked this request for is an error of theirs."""
    try:
        return await work
    except NO_ERRORS as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the client left, the deadline passed, or the server ends
        raise RuntimeError(f"a wrapper of the engine call raised {type(error).__name__}") from error


async def _within(ctx: Context[Any], work: Awaitable[T]) -> T:
    """Wait until the request's deadline at most; the engine drops what waits by itself, this ends what runs."""
    if ctx.deadline is None:
        return await work
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(loop.time() + ctx.deadline - time.monotonic()) as timer:
            return await work
    except TimeoutError:
        if timer.expired():
            raise DeadlineExceeded from None
        raise  # a plugin's own


def _clean(given: str | None) -> str:
    """The client's own id without what could harm an answer or a log, cut."""
    return _ID_CHARS.sub("", given[: 4 * MAX_ID_CHARS])[:MAX_ID_CHARS] if given else ""


def _check_prompts(ctx: Context[Any]) -> None:
    """Lengths and ids against the model, before anything is queued. Raises: EmptyPrompt, PromptTooLong, TokenOutOfVocabulary."""
    if not ctx.prompts:
        raise EmptyPrompt("The request has no prompt; at least one is needed.")
    card = ctx.model.card
    for prompt in ctx.prompts:
        count = len(prompt.token_ids)
        if count == 0:
            raise EmptyPrompt("A prompt has no token at all.", param=prompt.param)
        if count > card.max_length:
            fields = getattr(ctx.route.request, "__struct_fields__", ())
            cut_by = next((name for name in ("truncate_prompt_tokens", "truncate") if name in fields), None)
            raise PromptTooLong(limit=card.max_length, got=count, cut_by=cut_by, param=prompt.param)
        if max(prompt.token_ids) >= card.vocab_size:
            raise TokenOutOfVocabulary(token_id=max(prompt.token_ids), vocab_size=card.vocab_size, param=prompt.param)


def _complete_pooling(params: PoolingParams, ctx: Context[Any]) -> PoolingParams:
    outputs = params.outputs or (ctx.operation or "",)
    lacking = [name for name in outputs if name not in ctx.model.card.operations]
    if lacking:
        can = ", ".join(ctx.model.card.operations)
        raise UnsupportedOperation(f"Model `{ctx.model.id}` cannot {lacking[0]}; it can: {can}.", param="model")
    if params.dimensions is not None:
        ctx.model.check_dimensions(params.dimensions)
    if "logits" in outputs:
        size = ctx.model.card.vocab_size
        wrong = next((token_id for token_id in params.logit_ids if not 0 <= token_id < size), None)
        if wrong is not None:
            raise TokenOutOfVocabulary(token_id=wrong, vocab_size=size)
        if not params.logit_ids:
            raise BadRequest("No token is named whose logits are wanted.")
    return structs.replace(params, outputs=tuple(outputs))
