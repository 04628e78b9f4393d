"""The keys of [endpoints.chat]."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from jackfield import EndpointSettings

__all__ = ["ChatSettings"]


class ChatSettings(EndpointSettings, frozen=True, kw_only=True):
    """Those of every endpoint, and what depends on whom the server is for."""

    response_role: Annotated[str, Meta(description="The role of answers.")] = "assistant"
    trust_request_chat_template: Annotated[bool, Meta(description="Whether requests may bring a template.")] = False
    default_chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the model's template.")] = field(
        default_factory=dict
    )
    force_include_usage: Annotated[bool, Meta(description="Whether every stream ends with its usage.")] = False
