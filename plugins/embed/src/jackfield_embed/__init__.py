"""Embeddings for jackfield: OpenAI's `/v1/embeddings` and Cohere's `/v2/embed`."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_embed.endpoint import EmbedEndpoint

__all__ = ["EmbedEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(EmbedEndpoint())
