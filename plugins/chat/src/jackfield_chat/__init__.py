"""Chat for jackfield: `/v1/chat/completions`."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_chat.endpoint import ChatEndpoint

__all__ = ["ChatEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(ChatEndpoint())
