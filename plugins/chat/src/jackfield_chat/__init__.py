"""Chat for jackfield: `/v1/chat/completions`."""

from jackfield import EndpointRegistry, ReasoningParserRegistry, ToolParserRegistry, hookimpl
from jackfield_chat import reasoning
from jackfield_chat.endpoint import ChatEndpoint
from jackfield_chat.tools import add_families

__all__ = ["ChatEndpoint"]

PLUGIN_API = 1


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    """Add the endpoint."""
    registry.add(ChatEndpoint())


@hookimpl
def jackfield_tool_parsers(registry: ToolParserRegistry) -> None:
    """Add the families of calls."""
    add_families(registry)


@hookimpl
def jackfield_reasoning_parsers(registry: ReasoningParserRegistry) -> None:
    """Add the families of reasoning."""
    registry.add("think", reasoning.think, fits=reasoning.fits_think)
    registry.add("mistral", reasoning.mistral, fits=reasoning.fits_mistral)
