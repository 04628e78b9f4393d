"""Freezing: from an endpoint and the plugins around it to callables that are bound once, each mistake found here and named.

One child PluginManager an endpoint holds the endpoint itself, innermost, and every plugin with stage hooks around it. So a stage call goes
through the owner and its wrappers only, whatever number of endpoints and plugins there is.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Union, get_args, get_origin

import pluggy

from jackfield.context import Context
from jackfield.endpoint import STAGES, Endpoint, Route
from jackfield.errors import PluginError
from jackfield.hookspecs import STAGE_PROJECT, StageHooks, Stream, Submit
from jackfield.outputs import Delta
from jackfield.params import OPERATIONS, PoolingParams, SamplingParams
from jackfield.plugins import call_hook, register
from jackfield.prompts import Prompt

__all__ = ["NO_ERRORS", "Stages", "WrongResult", "check_endpoint", "fold_stream", "fold_submit"]

log = logging.getLogger("jackfield.stages")

# What Python or the event loop take for something else than an error of a plugin's: the end of the process, of a task, of a generator.
NO_ERRORS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
_PATH = re.compile(r"/|(/([^/{}?#\s]+|\{\w+:(str|int|float|uuid|path)\}))+")


class WrongResult(TypeError):
    """A stage gave what its declaration does not allow. plugins: who may have given it: the endpoint, and whoever wraps the stage."""

    def __init__(self, message: str, plugins: tuple[str, ...]) -> None:
        super().__init__(message)
        self.plugins = plugins


class _StageManager(pluggy.PluginManager):
    """Takes an Endpoint's overridden stage methods as implementations, marker or not."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if isinstance(plugin, Endpoint):
            if name not in STAGES or getattr(type(plugin), name) is getattr(Endpoint, name):
                return None
            return super().parse_hookimpl_opts(plugin, name) or dict.fromkeys(("wrapper", "hookwrapper", "optionalhook"), False) | {
                "tryfirst": False,
                "trylast": False,
                "specname": None,
            }
        return super().parse_hookimpl_opts(plugin, name)


class Stages:
    """The bound stages of one endpoint. After the wrappers, each result is checked against its declared type."""

    def __init__(self, endpoint: Endpoint[Any, Any], plugins: Iterable[tuple[str, Any]]) -> None:
        """plugins: name and object of every loaded plugin; the first by name is outermost. Raises: PluginError."""
        self.endpoint = endpoint
        manager = _StageManager(STAGE_PROJECT)
        manager.add_hookspecs(StageHooks)
        _register(manager, endpoint, f"endpoint {endpoint.name!r}")
        self._names: dict[str, str] = {}
        for name, plugin in sorted(plugins, key=lambda item: item[0], reverse=True):
            if plugin is not endpoint:
                self._names[f"plugin {name!r}"] = name
                _register(manager, plugin, f"plugin {name!r}")
        _check_implementations(manager, endpoint)
        self._observers = manager.hook.request_finished.get_hookimpls()
        self._hook = hook = manager.hook
        self._preprocess = _bind(hook.preprocess) if hook.preprocess.get_hookimpls() else None
        self._pooling_params = _bind(hook.pooling_params)
        self._sampling_params = _bind(hook.sampling_params)
        self._build_response = _bind(hook.build_response)
        self._build_chunk = _bind(hook.build_chunk)

    def preprocess(self, ctx: Context[Any]) -> Sequence[Prompt]:
        """The request's prompts; none if the endpoint has no such stage."""
        if self._preprocess is None:
            return ()
        prompts = _call(self._preprocess, ctx=ctx)
        if not isinstance(prompts, (list, tuple)):
            raise self._wrong("preprocess", prompts, "a list of prompts")
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise self._wrong("preprocess", prompt, "TextPrompt, TokensPrompt or ChatPrompt objects")
        return prompts

    def params(self, ctx: Context[Any]) -> PoolingParams | SamplingParams:
        """What the engine is asked to do: sampling for the operation `generate`, pooling for every other."""
        name = self.params_stage(ctx)
        stage, kind = (self._sampling_params, SamplingParams) if name == "sampling_params" else (self._pooling_params, PoolingParams)
        params: PoolingParams | SamplingParams = _call(stage, ctx=ctx)
        if not isinstance(params, kind):
            raise self._wrong(name, params, f"a {kind.__name__}")
        return params

    def params_stage(self, ctx: Context[Any]) -> str:
        """The name of the stage that `params` runs for this request."""
        return "sampling_params" if ctx.operation == "generate" else "pooling_params"

    def build_response(self, ctx: Context[Any]) -> Any:
        """The answer's body."""
        response = _call(self._build_response, ctx=ctx)
        kinds = _kinds(ctx.route.response)
        if kinds and not isinstance(response, kinds):
            raise self._wrong("build_response", response, _names(kinds))
        return response

    def build_chunk(self, ctx: Context[Any], delta: Delta) -> Sequence[Any]:
        """Events of a stream."""
        given = _call(self._build_chunk, ctx=ctx, delta=delta)
        chunks: Sequence[Any] = () if given is None else given if isinstance(given, list) else (given,)
        kinds = _kinds(ctx.route.chunk)
        for chunk in chunks:
            if kinds and not isinstance(chunk, kinds):
                raise self._wrong("build_chunk", chunk, f"{_names(kinds)}, or a list of such,")
        return chunks

    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> list[BaseException]:
        """Tell the observers, one by one: what one raises is logged with its plugin's name, stops no other, and is given back."""
        raised: list[BaseException] = []
        for impl in self._observers:
            arguments = {"ctx": ctx, "error": error}
            try:
                impl.function(*(arguments[name] for name in impl.argnames))
            except (Exception, *NO_ERRORS) as fault:
                log.exception("request_finished of %s raised", impl.plugin_name)
                raised.append(fault)
        return raised

    def _wrong(self, stage: str, result: Any, expected: str) -> WrongResult:
        wrappers = tuple(self._names[impl.plugin_name] for impl in getattr(self._hook, stage).get_hookimpls() if impl.wrapper)
        around = f" (wrapped by {', '.join(map(repr, wrappers))})" if wrappers else ""
        text = f"{stage} of endpoint {self.endpoint.name!r}{around} gave {type(result).__name__}; {expected} is expected"
        return WrongResult(text, (self.endpoint.name, *wrappers))


