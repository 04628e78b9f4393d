"""The endpoint: a conversation in, the next message out, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, structs

from jackfield import (
    FINGERPRINT,
    MIN_LOGPROB,
    ChatPrompt,
    Choice,
    Context,
    Delta,
    Endpoint,
    Prompt,
    Route,
    SamplingParams,
    TokenLogprob,
    Usage,
    make_sampling_params,
    prompt_limit,
    prompt_logprobs,
    template_messages,
    token_name,
)
from jackfield_chat.answer import (
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatResponse,
    ChunkChoice,
    ChunkDelta,
    FunctionCall,
    Message,
    TokenEntry,
    ToolCall,
    TopToken,
)
from jackfield_chat.answering import AnswerReader, Plan, Said, plan_answer
from jackfield_chat.calling import Calling, plan_calls
from jackfield_chat.history import prepare_messages
from jackfield_chat.request import ChatRequest, check, message_text
from jackfield_chat.settings import ChatSettings

__all__ = ["ChatEndpoint"]

ChatContext = Context[ChatRequest]


class ChatEndpoint(Endpoint[ChatRequest, ChatResponse]):
    """Chat completions."""

    name = "chat"
    id_prefix = "chatcmpl"
    operations = ("generate",)
    settings = ChatSettings
    routes = (
        Route(
            method="POST",
            paths=("/v1/chat/completions",),
            request=ChatRequest,
            response=ChatResponse,
            chunk=ChatChunk,
            streams=True,
            summary="The next message of a conversation.",
            example={"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16},
        ),
    )

    def preprocess(self, ctx: ChatContext) -> list[Prompt]:
        request, settings = ctx.request, ctx.settings
        check(request, trust_template=settings.trust_request_chat_template)
        calling = plan_calls(request, ctx.model)
        ctx.state[self.name] = _State(calling)
        effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        prompt = ChatPrompt(
            messages=prepare_messages(template_messages(request.messages), calling),
            tools=[offer.shown for offer in calling.offers] if calling.native and calling.offers else None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
            documents=request.documents,
            chat_template=request.chat_template,
            template_kwargs={**settings.default_chat_template_kwargs, **(request.chat_template_kwargs or {}), **effort},
            truncate=prompt_limit(request, ctx.model),
            truncation_side=request.truncation_side or "left",
            param="messages",
        )
        return [prompt]

    def sampling_params(self, ctx: ChatContext) -> SamplingParams:
        request = ctx.request
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        told = request.prompt_logprobs
        if told is None and request.echo and not request.stream:
            told = logprobs
        params = make_sampling_params(request, ctx.model, logprobs=logprobs, prompt_logprobs=told)
        state = _state(ctx)
        state.plan = plan = plan_answer(state.calling, ctx.model, params.grammar, _tail(ctx))
        return structs.replace(params, grammar=plan.grammar, visible_tokens=plan.visible)

    def build_response(self, ctx: ChatContext) -> ChatResponse:
        request = ctx.request
        as_ids = bool(request.return_tokens_as_token_ids)
        return ChatResponse(
            id=ctx.id,
            created=ctx.created,
            model=ctx.model.id,
            choices=[_choice(ctx, choice) for choice in ctx.choices],
            usage=ctx.usage(),
            prompt_logprobs=prompt_logprobs(ctx.choices[0].prompt_logprobs, as_ids=as_ids),
            prompt_token_ids=ctx.prompts[0].token_ids if request.return_token_ids else None,
        )

    def build_chunk(self, ctx: ChatContext, delta: Delta) -> list[ChatChunk]:
        request, options, state = ctx.request, ctx.request.stream_options, _state(ctx)
        chunks: list[ChatChunk] = []
        continuous = options is not None and bool(options.continuous_usage_stats)
        if not state.is_opened:
            state.is_opened = True
            chunks += _opening(ctx, continuous=continuous)
        logprobs = _logprobs(request, delta.logprobs)
        ends = delta.finish_reason is not None
        new = _new(ctx, state.reader(delta.index).read(delta.text, ends=ends))
        if ends or new is not None or logprobs or (delta.token_ids and request.return_token_ids):
            choice = ChunkChoice(
                index=delta.index,
                delta=new or ChunkDelta(content=""),
                logprobs=logprobs,
                finish_reason=_finish_reason(ctx, delta.index, delta.finish_reason),
                stop_reason=delta.stop_reason if ends else UNSET,
                token_ids=list(delta.token_ids) if request.return_token_ids else None,
            )
            chunks.append(_chunk(ctx, choice, ctx.usage() if continuous else None, ends=ends))
        if ctx.is_complete and ((options is not None and options.include_usage) or ctx.settings.force_include_usage):
            chunks.append(ChatChunk(id=ctx.id, created=ctx.created, model=ctx.model.id, choices=[], usage=ctx.usage()))
        return chunks


class _State:
    """What is kept of a request from stage to stage."""

    plan: Plan

    def __init__(self, calling: Calling) -> None:
        self.calling = calling
        self.is_opened = False
        self._readers: dict[int, AnswerReader] = {}

    def reader(self, index: int) -> AnswerReader:
        """Of the choice."""
        if index not in self._readers:
            self._readers[index] = self.plan.reader()
        return self._readers[index]


def _state(ctx: ChatContext) -> _State:
    state: _State = ctx.state[ChatEndpoint.name]
    return state


def _new(ctx: ChatContext, said: Said) -> ChunkDelta | None:
    """What a chunk tells of it, if there is anything."""
    reasoning = said.reasoning if ctx.request.include_reasoning is not False and said.reasoning else UNSET
    if reasoning is UNSET and not said.content and not said.calls:
        return None
    return ChunkDelta(content=said.content or UNSET, reasoning=reasoning, reasoning_content=reasoning, tool_calls=said.calls or UNSET)


def _finish_reason(ctx: ChatContext, index: int, reason: str | None) -> str | None:
    """As in OpenAI's interface a call that the request has named is no reason: the client knows of it."""
    state = _state(ctx)
    return "tool_calls" if reason == "stop" and not state.calling.named and state.reader(index).has_called else reason


