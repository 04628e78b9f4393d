"""Completions for jackfield: `/v1/completions`."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_completions.endpoint import CompletionsEndpoint

__all__ = ["CompletionsEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(CompletionsEndpoint())
