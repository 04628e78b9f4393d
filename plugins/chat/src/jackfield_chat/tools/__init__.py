"""How families of models write calls of tools."""

from jackfield import ToolParserRegistry
from jackfield_chat.tools import hermes, llama, mistral, response_template

__all__ = ["add_families"]


def add_families(registry: ToolParserRegistry) -> None:
    """Add them, first what a model's own files say of it."""
    registry.add("response_template", response_template.TemplateTools, fits=response_template.fits)
    registry.add("hermes", hermes.HermesTools, fits=hermes.fits)
    registry.add("llama3_json", llama.LlamaTools, fits=llama.fits)
    registry.add("mistral", mistral.MistralTools, fits=mistral.fits)
