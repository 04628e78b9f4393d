"""Finding and importing plugins: distributions made up in a folder on the path, some broken, each in its own way."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import pytest

from jackfield import PLUGIN_API, ConfigError, PluginError
from jackfield.app import App
from jackfield.config import load_settings
from jackfield.plugins import GROUP, PluginInfo, Plugins, installed_plugins, load_plugins
from jackfield.testing.server import write_model

ENDPOINT = """
from msgspec import Struct
from jackfield import Endpoint, Request, Route, hookimpl

class Answer(Struct):
    word: str

class Word(Endpoint):
    name = {name!r}
    id_prefix = "word"
    routes = (Route(method="GET", paths=("/{name}",), request=Request, response=Answer),)

    def build_response(self, ctx):
        return Answer(word=self.name)

@hookimpl
def jackfield_register_endpoints(registry):
    registry.add(Word())
"""
QUOTA = """
from msgspec import Struct

class QuotaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_users: int = 5
    label: str = "none"

class Quota:
    settings = QuotaSettings

    def __init__(self, settings):
        self.limits = settings
"""


class Shelf:
    """A folder on the path into which distributions are put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, source: str, *, distribution: str = "", version: str = "1.2.3", target: str = "", module: str = "") -> str:
        """A distribution with one module and one entry point; returns the module's name."""
        distribution = distribution or f"made-up-{name}"
        module = module or f"{distribution.replace('-', '_')}_module"
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}{target and ':' + target}\n")
        importlib.invalidate_caches()
        return module

    def endpoint(self, name: str, more: str = "", **options: Any) -> str:
        """A distribution with a right endpoint, and more of a module after it."""
        return self.put(name, ENDPOINT.format(name=name) + more, **options)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Shelf(folder)
    for name in [path.stem for path in folder.glob("*.py")]:
        sys.modules.pop(name, None)


def infos(loaded: Plugins, *names: str) -> list[PluginInfo]:
    return [info for info in loaded.infos if info.name in names]


RAISES_LATE = """
@hookimpl(specname="jackfield_register_endpoints")
def register(registry):
    registry.add(Word())
    raise RuntimeError("half way")

del jackfield_register_endpoints
"""
# name of the case: what the module has (instead of, or after, an endpoint), what the reason says
BROKEN: dict[str, tuple[str, str]] = {
    "import": ("import no_such_library_anywhere\n", "ModuleNotFoundError: No module named 'no_such_library_anywhere'"),
    "importerror": ("raise ImportError('libfoo.so is missing')\n", "ImportError: libfoo.so is missing"),
    "exit": ("import sys\nsys.exit(3)\n", "it called sys.exit(3) when imported"),
    "syntax": ("def broken(:\n", "SyntaxError"),
    "late": (ENDPOINT.format(name="late") + RAISES_LATE, "RuntimeError: half way"),
    "api": (ENDPOINT.format(name="api") + "PLUGIN_API = 947\n", f"it is written for PLUGIN_API 947, and this jackfield has {PLUGIN_API}"),
    "othername": (
        ENDPOINT.format(name="wordy"),
        "its entry point is named 'othername', but it registers the endpoint 'wordy'; the two must be equal",
    ),
    "noendpoint": ("x = 1\n", "it registers no endpoint; a plugin of another kind belongs to [plugins.noendpoint]"),
}
each_broken = pytest.mark.parametrize(("name", "source", "reason"), [(name, *case) for name, case in BROKEN.items()], ids=list(BROKEN))


@each_broken
def test_a_broken_plugin_stops_the_start(shelf: Shelf, name: str, source: str, reason: str) -> None:
    shelf.put(name, source, distribution=f"made-up-{name}", version="4.5")
    with pytest.raises(PluginError) as caught:
        load_plugins({name: {}}, {})
    text = str(caught.value)
    assert text.startswith(f"plugin {name!r} (made-up-{name} 4.5): ")
    assert reason in text


