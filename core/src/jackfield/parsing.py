"""Which parsers a model's answers are read by: collected from plugins, chosen by the configuration or by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from jackfield.errors import ConfigError, PluginError
from jackfield.parsers import Dialect, ParserEntry, ReasoningParser, ReasoningParserRegistry, ToolParser, ToolParserRegistry
from jackfield.plugins import Plugins, call_hook
from jackfield.settings import ModelSettings

__all__ = ["Parsers", "check_parsers", "choose_reasoning_parser", "choose_tool_parser", "collect_parsers"]

AUTO, NONE = "auto", "none"
# By name: the plugin that adds it, and the parser.
Entries = Mapping[str, tuple[str, ParserEntry]]


class Parsers(Struct, frozen=True, kw_only=True):
    """What plugins offer, in the order in which models are tried."""

    tools: Entries
    reasoning: Entries


def collect_parsers(plugins: Plugins) -> Parsers:
    """The parsers that plugins add. Raises: PluginError."""
    return Parsers(
        tools=_collect(plugins, "jackfield_tool_parsers", ToolParserRegistry),
        reasoning=_collect(plugins, "jackfield_reasoning_parsers", ReasoningParserRegistry),
    )


def check_parsers(models: Mapping[str, ModelSettings], parsers: Parsers) -> None:
    """Whether every parser that a model's table names is there. Raises: ConfigError."""
    for model, settings in models.items():
        for key, name, entries in (
            ("tool_parser", settings.tool_parser, parsers.tools),
            ("reasoning_parser", settings.reasoning_parser, parsers.reasoning),
        ):
            if name not in (AUTO, NONE, *entries):
                known = ", ".join([AUTO, NONE, *entries])
                raise ConfigError(f"[models.{model}] {key} = {name!r}: no loaded plugin brings it. Known: {known}.")


def choose_tool_parser(parsers: Parsers, model: str, name: str, dialect: Dialect) -> ToolParser | None:
    """The parser of a model's calls. name: of the configuration. Raises: PluginError naming the plugin whose function raised."""
    parser: ToolParser | None = _choose(parsers.tools, "tool", ToolParser, model, name, dialect)
    return parser


def choose_reasoning_parser(parsers: Parsers, model: str, name: str, dialect: Dialect) -> ReasoningParser | None:
    """The parser of a model's reasoning, as that of its calls."""
    parser: ReasoningParser | None = _choose(parsers.reasoning, "reasoning", ReasoningParser, model, name, dialect)
    return parser


def _collect(plugins: Plugins, hook: str, kind: type[ToolParserRegistry] | type[ReasoningParserRegistry]) -> Entries:
    found: dict[str, tuple[str, ParserEntry]] = {}
    for impl in sorted(getattr(plugins.manager.hook, hook).get_hookimpls(), key=lambda impl: impl.plugin_name):
        registry = kind()
        call_hook(impl, {"registry": registry})
        for entry in registry.entries:
            owner = found.setdefault(entry.name, (impl.plugin_name, entry))[0]
            if owner != impl.plugin_name:
                what = hook.removeprefix("jackfield_").removesuffix("_parsers")
                raise PluginError(f"plugins {owner!r} and {impl.plugin_name!r} both add the {what} parser {entry.name!r}")
    return found


def _choose(entries: Entries, what: str, kind: Any, model: str, name: str, dialect: Dialect) -> Any:
    if name == NONE or (name == AUTO and not dialect.template):  # a model without a template takes no conversation
        return None
    chosen = name if name != AUTO else next((key for key in entries if _ask(entries[key], what, "fits", model, dialect)), None)
    if chosen is None:
        return None
    made = _ask(entries[chosen], what, "make", model, dialect)
    if not isinstance(made, kind):
        raise PluginError(
            f"plugin {entries[chosen][0]!r}: its {what} parser {chosen!r} made {type(made).__name__}; a {kind.__name__} is expected"
        )
    return made


def _ask(entry: tuple[str, ParserEntry], what: str, function: str, model: str, dialect: Dialect) -> Any:
    plugin, parser = entry
    try:
        return getattr(parser, function)(dialect)
    except Exception as error:  # a plugin may raise anything; its name is what the operator needs
        raised = f"raised {type(error).__name__} for model {model!r}: {error}"
        raise PluginError(f"plugin {plugin!r}: `{function}` of its {what} parser {parser.name!r} {raised}") from error
