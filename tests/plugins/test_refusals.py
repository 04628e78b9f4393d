"""More mistakes that stop the start: observers that wrap, paths that lead nowhere, streams without a switch, misplaced tables."""

from __future__ import annotations

import logging
from collections.abc import Generator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from jackfield import ConfigError, Context, EndpointRegistry, PluginError, Request, hookimpl, stageimpl
from jackfield.plugins import GROUP, load_plugins
from jackfield.testing import make_client
from jackfield.testing.server import write_model
from tests.conftest import Run, Write
from tests.plugins.test_freeze import STREAMING, Chunk, made, refusal, route

# Observers, prefixes, paths, streams


class WrappingObserver:
    @stageimpl(wrapper=True)
    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> Generator[None, None, None]:
        yield


class OldWrappingObserver:
    @stageimpl(hookwrapper=True)
    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> Generator[None, Any, None]:
        yield


class OldWrapper:
    """Of pluggy's older kind, which gets a result object and cannot raise."""

    @stageimpl(hookwrapper=True)
    def preprocess(self, ctx: Context[Any]) -> Generator[None, Any, None]:
        yield


@pytest.mark.parametrize("plugin", [WrappingObserver(), OldWrappingObserver()], ids=["wrapper", "hookwrapper"])
def test_an_observer_that_wraps(plugin: object) -> None:
    text = refusal(made(), plugin)
    assert f"plugin {type(plugin).__name__!r}" in text
    assert "its request_finished is a wrapper" in text


def test_an_endpoint_whose_own_observer_wraps() -> None:
    text = refusal(made(request_finished=WrappingObserver.request_finished))
    assert "endpoint 'made'" in text
    assert "its request_finished is a wrapper" in text


def test_a_wrapper_of_the_older_kind() -> None:
    text = refusal(made(), OldWrapper())
    assert "plugin 'OldWrapper'" in text
    assert "preprocess" in text
    assert "wrapper=True" in text


@pytest.mark.parametrize("prefix", ["tei", "/", "/tei/", "//tei", "/tei//v1", "tei/", " ", "/{name}", "/{name:str}/tei"])
def test_a_prefix_that_mounts_nothing(prefix: str) -> None:
    text = refusal(made(), endpoints={"made": {"prefix": prefix}})
    assert "[endpoints.made]" in text
    assert f"prefix = {prefix!r}" in text
    assert "begin with a slash, not end with one" in text


@pytest.mark.parametrize("prefix", ["", "/tei", "/a/b/c", "/v1.0_x-y"])
def test_a_prefix_that_mounts(prefix: str) -> None:
    with make_client(made(), endpoints={"made": {"prefix": prefix}}) as client:
        assert client.post(f"{prefix}/v1/made", json={}).status_code == 200
        assert client.post("/v1/made", json={}).status_code == (404 if prefix else 200)
        assert f"{prefix}/v1/made" in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    "path", ["", "/v1/", "/v1//made", "/v1/{name}", "/v1/{name:text}", "/v1/{name:str", "/v1/name}", "/v1/a{name:str}", "/v1/{:str}"]
)
def test_a_path_that_leads_nowhere(path: str) -> None:
    text = refusal(made(routes=(route("/v1/made", path),)))
    assert "endpoint 'made'" in text
    assert f"the path {path!r}" in text


class Unswitched(Request, frozen=True, kw_only=True):
    text: str = "a"


def test_a_streaming_route_whose_requests_cannot_ask_for_a_stream() -> None:
    routes = (route("/v1/other"), route("/v1/made", streams=True, chunk=Chunk, request=Unswitched))
    text = refusal(made(**{**STREAMING, "routes": routes}))
    assert "endpoint 'made': /v1/made streams" in text
    assert "no field `stream`" in text


def test_a_route_that_does_not_stream_needs_no_such_field() -> None:
    with make_client(made(routes=(route("/v1/made", request=Unswitched),))) as client:
        assert client.post("/v1/made", json={"stream": True}).status_code == 200


# Tables. The plugins of these tests, installed under the names `made`, `quota` and `plain`:


class Made:
    @hookimpl
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        registry.add(made())


class QuotaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_users: int = 5


class Quota:
    settings = QuotaSettings

    def __init__(self, settings: QuotaSettings) -> None:
        self.limits = settings


class Plain:
    """Takes no settings."""


