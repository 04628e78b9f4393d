"""The test kit finds what `jackfield serve` would find, with the same words."""

from __future__ import annotations

import types
from typing import Any

import pytest
from msgspec import Struct

from jackfield import (
    ConfigError,
    Context,
    Endpoint,
    EndpointRegistry,
    ModelError,
    PluginError,
    Request,
    Route,
    StartupError,
    hookimpl,
    stageimpl,
)
from jackfield.testing import FakeEngine, make_client, make_server


class Answer(Struct):
    """One word."""

    word: str


class Word(Endpoint[Request, Answer]):
    """The smallest one."""

    name = "word"
    id_prefix = "word"
    routes = (Route(method="GET", paths=("/word",), request=Request, response=Answer),)

    def build_response(self, ctx: Context[Request]) -> Answer:
        return Answer("hello")


class Measure(Word):
    """One that computes."""

    operations = ("embed",)

    def preprocess(self, ctx: Context[Request]) -> Any:
        return []

    def pooling_params(self, ctx: Context[Request]) -> Any:
        return None


class Misspelt:
    """A hook that there is not."""

    @hookimpl
    def jackfield_wrap_submitt(self, endpoint: Any, submit: Any) -> None:
        return None


class Late:
    """An app hook that cannot be awaited."""

    @hookimpl
    async def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        registry.add(Word())


class Replacer:
    """A plugin that wants to replace another's stage."""

    @stageimpl
    def build_response(self, ctx: Context[Any]) -> Answer:
        return Answer("mine")


@pytest.mark.parametrize(
    ("plugins", "options", "text"),
    [
        ((Word(), Word()), {}, "both declare the entry point 'word'"),
        ((Word(), Misspelt()), {}, "unknown hook 'jackfield_wrap_submitt'"),
        ((Word(), Late()), {}, "its jackfield_register_endpoints is async"),
        ((Word(), Replacer()), {}, "they never replace it"),
        ((Word(),), {"endpoints": {"wrod": {}}}, "[endpoints.wrod] names a plugin that is not installed"),
        ((Word(),), {"endpoints": {"word": {"prefx": "/a"}}}, "[endpoints.word] has an unknown key 'prefx'"),
        ((Word(),), {"server": {"prot": 1}}, "[server] has an unknown key 'prot'"),
        ((), {}, "No endpoint is enabled"),
        (
            (Measure(),),
            {"engine": FakeEngine(operations=("generate",)), "endpoints": {"word": {"models": ["fake"]}}},
            "bound to model 'fake'",
        ),
    ],
    ids=["twice", "misspelt hook", "async", "replaces", "unknown table", "unknown key", "server key", "none", "model cannot"],
)
def test_what_stops_the_start_is_raised(plugins: tuple[object, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError) as caught, make_server(*plugins, **options):
        pass
    assert text in str(caught.value)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30}')
    with pytest.raises(StartupError) as caught, make_server(Measure(), real=True, models={"broken": {"source": str(tmp_path)}}):
        pass
    assert "broken" in str(caught.value)


class Broken(FakeEngine):
    """A plugin's engine with a bug."""

    async def start(self, progress: Any = None) -> dict[str, Any]:
        raise KeyError("device")


def test_an_engine_that_cannot_start_is_named() -> None:
    with pytest.raises(PluginError) as caught, make_server(Measure(), engine=Broken()):
        pass
    assert "(Broken) did not start: KeyError: 'device'" in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30, "max_position_embeddings": 9}'
    )
    with pytest.raises(ModelError, match="holds no tokenizer: none of"), make_server(Word(), models={"empty": {"source": str(tmp_path)}}):
        pass


def test_there_must_be_a_model() -> None:
    with pytest.raises(ConfigError, match="No model is configured"), make_server(Word(), models={}):
        pass


def test_a_module_is_a_plugin_as_it_would_be_when_installed() -> None:
    module = types.ModuleType("word")

    @hookimpl
    def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
        registry.add(Word())

    module.jackfield_register_endpoints = jackfield_register_endpoints  # type: ignore[attr-defined]
    with make_client(module, endpoints={"word": {"prefix": "/said"}}) as client:
        assert client.get("/said/word").json() == {"word": "hello"}