@each_broken
async def test_a_broken_plugin_is_skipped(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, source: str, reason: str
) -> None:
    """It is listed with its reason and warned of once, nothing of it stays, and its neighbours by name work."""
    shelf.put(name, source)
    shelf.endpoint("aaa")
    shelf.endpoint("zzz")
    with caplog.at_level(logging.WARNING, logger="jackfield"):
        loaded = load_plugins({"zzz": {}, name: {}, "aaa": {}}, {}, on_error="skip")
    first, failed, last = infos(loaded, "aaa", name, "zzz")
    assert (first.state, first.reason, last.state, last.reason) == ("loaded", "", "loaded", "")
    assert (failed.name, failed.distribution, failed.version, failed.state) == (name, f"made-up-{name}", "1.2.3", "failed")
    assert reason in failed.reason
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert name in warnings[0]
    assert reason in warnings[0]
    assert list(loaded.endpoints) == ["aaa", "zzz"]
    assert [plugin for plugin, _ in loaded.cross_cutting()] == ["aaa", "zzz"]
    overrides = {"models.fake.source": write_model(tmp_path), "endpoints.aaa": {}, "endpoints.zzz": {}, f"endpoints.{name}": {}}
    await check_answers(App(load_settings(None, overrides=overrides), plugins=loaded), {"/aaa": "aaa", "/zzz": "zzz"})


async def check_answers(app: App, words: dict[str, str]) -> None:
    """The endpoints answer, without a socket."""
    transport = httpx.ASGITransport(app=app.asgi)
    await app.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, word in words.items():
                assert (await client.get(path)).json() == {"word": word}
    finally:
        await app.stop()


def test_what_a_broken_hook_left_is_gone(shelf: Shelf) -> None:
    """A misspelt hook is found after the registration, so it has to be taken back."""
    shelf.endpoint("word", "\n@hookimpl\ndef jackfield_engin(spec): ...\n")
    shelf.endpoint("zzz")
    loaded = load_plugins({"word": {}, "zzz": {}}, {}, on_error="skip")
    (failed,) = infos(loaded, "word")
    assert failed.state == "failed"
    assert "unknown hook 'jackfield_engin'" in failed.reason
    assert "Did you mean 'jackfield_engine'?" in failed.reason
    assert list(loaded.endpoints) == ["zzz"]
    assert [name for name, _ in loaded.cross_cutting()] == ["zzz"]
    loaded.manager.check_pending()


def test_a_plugin_that_is_not_named_is_not_imported(shelf: Shelf) -> None:
    word, other, broken = shelf.endpoint("word"), shelf.endpoint("other"), shelf.put("broken", "raise ImportError('no')")
    loaded = load_plugins({"word": {}}, {})
    assert word in sys.modules
    assert other not in sys.modules
    assert broken not in sys.modules
    assert [(info.name, info.state, info.reason) for info in infos(loaded, "word", "other", "broken")] == [
        ("broken", "not configured", ""),
        ("other", "not configured", ""),
        ("word", "loaded", ""),
    ]
    assert list(loaded.endpoints) == ["word"]


