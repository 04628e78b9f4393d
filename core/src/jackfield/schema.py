"""Wire types that every endpoint shares: the base of request bodies, usage, the error body.

A request type is a frozen, keyword-only struct whose fields carry their meaning and bounds in `Meta`; the OpenAPI page is made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, to_builtins

from jackfield.errors import BadRequest

__all__ = [
    "ChatMessage",
    "ContentPart",
    "ErrorBody",
    "ErrorDetail",
    "PastCall",
    "PastFunction",
    "Request",
    "TokenId",
    "Usage",
    "template_messages",
]

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(description="A token id of the model's vocabulary.")]


class Request(Struct, frozen=True, kw_only=True):
    """The fields that the core itself reads from a request; request types inherit them.

    Unknown fields are accepted and ignored, as the clients of such servers expect; explicit nulls stand for the default.
    """

    model: Annotated[str | None, Meta(description="Id or alias of a model of this endpoint; null selects its first model.")] = None
    user: Annotated[str | None, Meta(description="Accepted for OpenAI's clients; not used.")] = None
    request_id: Annotated[str | None, Meta(description="Becomes part of the answer's id, unless an X-Request-Id header is sent.")] = None
    priority: Annotated[Int32 | None, Meta(description="Smaller runs sooner; 0 when left out.")] = None


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of an answer, after truncation, special tokens included."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What went wrong: `code` is the HTTP status, `param` the field at fault as a path (`input[3]`) or null."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The one shape of an error, on every route and for every status."""

    error: ErrorDetail


class ContentPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a message; text is the one kind that is served."""

    type: Annotated[str, Meta(description="`text`; images, audio and video are refused.")]
    text: str | None = None
    refusal: str | None = None


class PastFunction(Struct, frozen=True, kw_only=True):
    """What was called."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: Annotated[str | dict[str, Any] | None, Meta(description="The text of an object, or the object; null is an empty one.")] = (
        None
    )


class PastCall(Struct, frozen=True, kw_only=True):
    """A call that an assistant has made. Templates see these fields and no others."""

    function: PastFunction
    id: Annotated[str | UnsetType, Meta(description="By which a tool's message answers it.")] = UNSET
    type: Annotated[Literal["function"] | None, Meta(description="Null is `function`.")] = None


class ChatMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation, as chat templates take it."""

    role: Annotated[str, Meta(description="system, developer, user, assistant or tool, as the model's template knows them.")]
    content: Annotated[str | list[ContentPart] | None, Meta(description="A text, or parts of text; null is no text.")] = None
    name: Annotated[str | None, Meta(description="Of who speaks, for templates that write it.")] = None
    tool_calls: Annotated[list[PastCall] | None, Meta(description="Calls that an assistant has made.")] = None
    tool_call_id: Annotated[str | None, Meta(description="Of a tool's message: the call that it answers.")] = None
    reasoning: Annotated[str | None, Meta(description="What an assistant has thought, for templates that write it.")] = None
    reasoning_content: Annotated[str | None, Meta(description="The same as `reasoning`, by its older name.")] = None


# Kinds of parts that are text, and the field that has it.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: list[ChatMessage], *, param: str = "messages") -> list[dict[str, Any]]:
    """Messages for a ChatPrompt; parts of text stay parts.

    Raises: BadRequest for a part that is no text, or no message at all.
    """
    if not messages:
        raise BadRequest(f"{param} is empty; at least one message is needed.", param=param)
    converted: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        fields: dict[str, Any] = to_builtins(message)
        if isinstance(message.content, list):
            texts = [_text(part, f"{param}[{position}].content[{i}]") for i, part in enumerate(message.content)]
            fields["content"] = [{"type": "text", "text": text} for text in texts]
        for call in fields.get("tool_calls") or ():
            call["type"] = "function"
        converted.append(fields)
    return converted


def _text(part: ContentPart, param: str) -> str:
    text = getattr(part, _TEXTS.get(part.type, ""), None)
    if not isinstance(text, str):
        lacking = f" without its {_TEXTS[part.type]}" if part.type in _TEXTS else ""
        raise BadRequest(f"A content part of type {part.type[:50]!r}{lacking} is not served; only text is.", param=param)
    return text