INSTALLED = [EntryPoint(name=kind.__name__.lower(), value=f"{__name__}:{kind.__name__}", group=GROUP) for kind in (Made, Quota, Plain)]
Tables = dict[str, dict[str, Any]]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("endpoints", "plugins", "words"),
    [
        ({"made": {"modles": []}}, {}, ("[endpoints.made]", "unknown key 'modles'", "'models'")),
        ({"made": {"models": "a"}}, {}, ("endpoints.made.models = 'a'", "array")),
        ({"made": {"threaded": 1}}, {}, ("endpoints.made.threaded = 1", "bool")),
        ({}, {"quota": {"max_user": 1}}, ("[plugins.quota]", "unknown key 'max_user'", "'max_users'")),
        ({}, {"quota": {"max_users": "many"}}, ("plugins.quota.max_users = 'many'", "int")),
        ({}, {"plain": {"a": 1}}, ("[plugins.plain] has keys", "no settings")),
        ({"maid": {}}, {}, ("[endpoints.maid]", "not installed", "'made'")),
        ({}, {"quotas": {}}, ("[plugins.quotas]", "not installed", "'quota'")),
        ({"made": {}}, {"made": {}}, ("'made'", "[endpoints]", "[plugins]")),
    ],
    ids=str,
)
def test_a_mistake_of_the_operator_is_never_skipped(on_error: Any, endpoints: Tables, plugins: Tables, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plugins(endpoints, plugins, on_error=on_error, installed=INSTALLED)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_fault_of_a_plugin_does_not_hide_the_operators_mistake() -> None:
    """The broken plugin comes first by name, and is skipped; the mistake in the other's table still stops the start."""
    broken = EntryPoint(name="broken", value="no_such_module_anywhere", group=GROUP)
    load_plugins({"broken": {}, "made": {}}, {}, on_error="skip", installed=[broken, *INSTALLED])
    with pytest.raises(ConfigError, match="modles"):
        load_plugins({"broken": {}, "made": {"modles": []}}, {}, on_error="skip", installed=[broken, *INSTALLED])


MISPLACED: list[tuple[Tables, Tables, str, str]] = [
    ({}, {"made": {}}, "made", "[plugins.made] names it, but it registers an endpoint; its table is [endpoints.made]"),
    (
        {"plain": {}},
        {},
        "plain",
        "[endpoints.plain] names it, but it registers no endpoint; a plugin of another kind belongs to [plugins.plain]",
    ),
    (
        {"quota": {}},
        {},
        "quota",
        "[endpoints.quota] names it, but it registers no endpoint; a plugin of another kind belongs to [plugins.quota]",
    ),
]
misplaced = pytest.mark.parametrize(("endpoints", "plugins", "name", "reason"), MISPLACED, ids=[name for _, _, name, _ in MISPLACED])


@misplaced
def test_a_misplaced_table_is_named(endpoints: Tables, plugins: Tables, name: str, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        load_plugins(endpoints, plugins, installed=INSTALLED)
    assert str(caught.value) == f"plugin {name!r} (unknown 0): {reason}"


@misplaced
def test_a_misplaced_table_that_is_skipped_is_named_too(
    endpoints: Tables, plugins: Tables, name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the plugin stays, and the log says why."""
    with caplog.at_level(logging.WARNING, logger="jackfield"):
        loaded = load_plugins(endpoints, plugins, on_error="skip", installed=INSTALLED)
    assert [(info.name, info.reason) for info in loaded.infos if info.state == "failed"] == [(name, reason)]
    assert reason in caplog.text
    assert loaded.endpoints == {}
    assert loaded.cross_cutting() == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[endpoints.embed]\nprefx = '/x'", ("[endpoints.embed]", "unknown key 'prefx'", "'prefix'")),
        ("[endpoints.embed]\nmodels = ['fakes']", ("[endpoints.embed] models names 'fakes'", "'fake'")),
        ("[endpoints.embedd]", ("[endpoints.embedd]", "not installed", "'embed'")),
    ],
    ids=["key", "model", "name"],
)
def test_the_command_line_never_skips_a_mistake_of_the_operator(
    run: Run, write: Write, tmp_path: Path, table: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "model").mkdir()
    source = write_model(tmp_path / "model")
    head = f"[server]\nplugin_errors = 'skip'\n[engine]\nmode = 'thread'\n[models.fake]\nsource = {source!r}\n"
    code, out, err = run("check", str(write(head + table)))
    assert (code, out) == (2, "")
    assert err.startswith("jackfield cannot start (configuration): ")
    assert all(word in err for word in words), err


# Types and settings


class Left(Request, frozen=True, kw_only=True, tag="left"):
    text: str


class Right(Request, frozen=True, kw_only=True, tag="right"):
    text: str


class Untagged(Struct):
    number: int = 1


class Other(Struct):
    number: int = 2


def test_a_stream_whose_request_is_a_union_without_a_switch() -> None:
    assert "has no field `stream`" in refusal(
        made(**{**STREAMING, "routes": (route("/v1/made", request=Left | Right, streams=True, chunk=Chunk),)})
    )


def test_a_response_that_cannot_be_described() -> None:
    text = refusal(made(routes=(route("/v1/made", response=Untagged | Other),)))
    assert "endpoint 'made': the response type of /v1/made cannot be described" in text


@pytest.mark.parametrize("path", ["/made/{x:int}/{x:int}", "/made?x", "/made#x", "/ma de"])
def test_a_path_that_no_request_has(path: str) -> None:
    assert repr(path) in refusal(made(routes=(route(path),)))


def test_a_root_path_without_its_slash() -> None:
    with pytest.raises(ConfigError, match="root_path = 'api' must begin with a slash"), make_client(made(), server={"root_path": "api"}):
        pass


class NeedsUrl(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str


class Needy:
    """A plugin with a setting that has no default."""

    settings = NeedsUrl

    def __init__(self, settings: NeedsUrl) -> None:
        self.settings_given = settings


class Found:
    """An entry point of it."""

    name = "needy"
    dist = None

    def load(self) -> type[Needy]:
        return Needy


def test_a_plugin_that_nobody_named_stops_nothing() -> None:
    (info,) = load_plugins({}, {}, installed=[Found()], all_endpoints=True).infos
    assert info.state == "failed"
    assert "lacks the key 'url'" in info.reason


def test_a_misplaced_table_of_a_plugin_with_a_needed_setting() -> None:
    with pytest.raises(PluginError, match=r"belongs to \[plugins\.needy\]"):
        load_plugins({"needy": {"url": "x"}}, {}, installed=[Found()])
