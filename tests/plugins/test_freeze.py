"""The checks at start-up: each mistake of a plugin or of its configuration stops the start, with a text that names who made it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from jackfield import (
    ConfigError,
    Context,
    Endpoint,
    EndpointRegistry,
    PluginError,
    PoolingParams,
    Prompt,
    Request,
    Route,
    SamplingParams,
    TextPrompt,
    hookimpl,
    stageimpl,
)
from jackfield.app import App
from jackfield.config import load_settings
from jackfield.plugins import GROUP, LoadedEndpoint, Plugins, load_plugins
from jackfield.settings import EndpointSettings
from jackfield.testing import FakeEngine, make_client, make_server
from jackfield.testing.server import write_model


class Body(Request, frozen=True, kw_only=True):
    text: str = "a"
    stream: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    word: str


class Chunk(Struct, frozen=True, kw_only=True):
    text: str


def preprocess(self: Any, ctx: Context[Body]) -> list[Prompt]:
    return [TextPrompt(text=ctx.request.text)]


def pooling_params(self: Any, ctx: Context[Body]) -> PoolingParams:
    return PoolingParams()


def sampling_params(self: Any, ctx: Context[Body]) -> SamplingParams:
    return SamplingParams()


def build_response(self: Any, ctx: Context[Body]) -> Answer:
    return Answer(word=ctx.endpoint.name)


def route(*paths: str, method: Any = "POST", **options: Any) -> Route:
    return Route(method=method, paths=paths, **{"request": Body, "response": Answer, **options})


RIGHT: dict[str, Any] = {
    "name": "made",
    "id_prefix": "made",
    "operations": ("embed",),
    "routes": (route("/v1/made"),),
    "preprocess": preprocess,
    "pooling_params": pooling_params,
    "build_response": build_response,
}
STREAMING: dict[str, Any] = {
    "operations": ("generate",),
    "routes": (route("/v1/made", streams=True, chunk=Chunk),),
    "pooling_params": None,
    "sampling_params": sampling_params,
    "build_chunk": lambda self, ctx, delta: Chunk(text=delta.text),
}


def made(**changes: Any) -> Endpoint[Any, Any]:
    """An endpoint that passes every check, but for what is changed; None leaves a member out."""
    members = {name: value for name, value in {**RIGHT, **changes}.items() if value is not None}
    endpoint: Endpoint[Any, Any] = type("Made", (Endpoint,), members)()
    return endpoint


def refusal(*plugins: object, **options: Any) -> str:
    """Why a server with these does not start."""
    with pytest.raises(PluginError) as caught, make_server(*plugins, **options):
        pass
    return str(caught.value)


def refusal_to_load(target: str, name: str = "made") -> str:
    """Why a class of this module cannot be loaded as a plugin."""
    point = EntryPoint(name=name, value=f"{__name__}:{target}", group=GROUP)
    with pytest.raises(PluginError) as caught:
        load_plugins({name: {}}, {}, installed=[point])
    return str(caught.value)


@pytest.mark.parametrize("changes", [{}, STREAMING], ids=["pooling", "streaming"])
def test_what_every_case_below_spoils_is_right(changes: dict[str, Any]) -> None:
    with make_client(made(**changes)) as client:
        assert client.post("/v1/made", json={"stream": bool(changes)}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ({}, "preprocess"),
        ({}, "pooling_params"),
        ({}, "build_response"),
        (STREAMING, "sampling_params"),
        (STREAMING, "build_chunk"),
    ],
)
def test_a_needed_stage_is_missing(kind: dict[str, Any], stage: str) -> None:
    text = refusal(made(**{**kind, stage: None}))
    assert f"endpoint 'made' lacks the stage {stage}" in text


def test_a_mixed_endpoint_needs_both_kinds_of_parameters() -> None:
    text = refusal(made(operations=("embed", "generate")))
    assert "endpoint 'made' lacks the stage sampling_params" in text


def test_a_route_without_an_operation_needs_no_more_than_its_answer() -> None:
    endpoint = made(operations=None, preprocess=None, pooling_params=None)
    with make_client(endpoint) as client:
        assert client.post("/v1/made", json={}).json() == {"word": "made"}


class Doubling:
    @stageimpl
    def preprocess(self, ctx: Context[Any]) -> list[Prompt]:
        return []


class DoublingParams:
    @stageimpl
    def pooling_params(self, ctx: Context[Any]) -> PoolingParams:
        return PoolingParams()


@pytest.mark.parametrize(("plugin", "stage"), [(Doubling(), "preprocess"), (DoublingParams(), "pooling_params")], ids=["prompts", "params"])
def test_a_plugin_replaces_a_stage(plugin: object, stage: str) -> None:
    text = refusal(made(), plugin)
    assert f"plugin {type(plugin).__name__!r}" in text
    assert f"implements {stage} for endpoint 'made'" in text
    assert "wrapper=True" in text


async def async_stage(self: Any, ctx: Context[Any]) -> Any:
    return None


async def async_generator_stage(self: Any, ctx: Context[Any]) -> AsyncIterator[Any]:
    yield None


async def async_chunk(self: Any, ctx: Context[Any], delta: Any) -> Any:
    return None


async def async_event(self: Any, ctx: Context[Any], error: BaseException | None) -> None:
    return None


@pytest.mark.parametrize(
    ("kind", "stage", "function"),
    [
        ({}, "preprocess", async_stage),
        ({}, "preprocess", async_generator_stage),
        ({}, "pooling_params", async_stage),
        ({}, "build_response", async_stage),
        ({}, "request_finished", async_event),
        (STREAMING, "sampling_params", async_stage),
        (STREAMING, "build_chunk", async_chunk),
    ],
)
def test_an_async_stage_of_an_endpoint(kind: dict[str, Any], stage: str, function: Any) -> None:
    text = refusal(made(**{**kind, stage: function}))
    assert "endpoint 'made'" in text
    assert f"its stage {stage} is async" in text


class AsyncWrapper:
    @stageimpl(wrapper=True)
    async def preprocess(self, ctx: Context[Any]) -> AsyncIterator[None]:
        yield


class AsyncObserver:
    @stageimpl
    async def request_finished(self, ctx: Context[Any], error: BaseException | None) -> None:
        return


@pytest.mark.parametrize(
    ("plugin", "words"),
    [(AsyncWrapper(), ("preprocess", "generator function")), (AsyncObserver(), ("request_finished", "async"))],
    ids=["wrapper", "observer"],
)
def test_an_async_stage_of_a_plugin(plugin: object, words: tuple[str, ...]) -> None:
    text = refusal(made(), plugin)
    assert f"plugin {type(plugin).__name__!r}" in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("spelt", "meant", "value"),
    [
        ("pre_process", "preprocess", preprocess),
        ("preproces", "preprocess", preprocess),
        ("build_respones", "build_response", build_response),
        ("pooling_param", "pooling_params", pooling_params),
        ("requestFinished", "request_finished", preprocess),
    ],
)
def test_a_misspelt_stage_of_an_endpoint(spelt: str, meant: str, value: Any) -> None:
    """Whether the right one is there too or not: the misspelt one would never run."""
    for changes in ({spelt: value}, {spelt: value, meant: None}):
        text = refusal(made(**changes))
        assert "endpoint 'made'" in text
        assert f"its method {spelt} is no stage" in text
        assert f"{meant!r} meant" in text


def test_a_helper_of_an_endpoint_may_be_named_like_a_stage_after_an_underscore() -> None:
    with make_client(made(_pre_process=preprocess, process_prompt=preprocess, preprocessor_name="x")) as client:
        assert client.post("/v1/made", json={}).status_code == 200


class MisspeltWrapper:
    @stageimpl(wrapper=True)
    def pre_process(self, ctx: Context[Any]) -> Generator[None, Any, Any]:
        return (yield)


def test_a_misspelt_stage_of_a_plugin() -> None:
    text = refusal(made(), MisspeltWrapper())
    assert "plugin 'MisspeltWrapper'" in text
    assert "unknown hook 'pre_process'" in text


class MisspeltHook:
    @hookimpl
    def jackfield_register_endpoint(self, registry: EndpointRegistry) -> None:
        registry.add(made())


class MismarkedHook:
    @hookimpl
    def preprocess(self, ctx: Context[Any]) -> list[Prompt]:
        return []


def test_a_misspelt_app_hook() -> None:
    text = refusal_to_load("MisspeltHook")
    assert "plugin 'made'" in text
    assert "unknown hook 'jackfield_register_endpoint'" in text
    assert "Did you mean 'jackfield_register_endpoints'?" in text


def test_a_stage_with_the_marker_of_app_hooks() -> None:
    text = refusal_to_load("MismarkedHook")
    assert "plugin 'made'" in text
    assert "unknown hook 'preprocess'" in text


def other_argument(self: Any, context: Context[Any]) -> list[Prompt]:
    return []


class OtherArgument:
    @stageimpl(wrapper=True)
    def build_response(self, context: Context[Any]) -> Generator[None, Any, Any]:
        return (yield)


class OtherHookArgument:
    @hookimpl
    def jackfield_register_endpoints(self, endpoints: EndpointRegistry) -> None:
        endpoints.add(made())


def test_an_argument_that_a_stage_does_not_have() -> None:
    text = refusal(made(preprocess=other_argument))
    assert "endpoint 'made'" in text
    assert "preprocess" in text
    assert "{'context'}" in text
    text = refusal(made(), OtherArgument())
    assert "plugin 'OtherArgument'" in text
    assert "build_response" in text
    assert "{'context'}" in text


def test_an_argument_that_an_app_hook_does_not_have() -> None:
    text = refusal_to_load("OtherHookArgument")
    assert "plugin 'made'" in text
    assert "jackfield_register_endpoints" in text
    assert "{'endpoints'}" in text


class Twice:
    @hookimpl
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        registry.add(made())
        registry.add(made(routes=(route("/v1/other"),)))


class AddsAClass:
    @hookimpl
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        registry.add(type(made()))  # type: ignore[arg-type]


def test_two_endpoints_of_one_name() -> None:
    text = refusal_to_load("Twice")
    assert "plugin 'made'" in text
    assert "registers the endpoint 'made' twice" in text


def test_a_class_in_place_of_an_endpoint() -> None:
    text = refusal_to_load("AddsAClass")
    assert "plugin 'made'" in text
    assert "takes an Endpoint object" in text
    assert "Made" in text


@pytest.mark.parametrize("path", ["/v1/thing", "/v1/thing/{b:int}"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_two_endpoints_with_one_method_and_path(method: str, path: str) -> None:
    first = made(name="first", routes=(route("/v1/thing", "/v1/thing/{a:int}", method=method),))
    second = made(name="second", routes=(route("/v1/else", path, method=method),))
    text = refusal(first, second)
    assert f"{method} {path} of endpoint 'second'" in text
    assert "taken already, by endpoint 'first'" in text
    assert "[endpoints.second]" in text


def test_one_endpoint_with_a_path_twice() -> None:
    text = refusal(made(routes=(route("/v1/thing"), route("/v1/other", "/v1/thing"))))
    assert "POST /v1/thing of endpoint 'made' is taken already, by endpoint 'made'" in text


def test_two_methods_of_one_path() -> None:
    reader = made(name="reader", routes=(route("/v1/thing", method="GET"),))
    writer = made(name="writer", routes=(route("/v1/thing", method="POST"),))
    with make_client(reader, writer) as client:
        assert client.get("/v1/thing").json() == {"word": "reader"}
        assert client.post("/v1/thing", json={}).json() == {"word": "writer"}


def test_a_prefix_resolves_a_clash() -> None:
    with make_client(made(name="first"), made(name="second"), endpoints={"second": {"prefix": "/tei"}}) as client:
        assert client.post("/v1/made", json={}).json() == {"word": "first"}
        assert client.post("/tei/v1/made", json={}).json() == {"word": "second"}


def test_a_prefix_can_make_a_clash() -> None:
    first, second = made(name="first", routes=(route("/tei/v1/made"),)), made(name="second")
    text = refusal(first, second, endpoints={"second": {"prefix": "/tei"}})
    assert "POST /tei/v1/made of endpoint 'second' is taken already, by endpoint 'first'" in text


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/{x:str}", "/v1/models/{x:path}", "/openapi.json", "/docs"],
)
def test_a_path_of_the_server_itself(path: str) -> None:
    text = refusal(made(routes=(route("/v1/made"), route(path, method="GET"))))
    assert f"GET {path} of endpoint 'made'" in text
    assert "taken already, by the server itself" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": None}, "endpoint Made has no name"),
        ({"routes": None}, "endpoint 'made' has no routes"),
        ({"id_prefix": None}, "endpoint 'made': /v1/made has no id_prefix"),
        ({"routes": (route(),)}, "must begin with a slash"),
        ({"routes": (route("v1/made"),)}, "must begin with a slash"),
        ({"routes": (route("/v1/made/"),)}, "must begin with a slash, not end with one"),
    ],
    ids=["name", "routes", "id_prefix", "no path", "slash in front", "slash behind"],
)
def test_an_endpoint_that_lacks_what_it_must_say(changes: dict[str, Any], text: str) -> None:
    assert text in refusal(made(**changes))


def test_a_route_may_have_its_own_id_prefix() -> None:
    with make_client(made(id_prefix=None, routes=(route("/v1/made", id_prefix="own"),))) as client:
        assert client.post("/v1/made", json={}).status_code == 200


@pytest.mark.parametrize("changes", [{"operations": ("embeds",)}, {"routes": (route("/v1/made", operations=("embeds",)),)}])
def test_an_unknown_operation(changes: dict[str, Any]) -> None:
    text = refusal(made(**changes))
    assert "endpoint 'made' names the operation 'embeds'" in text
    assert "embed, token_embed" in text


def test_a_request_type_that_cannot_be_decoded() -> None:
    text = refusal(made(routes=(route("/v1/made", request=list[int] | list[str]),)))
    assert "endpoint 'made': /v1/made has a request type that cannot be decoded" in text
    assert "array-like" in text


def application(tmp_path: Path, engine: FakeEngine, endpoint: Endpoint[Any, Any], models: list[str]) -> App:
    """An application that is not started, with the model `fake`."""
    loaded = Plugins()
    loaded.manager.register(engine, name="fake-engine")
    settings = EndpointSettings(models=models)
    loaded.endpoints[endpoint.name] = LoadedEndpoint(endpoint=endpoint, settings=settings, plugin=endpoint.name)
    overrides = {"models.fake.source": write_model(tmp_path), f"endpoints.{endpoint.name}": {"models": models}}
    return App(load_settings(None, overrides=overrides), plugins=loaded)


async def test_a_model_that_lacks_the_endpoints_operation(tmp_path: Path) -> None:
    app = application(tmp_path, FakeEngine(operations=("classify",)), made(operations=("embed", "token_embed")), ["fake"])
    assert app.state() == "the models are loading"
    try:
        with pytest.raises(PluginError) as caught:
            await app.start()
    finally:
        await app.stop()
    text = str(caught.value)
    assert "endpoint 'made' is bound to model 'fake', which cannot embed or token_embed" in text
    assert "can classify" in text
    assert "[endpoints.made] models" in text


async def test_a_model_that_the_table_does_not_name_may_lack_the_operation(tmp_path: Path) -> None:
    app = application(tmp_path, FakeEngine(operations=("classify",)), made(), [])
    assert app.state() == "the models are loading"
    try:
        await app.start()
        assert app.state() == ""
        assert [entry.endpoints for entry in app.model_entries()] == [[]]
    finally:
        await app.stop()


def test_a_model_that_is_not_configured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        application(tmp_path, FakeEngine(), made(), ["fakes"])
    text = str(caught.value)
    assert "[endpoints.made] models names 'fakes'" in text
    assert "Did you mean 'fake'?" in text