def test_all_endpoints_takes_what_is_installed(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    """Endpoints alone: another plugin has to be asked for, and one that fails is no reason to stop, since nobody named it."""
    shelf.endpoint("word")
    shelf.put("quota", QUOTA, target="Quota")
    shelf.put("broken", "raise ImportError('no')")
    own = [point for point in installed_plugins() if point.name in ("word", "quota", "broken")]
    loaded = load_plugins({}, {}, installed=own, all_endpoints=True)
    assert [(info.name, info.state) for info in loaded.infos] == [("broken", "failed"), ("quota", "not configured"), ("word", "loaded")]
    assert list(loaded.endpoints) == ["word"]
    assert [name for name, _ in loaded.cross_cutting()] == ["word"]
    assert "broken" in caplog.text


def test_plugins_are_found_sorted(shelf: Shelf) -> None:
    shelf.endpoint("zzz")
    shelf.endpoint("aaa")
    shelf.put("word", "", distribution="made-up-b")
    shelf.put("word", "", distribution="made-up-a")
    found = [(point.name, point.dist.name) for point in installed_plugins() if point.dist and point.dist.name.startswith("made-up")]
    assert found == [("aaa", "made-up-aaa"), ("word", "made-up-a"), ("word", "made-up-b"), ("zzz", "made-up-zzz")]


@pytest.mark.parametrize("table", ["endpoints", "plugins"])
def test_a_name_that_is_not_installed(shelf: Shelf, table: str) -> None:
    module = shelf.endpoint("reranker")
    tables: dict[str, dict[str, dict[str, Any]]] = {table: {"rerankr": {}}}
    with pytest.raises(ConfigError) as caught:
        load_plugins(tables.get("endpoints", {}), tables.get("plugins", {}), on_error="skip")
    text = str(caught.value)
    assert f"[{table}.rerankr]" in text
    assert "not installed" in text
    assert "Did you mean 'reranker'?" in text
    assert module not in sys.modules


def test_a_name_under_endpoints_and_plugins(shelf: Shelf) -> None:
    shelf.endpoint("word")
    with pytest.raises(ConfigError, match=r"'word' stands under \[endpoints\] and under \[plugins\]"):
        load_plugins({"word": {}}, {"word": {}})


def test_two_distributions_with_one_entry_point(shelf: Shelf) -> None:
    modules = [shelf.endpoint("word", distribution=f"made-up-{letter}") for letter in "ba"]
    with pytest.raises(PluginError, match="made-up-a and made-up-b both declare the entry point 'word'; uninstall one") as caught:
        load_plugins({"word": {}}, {})
    assert str(caught.value).startswith("plugin 'word' (made-up-a 1.2.3)")
    assert not set(modules) & set(sys.modules)


def test_two_distributions_with_one_entry_point_that_nobody_named(shelf: Shelf) -> None:
    for letter in "ab":
        shelf.endpoint("word", distribution=f"made-up-{letter}")
    shelf.endpoint("zzz")
    assert list(load_plugins({"zzz": {}}, {}).endpoints) == ["zzz"]


def test_two_distributions_with_one_entry_point_are_skipped(shelf: Shelf) -> None:
    for letter in "ab":
        shelf.endpoint("word", distribution=f"made-up-{letter}")
    shelf.endpoint("zzz")
    loaded = load_plugins({"word": {}, "zzz": {}}, {}, on_error="skip")
    assert [info.state for info in infos(loaded, "word")] == ["failed"]
    assert list(loaded.endpoints) == ["zzz"]


def test_an_endpoint_gets_its_table(shelf: Shelf) -> None:
    shelf.endpoint("word")
    loaded = load_plugins({"word": {"prefix": "/tei", "models": ["a"]}}, {})
    entry = loaded.endpoints["word"]
    assert (entry.plugin, entry.settings.prefix, entry.settings.models) == ("word", "/tei", ["a"])


def test_a_plugin_gets_its_settings(shelf: Shelf) -> None:
    shelf.put("quota", QUOTA, target="Quota")
    plugin: Any = load_plugins({}, {"quota": {"max_users": 7}}).manager.get_plugin("quota")
    assert (plugin.limits.max_users, plugin.limits.label) == (7, "none")
    assert type(plugin.limits) is type(plugin).settings


@pytest.mark.parametrize(("source", "target"), [("x = 1\n", ""), ("class Plain:\n    pass\n", "Plain")], ids=["module", "class"])
def test_a_plugin_without_settings(shelf: Shelf, source: str, target: str) -> None:
    module = shelf.put("plain", source, target=target)
    plugin: Any = load_plugins({}, {"plain": {}}).manager.get_plugin("plain")
    loaded = sys.modules[module]
    assert plugin is loaded if not target else isinstance(plugin, loaded.Plain)


def test_an_entry_point_without_a_distribution(shelf: Shelf) -> None:
    """Made by hand, as a test or an embedding program does."""
    module = shelf.endpoint("word")
    point = EntryPoint(name="word", value=module, group=GROUP)
    loaded = load_plugins({"word": {}}, {}, installed=[point])
    assert loaded.infos == [PluginInfo(name="word", distribution="unknown", version="0", state="loaded")]
    with pytest.raises(PluginError, match=r"plugin 'gone' .*AttributeError: .*'Gone'"):
        load_plugins({"gone": {}}, {}, installed=[EntryPoint(name="gone", value=f"{module}:Gone", group=GROUP)])
