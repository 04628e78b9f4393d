"""The request: OpenAI's, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jackfield import BadRequest, ChatMessage, SamplingRequest, check_generation, refuse_unserved

__all__ = ["ChatRequest", "FunctionSpec", "ToolChoice", "check", "message_text"]


class FunctionSpec(Struct, frozen=True, kw_only=True):
    """A function that a model may call."""

    name: Annotated[str, Meta(description="Letters, digits, `_`, `.` and `-`.")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema of its arguments, an object; left out, it has none.")] = (
        None
    )
    strict: Annotated[bool | None, Meta(description="Refuse a schema that cannot be kept to wholly; a forced call always does.")] = None


class ToolSpec(Struct, frozen=True, kw_only=True):
    """A tool."""

    type: Annotated[str, Meta(description="`function`; others are refused.")]
    function: FunctionSpec | None = None


class FunctionName(Struct, frozen=True, kw_only=True):
    """One of the functions."""

    name: str


class ToolName(Struct, frozen=True, kw_only=True):
    """One of the tools."""

    type: str
    function: FunctionName | None = None


class AllowedTools(Struct, frozen=True, kw_only=True):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[ToolName]


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The function to call, or those that may be called."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


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

    include_reasoning: Annotated[bool | None, Meta(description="Whether the answer has the model's reasoning; true by default.")] = None

    tools: Annotated[list[ToolSpec] | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        Meta(description="Whether it calls any: as it likes (`auto`, the default), never, at least one, or the one that is named."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Whether an answer may have several calls; true by default.")] = None
    functions: Annotated[list[dict[str, Any]] | None, Meta(description="Refused, unless it is empty: it is `tools` now.")] = None
    function_call: Annotated[Any, Meta(description="Refused but for `none` and `auto`: it is `tool_choice` now.")] = None
    modalities: Annotated[list[str] | None, Meta(description='Refused but for ["text"].')] = None
    audio: Annotated[Any, Meta(description="Refused.")] = None
    prediction: Annotated[Any, Meta(description="Refused.")] = None
    web_search_options: Annotated[Any, Meta(description="Refused.")] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Meta(description="Refused, unless it is empty.")] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, Meta(description="Refused, unless it is empty.")] = None


# As the core's table of the same kind: fields that are known and not served, with the values by which they ask for nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def message_text(message: ChatMessage) -> str:
    """What it says, parts joined by line ends."""
    if isinstance(message.content, list):
        return "\n".join(part.text or part.refusal or "" for part in message.content)
    return message.content or ""


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
