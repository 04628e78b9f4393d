"""The request: OpenAI's, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from jackfield import BadRequest, ChatMessage, SamplingRequest, check_generation, refuse_unserved

__all__ = ["ChatRequest", "check"]


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation, and how to go on with it."""

    messages: Annotated[list[ChatMessage], Meta(description="The conversation, rendered by the model's chat template.")]
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Meta(description="Tokens that each choice may have; wins over `max_tokens`. What is left of the context by default."),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Tell the log-probability of each token.")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, Meta(description="So many of the likeliest tokens at each place; needs `logprobs`.")
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Whether the template begins a new message; true by default.")] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Go on with the last message; needs `add_generation_prompt` false.")
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Documents for the model's template.")] = None
    chat_template: Annotated[
        str | None, Meta(description="In the place of the model's template, where the operator allows it; else refused.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables for the model's template.")] = None
    reasoning_effort: Annotated[str | None, Meta(description="A variable for the model's template.")] = None

    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Refused, unless it is empty.")] = None
    tool_choice: Annotated[Any, Meta(description="Refused but for `none` and `auto`.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Accepted: without tools it means nothing.")] = None
    functions: Annotated[list[dict[str, Any]] | None, Meta(description="Refused, unless it is empty.")] = None
    function_call: Annotated[Any, Meta(description="Refused but for `none` and `auto`.")] = None
    modalities: Annotated[list[str] | None, Meta(description='Refused but for ["text"].')] = None
    audio: Annotated[Any, Meta(description="Refused.")] = None
    prediction: Annotated[Any, Meta(description="Refused.")] = None
    web_search_options: Annotated[Any, Meta(description="Refused.")] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Meta(description="Refused, unless it is empty.")] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, Meta(description="Refused, unless it is empty.")] = None


# As the core's table of the same kind: fields that are known and not served, with the values by which they ask for nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def check(request: ChatRequest, *, trust_template: bool) -> None:
    """What the fields' own bounds do not say. trust_template: the request may bring one. Raises: BadRequest naming the field."""
    check_generation(request)
    refuse_unserved(request, UNSERVED)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest(f"top_logprobs is {request.top_logprobs}, and logprobs is not true, which it needs.", param="top_logprobs")
    if request.logprob_token_ids and not request.logprobs:
        raise BadRequest("logprob_token_ids needs logprobs to be true.", param="logprob_token_ids")
    if request.continue_final_message and request.add_generation_prompt is not False:
        raise BadRequest(
            "continue_final_message goes on with the last message, and add_generation_prompt, true by default, begins a new one; send "
            "add_generation_prompt = false with it.",
            param="add_generation_prompt" if request.add_generation_prompt else "continue_final_message",
        )
    if request.chat_template is not None and not trust_template:
        raise BadRequest(
            "A chat template of a request is refused: it is a program. The operator may allow it (trust_request_chat_template).",
            param="chat_template",
        )