def _bind(hook: pluggy.HookCaller) -> Callable[..., Any]:
    """The hook, or the owner's own function where nobody wraps it: 2 us less a stage, and two frames less in a traceback."""
    impls = hook.get_hookimpls()
    if len(impls) == 1 and hook.spec is not None and set(impls[0].argnames) == set(hook.spec.argnames):
        return impls[0].function
    return hook


def _call(stage: Callable[..., Any], **arguments: Any) -> Any:
    """Call a stage; what Python or asyncio would take for something else becomes an ordinary error."""
    try:
        return stage(**arguments)
    except (StopIteration, *NO_ERRORS) as error:
        raise RuntimeError(f"a stage raised {type(error).__name__}") from error


@lru_cache
def _kinds(declared: Any) -> tuple[type, ...]:
    """What isinstance can check of a declared type; empty for nothing."""
    if declared is Any:
        return ()
    if get_origin(declared) in (Union, types.UnionType):
        return tuple(kind for arm in get_args(declared) for kind in _kinds(arm))
    kind = get_origin(declared) or declared
    return (kind,) if isinstance(kind, type) else ()


def _names(kinds: tuple[type, ...]) -> str:
    return "a " + " or ".join(kind.__name__ for kind in kinds)


def fold_submit(endpoint: Endpoint[Any, Any], submit: Submit, plugins: pluggy.PluginManager) -> Submit:
    """Wrap the engine call of an endpoint by every plugin that wants to."""
    wrapped: Submit = _fold("jackfield_wrap_submit", "submit", endpoint, submit, plugins)
    return wrapped


def fold_stream(endpoint: Endpoint[Any, Any], stream: Stream, plugins: pluggy.PluginManager) -> Stream:
    """The same for streams."""
    wrapped: Stream = _fold("jackfield_wrap_stream", "stream", endpoint, stream, plugins)
    return wrapped


def _fold(hook: str, argument: str, endpoint: Endpoint[Any, Any], inner: Any, plugins: pluggy.PluginManager) -> Any:
    impls = getattr(plugins.hook, hook).get_hookimpls()
    for impl in sorted(impls, key=lambda impl: impl.plugin_name, reverse=True):
        arguments = {"endpoint": endpoint, argument: inner}
        wrapped = call_hook(impl, arguments)
        if wrapped is None:
            continue
        if not callable(wrapped):
            raise PluginError(
                f"plugin {impl.plugin_name!r}: {hook} returned {type(wrapped).__name__}; an async callable or None is expected"
            )
        inner = wrapped
    return inner


