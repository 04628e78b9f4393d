"""The keys of [endpoints.decisions]."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from jackfield import EndpointSettings

__all__ = ["DecisionsSettings"]


class DecisionsSettings(EndpointSettings, frozen=True, kw_only=True):
    """Those of every endpoint, and how much one request may ask."""

    max_questions: Annotated[int, Meta(ge=1, description="Questions of a request, each of which is a prompt of its own.")] = 400