def _tail(ctx: ChatContext) -> str:
    """The end of the prompt, by which its reasoning is known to have begun or ended: of a message that is gone on with its last mark."""
    tail, parser = ctx.prompts[0].tail, ctx.model.reasoning_parser
    if parser is None or not ctx.request.continue_final_message:
        return tail
    content = message_text(ctx.request.messages[-1])
    begun, ended = content.rfind(parser.start), content.rfind(parser.end)
    return tail if max(begun, ended) < 0 else parser.start if begun > ended else parser.end


def _role(ctx: ChatContext) -> str:
    """Of the answer: a message that is gone on with keeps its own."""
    if ctx.request.add_generation_prompt is False:
        return ctx.request.messages[-1].role
    role: str = ctx.settings.response_role
    return role


def _echoed(ctx: ChatContext) -> str:
    """What comes before the generated text: the last message, if it is asked for and of the answer's role."""
    last = ctx.request.messages[-1]
    return message_text(last) if ctx.request.echo and last.role == _role(ctx) else ""


def _choice(ctx: ChatContext, choice: Choice) -> ChatChoice:
    said = _state(ctx).reader(choice.index).read(choice.text, ends=True)
    content = _echoed(ctx) + said.content
    reasoning = said.reasoning if ctx.request.include_reasoning is not False and said.reasoning else None
    return ChatChoice(
        index=choice.index,
        message=Message(
            role=_role(ctx),
            content=content or (None if said.calls or said.reasoning else ""),
            tool_calls=[_call(call) for call in said.calls] or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning or UNSET,
        ),
        logprobs=_logprobs(ctx.request, choice.logprobs),
        finish_reason=_finish_reason(ctx, choice.index, choice.finish_reason),
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if ctx.request.return_token_ids else None,
    )


def _call(call: CallDelta) -> ToolCall:
    name = call.function.name
    assert isinstance(call.id, str)  # of a whole answer every call is whole
    assert isinstance(name, str)
    return ToolCall(id=call.id, function=FunctionCall(name=name, arguments=call.function.arguments))


def _opening(ctx: ChatContext, *, continuous: bool) -> list[ChatChunk]:
    """The first chunk of each choice, which tells its role, and what is echoed."""
    prompt = ctx.num_prompt_tokens
    usage = Usage(prompt_tokens=prompt, total_tokens=prompt) if continuous else None
    deltas = [ChunkDelta(role=_role(ctx), content="")]
    echoed = _echoed(ctx)
    if echoed:
        deltas.append(ChunkDelta(content=echoed))
    chunks = [_chunk(ctx, ChunkChoice(index=choice.index, delta=delta), usage) for delta in deltas for choice in ctx.choices]
    if ctx.request.return_token_ids:
        chunks[0] = _chunk(ctx, chunks[0].choices[0], usage, prompt_token_ids=ctx.prompts[0].token_ids)
    return chunks


def _chunk(
    ctx: ChatContext, choice: ChunkChoice, usage: Usage | None, *, ends: bool = False, prompt_token_ids: list[int] | None = None
) -> ChatChunk:
    return ChatChunk(
        id=ctx.id,
        created=ctx.created,
        model=ctx.model.id,
        choices=[choice],
        system_fingerprint=FINGERPRINT if ends else UNSET,
        usage=UNSET if usage is None else usage,
        prompt_token_ids=UNSET if prompt_token_ids is None else prompt_token_ids,
    )


def _logprobs(request: ChatRequest, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
    if not request.logprobs or not entries:
        return None
    as_id = bool(request.return_tokens_as_token_ids)
    return ChatLogprobs(
        content=[
            TokenEntry(
                token=token_name(entry, as_id=as_id),
                logprob=max(entry.logprob, MIN_LOGPROB),
                bytes=list(entry.data),
                top_logprobs=[
                    TopToken(token=token_name(top, as_id=as_id), logprob=max(top.logprob, MIN_LOGPROB), bytes=list(top.data))
                    for top in entry.top
                ],
            )
            for entry in entries
        ]
    )
