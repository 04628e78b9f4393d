"""Finding, importing and checking plugins: our own loop over entry points, each import isolated, every failure with a name.

pluggy's own loader stops at the first exception and reports nothing. Entry points of the group `jackfield` that the configuration does not
name are listed and not imported.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import pluggy
from msgspec import Struct
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield.client import ModelCard
from jackfield.config import Where, convert, inside, nearest
from jackfield.endpoint import Endpoint, EndpointRegistry
from jackfield.errors import ConfigError, PluginError, StartupError
from jackfield.hookspecs import APP_PROJECT, PLUGIN_API, AppHooks
from jackfield.poolers import PoolerEntry, PoolerRegistry
from jackfield.settings import EndpointSettings, Settings

__all__ = [
    "GROUP",
    "TORCH",
    "Installed",
    "LoadedEndpoint",
    "PluginInfo",
    "Plugins",
    "call_hook",
    "collect_poolers",
    "fitting_poolers",
    "installed_plugins",
    "load_plugins",
    "plugin_tables",
    "register",
]

log = logging.getLogger("jackfield.plugins")

GROUP = "jackfield"
# The name of the engine that is built in.
TORCH = "torch"
State = Literal["loaded", "failed", "not configured"]


class Installed(Protocol):
    """What is needed of an entry point; a test kit has its own kind."""

    @property
    def name(self) -> str:
        """Of the plugin."""

    @property
    def dist(self) -> Any:
        """The distribution, with its name and version; None if it is not known."""

    def load(self) -> Any:
        """Import the plugin."""


class PluginInfo(Struct, frozen=True, kw_only=True):
    """A row of `jackfield plugins`: what is installed and what became of it."""

    name: str
    distribution: str
    version: str
    state: State
    reason: str = ""


class LoadedEndpoint(Struct, frozen=True, kw_only=True):
    """An endpoint that passed its checks, with its settings."""

    endpoint: Endpoint[Any, Any]
    settings: EndpointSettings
    plugin: str


class Plugins:
    """What is loaded. `manager` holds every plugin under its entry point's name, for the app hooks."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(APP_PROJECT)
        self.manager.add_hookspecs(AppHooks)
        self.endpoints: dict[str, LoadedEndpoint] = {}
        self.infos: list[PluginInfo] = []

    def cross_cutting(self) -> list[tuple[str, Any]]:
        """All loaded plugins by name, sorted: those with stage hooks wrap every endpoint."""
        return sorted(self.manager.list_name_plugin())

    def first(self, hook: str, **kwargs: Any) -> Any:
        """The first answer to an app hook that is not None, plugins in the order of their names.

        Raises: PluginError naming the plugin whose implementation raised: nothing falls back in silence.
        """
        for impl in sorted(getattr(self.manager.hook, hook).get_hookimpls(), key=lambda impl: impl.plugin_name):
            answer = call_hook(impl, kwargs)
            if answer is not None:
                return answer
        return None

    def call_one(self, name: str, hook: str, **kwargs: Any) -> Any:
        """Call one plugin's own implementation of an app hook, if it has one."""
        plugin = self.manager.get_plugin(name)
        others = [other for _, other in self.manager.list_name_plugin() if other is not plugin]
        return self.manager.subset_hook_caller(hook, remove_plugins=others)(**kwargs)


