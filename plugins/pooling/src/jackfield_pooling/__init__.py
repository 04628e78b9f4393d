"""What a model computes, as it is, for jackfield: `/pooling`."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_pooling.endpoint import PoolingEndpoint

__all__ = ["PoolingEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(PoolingEndpoint())
