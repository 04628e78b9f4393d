"""The keys of [endpoints.tei]."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from jackfield import EndpointSettings

__all__ = ["TeiSettings"]


class TeiSettings(EndpointSettings, frozen=True, kw_only=True):
    """As the flags of text-embeddings-inference are called."""

    auto_truncate: Annotated[bool, Meta(description="Whether a text that is too long is cut where the request does not say.")] = False
    max_client_batch_size: Annotated[int, Meta(ge=1, description="Texts that a request may have.")] = 32
