"""The API of text-embeddings-inference for jackfield."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_tei.endpoint import TeiEndpoint

__all__ = ["TeiEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(TeiEndpoint())
