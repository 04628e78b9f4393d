"""Plugins add parsers of tool calls and reasoning; the configuration or the model's chat template chooses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from msgspec import Struct

from jackfield import (
    ConfigError,
    Context,
    Dialect,
    Endpoint,
    EndpointRegistry,
    PluginError,
    ReasoningParserRegistry,
    Request,
    Route,
    ToolParserRegistry,
    hookimpl,
)
from jackfield.testing import make_client
from tests.checkpoints import save_causal

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Found(Struct, frozen=True, kw_only=True):
    """What an endpoint is told of a model."""

    tools: str | None
    reasoning: str | None
    knows_tools: bool


class FindRequest(Request, frozen=True, kw_only=True):
    """The model alone."""


class FindEndpoint(Endpoint[FindRequest, Found]):
    """Tells the parsers of a model."""

    name = id_prefix = "find"
    routes = (Route(method="POST", paths=("/find",), request=FindRequest, response=Found, operations=()),)

    def build_response(self, ctx: Context[FindRequest]) -> Found:
        model = ctx.model
        return Found(
            tools=model.tool_parser.visible[0] if model.tool_parser else None,
            reasoning=model.reasoning_parser.start if model.reasoning_parser else None,
            knows_tools=model.template_knows_tools,
        )


class Parser:
    """Of calls and of reasoning; `visible` and `start` tell which."""

    end = "."
    id_length = None

    def __init__(self, name: str) -> None:
        self.visible: tuple[str, ...] = (name,)
        self.start = name

    def stream(self, prompt: str = "", *, sure: bool = False) -> Any:
        raise NotImplementedError

    def grammar(self, tools: Any, literal: Any, *, required: bool, parallel: bool) -> None: ...

    def begun(self, prompt: str) -> bool | None: ...


def maker(name: str) -> Callable[[Dialect], Any]:
    return lambda dialect: Parser(name)


def plugin(tools: Callable[[ToolParserRegistry], None], reasoning: Callable[[ReasoningParserRegistry], None] | None = None) -> ModuleType:
    """A third party's plugin, with or without an endpoint."""

    def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
        registry.add(FindEndpoint())

    def jackfield_tool_parsers(registry: ToolParserRegistry) -> None:
        tools(registry)

    def jackfield_reasoning_parsers(registry: ReasoningParserRegistry) -> None:
        if reasoning is not None:
            reasoning(registry)

    made = ModuleType("find")
    for hook in (jackfield_register_endpoints, jackfield_tool_parsers, jackfield_reasoning_parsers):
        vars(made)[hook.__name__] = hookimpl(hook)
    return made


def tool_families(registry: ToolParserRegistry) -> None:
    registry.add("never", maker("never"), fits=lambda dialect: False)
    registry.add("marked", maker("marked"), fits=lambda dialect: "<call>" in dialect.template)
    registry.add("any", maker("any"), fits=lambda dialect: True)


def reasoning_families(registry: ReasoningParserRegistry) -> None:
    registry.add("dreams", maker("dreams"), fits=lambda dialect: "<dream>" in dialect.template)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Tables of models that have a template of their own each, and of one that has none."""
    root = tmp_path_factory.mktemp("models")
    marked = f"{TEMPLATE}{{{{ '<dream>' }}}}{{% if tools %}}<call>{{% endif %}}"
    tables: dict[str, dict[str, Any]] = {}
    for name, template in {"plain": TEMPLATE, "marked": marked, "none": None}.items():
        folder = save_causal(root / name, "llama")
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("chat_template", None)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path.write_text(json.dumps(config if template is None else {**config, "chat_template": template}))
        tables[name] = {"source": str(folder)}
    return tables


@pytest.fixture(scope="module")
def client(models: dict[str, dict[str, Any]]) -> Iterator[httpx.Client]:
    chosen = {
        **models,
        "named": {**models["plain"], "tool_parser": "never", "reasoning_parser": "dreams"},
        "without": {**models["marked"], "tool_parser": "none", "reasoning_parser": "none"},
    }
    with make_client(plugin(tool_families, reasoning_families), models=chosen) as made:
        yield made


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("plain", {"tools": "any", "reasoning": None, "knows_tools": False}),
        ("marked", {"tools": "marked", "reasoning": "dreams", "knows_tools": True}),
        ("none", {"tools": None, "reasoning": None, "knows_tools": False}),
        ("named", {"tools": "never", "reasoning": "dreams", "knows_tools": False}),
        ("without", {"tools": None, "reasoning": None, "knows_tools": True}),
    ],
)
def test_what_is_chosen(client: httpx.Client, model: str, found: dict[str, Any]) -> None:
    assert client.post("/find", json={"model": model}).json() == found


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("tool_parser", r"\[models.m\] tool_parser = 'other': no loaded plugin brings it. Known: auto, none, never, marked, any."),
        ("reasoning_parser", r"reasoning_parser = 'other': .*Known: auto, none, dreams."),
    ],
)
def test_a_name_that_nobody_brings(models: dict[str, dict[str, Any]], key: str, says: str) -> None:
    with (
        pytest.raises(ConfigError, match=says),
        make_client(plugin(tool_families, reasoning_families), models={"m": {**models["plain"], key: "other"}}),
    ):
        pass


def failing(dialect: Dialect) -> Any:
    raise KeyError("no such thing")


def yes(dialect: Dialect) -> bool:
    return True


def no_stream(dialect: Dialect) -> Any:
    return "a parser"


def twice(registry: ToolParserRegistry) -> None:
    registry.add("a", no_stream, fits=yes)
    registry.add("a", no_stream, fits=yes)


@pytest.mark.parametrize(
    ("register", "says"),
    [
        (lambda registry: registry.add("A b", no_stream, fits=yes), "the parser's name 'A b' is not of"),
        (lambda registry: registry.add("auto", no_stream, fits=yes), "'auto' is no name for a parser"),
        (lambda registry: registry.add("a", no_stream, fits=True), "have to be functions"),
        (twice, "named 'a' is there already"),
        (lambda registry: registry.add("a", no_stream, fits=failing), "`fits` of its tool parser 'a' raised KeyError for model 'm'"),
        (lambda registry: registry.add("a", failing, fits=yes), "`make` of its tool parser 'a' raised KeyError for model 'm'"),
        (lambda registry: registry.add("a", no_stream, fits=yes), "its tool parser 'a' made str; a ToolParser is expected"),
    ],
)
def test_a_plugin_at_fault_is_named(models: dict[str, dict[str, Any]], register: Callable[[ToolParserRegistry], None], says: str) -> None:
    with pytest.raises(PluginError, match=says) as raised, make_client(plugin(register), models={"m": models["plain"]}):
        pass
    assert "'find'" in str(raised.value)


def test_two_plugins_with_one_name(models: dict[str, dict[str, Any]]) -> None:
    other = ModuleType("another")
    vars(other)["jackfield_tool_parsers"] = plugin(tool_families).jackfield_tool_parsers
    with (
        pytest.raises(PluginError, match="plugins 'another' and 'find' both add the tool parser 'never'"),
        make_client(plugin(tool_families), other, models={"m": models["plain"]}),
    ):
        pass
