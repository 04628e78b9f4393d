"""The keys of [endpoints.completions]."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from jackfield import EndpointSettings

__all__ = ["CompletionsSettings"]


class CompletionsSettings(EndpointSettings, frozen=True, kw_only=True):
    """Those of every endpoint, and one of its own."""

    force_include_usage: Annotated[bool, Meta(description="Whether every stream ends with its usage.")] = False
