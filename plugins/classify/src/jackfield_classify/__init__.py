"""Classification for jackfield: `/classify` of texts, and `/token_classify` of their tokens. Two endpoints, an entry point each."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_classify.endpoint import ClassifyEndpoint

__all__ = ["ClassifyEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(ClassifyEndpoint())