def check_endpoint(endpoint: Endpoint[Any, Any], poolers: Iterable[str] = ()) -> None:
    """What can be told from an endpoint's class alone. poolers: operations that plugins add. Raises: PluginError."""
    who = f"endpoint {endpoint.name!r}"
    if not endpoint.routes:
        raise PluginError(f"{who} has no routes")
    known = (*OPERATIONS, *poolers)
    unknown = sorted(set(_operations(endpoint)) - set(known))
    if unknown:
        raise PluginError(f"{who} names the operation {unknown[0]!r}, which no engine has; known: {', '.join(known)}")
    for route in endpoint.routes:
        _check_route(who, endpoint, route)
    for stage in STAGES:
        method = getattr(type(endpoint), stage)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise PluginError(f"{who}: its stage {stage} is async; stages are plain def (awaits belong into jackfield_wrap_submit)")
    _check_near_misses(who, endpoint)


def _operations(endpoint: Endpoint[Any, Any]) -> list[str]:
    return [*endpoint.operations, *(name for route in endpoint.routes for name in route.operations or ())]


def _check_route(who: str, endpoint: Endpoint[Any, Any], route: Route) -> None:
    for path in route.paths or ("",):
        names = re.findall(r"\{(\w+)", path)
        if not _PATH.fullmatch(path) or len(set(names)) < len(names):
            raise PluginError(
                f"{who}: the path {path!r} must begin with a slash, not end with one, hold neither ? nor #, and type its parameters "
                "({name:str}), each once"
            )
    if not (route.id_prefix or endpoint.id_prefix):
        raise PluginError(f"{who}: {route.paths[0]} has no id_prefix, which its answers' ids begin with")
    arms = get_args(route.request) or (route.request,)
    if route.streams and not all("stream" in getattr(arm, "__struct_fields__", ()) for arm in arms):
        raise PluginError(f"{who}: {route.paths[0]} streams, but its request type has no field `stream`")


def _check_near_misses(who: str, endpoint: Endpoint[Any, Any]) -> None:
    """A misspelt stage would silently never run."""
    own = [name for kind in type(endpoint).__mro__ if kind not in (Endpoint, object) for name in vars(kind)]
    flat = {stage.replace("_", ""): stage for stage in STAGES}
    for name in own:
        if name in STAGES or name.startswith("_") or not callable(getattr(type(endpoint), name, None)):
            continue
        close = difflib.get_close_matches(name.replace("_", "").lower(), flat, n=1, cutoff=0.85)
        if close:
            raise PluginError(
                f"{who}: its method {name} is no stage; was {flat[close[0]]!r} meant? (begin its name with _ if it is a helper)"
            )


def _register(manager: pluggy.PluginManager, plugin: Any, who: str) -> None:
    try:
        register(manager, plugin, who)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{who}: {str(error).replace(chr(10), ' ')}") from error


def _check_implementations(manager: pluggy.PluginManager, endpoint: Endpoint[Any, Any]) -> None:
    who = f"endpoint {endpoint.name!r}"
    needed = _needed(endpoint)
    for stage in STAGES:
        impls = getattr(manager.hook, stage).get_hookimpls()
        for impl in impls:
            if inspect.iscoroutinefunction(impl.function) or inspect.isasyncgenfunction(impl.function):
                raise PluginError(f"{impl.plugin_name}: its stage {stage} is async; stages are plain def")
            _check_role(impl, stage, who, owner=impl.plugin is endpoint)
        if stage in needed and not any(impl.plugin is endpoint for impl in impls):
            raise PluginError(f"{who} lacks the stage {stage}, which its operations or routes need")


def _needed(endpoint: Endpoint[Any, Any]) -> set[str]:
    """Stages that the endpoint's operations and routes call for."""
    operations = set(_operations(endpoint))
    needed = {"build_response"}
    if operations:
        needed.add("preprocess")
    if operations - {"generate"}:
        needed.add("pooling_params")
    if "generate" in operations:
        needed.add("sampling_params")
    if any(route.streams for route in endpoint.routes):
        needed.add("build_chunk")
    return needed


def _check_role(impl: pluggy.HookImpl, stage: str, who: str, *, owner: bool) -> None:
    """Owners implement, others wrap; whoever observes does only that."""
    if stage == "request_finished":
        if impl.wrapper or impl.hookwrapper:
            raise PluginError(f"{impl.plugin_name}: its request_finished is a wrapper; it is an event, which is only observed")
    elif not owner and not impl.wrapper:
        raise PluginError(
            f"{impl.plugin_name}: it implements {stage} for {who}, which is not its own; other plugins wrap a stage (wrapper=True), "
            "they never replace it"
        )
