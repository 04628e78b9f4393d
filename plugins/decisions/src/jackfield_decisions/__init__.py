"""Typed questions about a text for jackfield, answered with probabilities: `/v1/systemone` and `/v1/decisions`, two shapes of one thing."""

from __future__ import annotations

from typing import Any

from jackfield import Endpoint, EndpointRegistry, Submit, hookimpl
from jackfield_decisions.endpoint import DecisionsEndpoint, with_labels

__all__ = ["DecisionsEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(DecisionsEndpoint())


@hookimpl
def jackfield_wrap_submit(endpoint: Endpoint[Any, Any], submit: Submit) -> Submit | None:
    """Between tokenizer and engine: the endpoint's labels become the ids whose logits are wanted."""
    return with_labels(submit) if isinstance(endpoint, DecisionsEndpoint) else None