def call_hook(impl: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """Call one implementation of an app hook with those of the arguments that it takes. Raises: PluginError in place of what it raises."""
    try:
        return impl.function(*(arguments[name] for name in impl.argnames))
    except StartupError:
        raise
    except Exception as error:  # a plugin may raise anything; at start-up its name is what the operator needs
        raise PluginError(f"plugin {impl.plugin_name!r}: its {impl.function.__name__} raised {type(error).__name__}: {error}") from error


def collect_poolers(plugins: Plugins) -> dict[str, tuple[str, PoolerEntry]]:
    """The operations that plugins add, each with the name of the plugin that does. Raises: PluginError."""
    found: dict[str, tuple[str, PoolerEntry]] = {}
    for impl in sorted(plugins.manager.hook.jackfield_poolers.get_hookimpls(), key=lambda impl: impl.plugin_name):
        registry = PoolerRegistry()
        call_hook(impl, {"registry": registry})
        for entry in registry.entries:
            owner = found.setdefault(entry.operation, (impl.plugin_name, entry))[0]
            if owner != impl.plugin_name:
                raise PluginError(f"plugins {owner!r} and {impl.plugin_name!r} both add the operation {entry.operation!r}")
    return found


def fitting_poolers(poolers: Mapping[str, tuple[str, PoolerEntry]], card: ModelCard, config: Mapping[str, Any]) -> dict[str, str]:
    """Of those that fit a model, the place of their code by operation. Raises: PluginError naming the plugin whose `fits` raised."""
    fitting: dict[str, str] = {}
    for operation, (plugin, entry) in poolers.items():
        try:
            fits = entry.fits(card, config)
        except Exception as error:
            raise PluginError(
                f"plugin {plugin!r}: `fits` of its operation {operation!r} raised {type(error).__name__} for model {card.id!r}: {error}"
            ) from error
        if fits:
            fitting[operation] = entry.factory
    return fitting


def installed_plugins() -> list[EntryPoint]:
    """Entry points of the group, sorted by name, then distribution: the order of the path must not matter."""
    return sorted(entry_points(group=GROUP), key=lambda point: (point.name, _distribution(point)[0]))


def plugin_tables(settings: Settings) -> dict[str, dict[str, Any]]:
    """[plugins], with an empty table for each installed plugin whose name a model gives as its engine: that enables it as well."""
    engines = {model.engine for model in settings.models.values()} - {"", TORCH}
    named = {point.name for point in installed_plugins() if point.name in engines} if engines else set()
    return {**{name: {} for name in sorted(named - set(settings.endpoints))}, **settings.plugins}


def load_plugins(
    endpoints: Mapping[str, Mapping[str, Any]],
    plugins: Mapping[str, Mapping[str, Any]],
    *,
    on_error: Literal["stop", "skip"] = "stop",
    installed: Iterable[Installed] | None = None,
    all_endpoints: bool = False,
    where: Where = "the configuration",
) -> Plugins:
    """Import and check what the configuration names.

    endpoints, plugins: tables by name. on_error: "skip" lists a failed plugin and goes on without it. all_endpoints: enable every installed
    endpoint that the tables do not name. where: what the tables come from.

    Raises: ConfigError for a name that is not installed; PluginError, naming the plugin, for one that fails.
    """
    loaded = Plugins()
    found: Iterable[Installed] = installed if installed is not None else installed_plugins()
    by_name: dict[str, list[Installed]] = {}
    for point in found:
        by_name.setdefault(point.name, []).append(point)
    _check_names(endpoints, plugins, by_name)
    for name, points in by_name.items():
        distribution, version = _distribution(points[0])
        wanted = name in endpoints or name in plugins
        state: State = "not configured"
        reason = ""
        if wanted or all_endpoints:
            state = "loaded"
            try:
                kept = _load(loaded, name, points, endpoints.get(name), plugins.get(name), where)
                if not wanted and not kept:
                    _forget(loaded, name)
                    state = "not configured"
            except (Exception, SystemExit) as error:  # a plugin's import may do anything; the culprit is named, the others go on
                if wanted and isinstance(error, ConfigError):
                    raise  # the operator's own mistake, which no plugin_errors = "skip" may hide
                _forget(loaded, name)
                reason = _reason(error)
                if on_error == "stop" and wanted:
                    raise PluginError(f"plugin {name!r} ({distribution} {version}): {reason}") from error
                log.warning("plugin %s (%s %s) is skipped: %s", name, distribution, version, reason)
                state = "failed"
        loaded.infos.append(PluginInfo(name=name, distribution=distribution, version=version, state=state, reason=reason))
    return loaded


def _check_names(endpoints: Mapping[str, Any], plugins: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for table, names in (("endpoints", endpoints), ("plugins", plugins)):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"[{table}.{name}] names a plugin that is not installed (pip install jackfield-{name}?).{nearest(name, known)}"
                )
    both = sorted(set(endpoints) & set(plugins))
    if both:
        raise ConfigError(f"{both[0]!r} stands under [endpoints] and under [plugins]; an endpoint belongs to [endpoints] alone.")


def _distribution(point: Installed) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("unknown", "0")


def _reason(error: BaseException) -> str:
    if isinstance(error, PluginError | ConfigError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) when imported"
    return f"{type(error).__name__}: {error}"


def _load(
    loaded: Plugins,
    name: str,
    points: list[Installed],
    endpoint_table: Mapping[str, Any] | None,
    plugin_table: Mapping[str, Any] | None,
    where: Where,
) -> bool:
    """Load one plugin; True if it brought an endpoint."""
    if len(points) > 1:
        names = " and ".join(_distribution(point)[0] for point in points)
        raise PluginError(f"{names} both declare the entry point {name!r}; uninstall one")
    _check_requirement(points[0])
    target = points[0].load()
    _check_api(target)
    _check_api(sys.modules.get(getattr(target, "__module__", ""), target))
    try:
        plugin = _instantiate(name, target, plugin_table or {}, inside(where, ["plugins", name]))
    except ConfigError as error:
        raise error if endpoint_table is None else _misplaced(name) from error
    try:
        register(loaded.manager, plugin, name)
    except pluggy.PluginValidationError as error:
        raise PluginError(_hook_reason(error)) from error
    _check_not_async(loaded, plugin)
    registry = EndpointRegistry()
    loaded.call_one(name, "jackfield_register_endpoints", registry=registry)
    if plugin_table is not None and registry.endpoints:
        raise PluginError(f"[plugins.{name}] names it, but it registers an endpoint; its table is [endpoints.{name}]")
    return _register(loaded, name, registry, endpoint_table, inside(where, ["endpoints", name]))


def register(manager: pluggy.PluginManager, plugin: Any, name: str) -> None:
    """Register a plugin under a name; what it implements and is to go (`warn_on_impl`, `warn_on_impl_args`) is told in the log.

    Raises: pluggy.PluginValidationError.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        manager.register(plugin, name=name)
        manager.check_pending()
    for warning in caught:
        log.warning("%s: %s (%s:%d)", name, warning.message, Path(warning.filename).name, warning.lineno)


def _check_not_async(loaded: Plugins, plugin: Any) -> None:
    for caller in loaded.manager.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin and inspect.iscoroutinefunction(impl.function):
                raise PluginError(f"its {impl.function.__name__} is async; app hooks run once, at start-up, and are plain def")


def _hook_reason(error: pluggy.PluginValidationError) -> str:
    text = str(error).replace("\n", " ")
    unknown = re.search(r"unknown hook '(\w+)'", text)
    known = [hook for hook in vars(AppHooks) if hook.startswith("jackfield_")]
    return f"{text}.{nearest(unknown[1], known)}" if unknown else text


def _check_requirement(point: Installed) -> None:
    """Whether the plugin's distribution admits this release, told before anything of it is imported. Raises: PluginError."""
    ours = version("jackfield")
    for line in getattr(point.dist, "requires", None) or ():
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == "jackfield" and not requirement.specifier.contains(ours, prereleases=True):
            raise PluginError(f"it requires jackfield{requirement.specifier}, and this is {ours}; take a version of it made for that")


def _check_api(target: Any) -> None:
    api = getattr(target, "PLUGIN_API", 1)
    if api != PLUGIN_API:
        raise PluginError(f"it is written for PLUGIN_API {api}, and this jackfield has {PLUGIN_API}; take a version of it made for that")


def _instantiate(name: str, target: Any, table: Mapping[str, Any], where: Where) -> Any:
    """A class is made an object, with its settings if it declares a struct of them; a module is taken as it is."""
    if not inspect.isclass(target):
        if table:
            raise ConfigError(f"[plugins.{name}] has keys, but the plugin declares no settings.")
        return target
    make: Callable[..., Any] = target
    kind: type[msgspec.Struct] | None = getattr(target, "settings", None)
    if kind is None:
        if table:
            raise ConfigError(f"[plugins.{name}] has keys, but the plugin declares no settings.")
        return make()
    return make(convert(table, kind, where=where, prefix=f"plugins.{name}"))


def _register(loaded: Plugins, name: str, registry: EndpointRegistry, table: Mapping[str, Any] | None, where: Where) -> bool:
    for endpoint in registry.endpoints:
        if not endpoint.name:
            raise PluginError(f"its endpoint {type(endpoint).__name__} has no name")
        if endpoint.name != name:
            raise PluginError(f"its entry point is named {name!r}, but it registers the endpoint {endpoint.name!r}; the two must be equal")
        if name in loaded.endpoints:
            raise PluginError(f"it registers the endpoint {name!r} twice")
        settings = convert(table or {}, endpoint.settings, where=where, prefix=f"endpoints.{name}")
        loaded.endpoints[name] = LoadedEndpoint(endpoint=endpoint, settings=settings, plugin=name)
    if table is not None and name not in loaded.endpoints:
        raise _misplaced(name)
    return bool(registry.endpoints)


def _misplaced(name: str) -> PluginError:
    return PluginError(f"[endpoints.{name}] names it, but it registers no endpoint; a plugin of another kind belongs to [plugins.{name}]")


def _forget(loaded: Plugins, name: str) -> None:
    """Nothing of a failed plugin stays registered."""
    loaded.endpoints.pop(name, None)
    if loaded.manager.has_plugin(name):
        loaded.manager.unregister(name=name)
