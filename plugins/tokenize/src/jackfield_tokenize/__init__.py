"""Tokenization for jackfield: `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from jackfield import EndpointRegistry, hookimpl
from jackfield_tokenize.endpoint import TokenizeEndpoint

__all__ = ["TokenizeEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(TokenizeEndpoint())
