"""The hooks, in two kinds with a pluggy project name each, so that nobody wonders how often a hook runs.

App hooks (`jackfield_*`, marked with `jackfield.hookimpl`) are called once, at start-up. Stage hooks (no prefix, marked with
`jackfield.stageimpl`) run for each request of each endpoint; plugins other than the endpoint itself wrap them (`wrapper=True`), except for
`request_finished`, which anyone may observe. A stage-named method of an Endpoint needs no marker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pluggy

from jackfield.client import EngineClient, EngineRequest, ModelSpec
from jackfield.context import Context
from jackfield.endpoint import Endpoint, EndpointRegistry
from jackfield.outputs import Delta, PoolingOutputs
from jackfield.params import PoolingParams, SamplingParams
from jackfield.parsers import ReasoningParserRegistry, ToolParserRegistry
from jackfield.poolers import PoolerRegistry
from jackfield.prompts import Prompt
from jackfield.settings import EngineSettings

__all__ = [
    "APP_PROJECT",
    "PLUGIN_API",
    "STAGE_PROJECT",
    "AppHooks",
    "StageHooks",
    "Stream",
    "Submit",
    "hookimpl",
    "stageimpl",
]

# A plugin module may carry PLUGIN_API = <the integer it was written for>; none means 1.
PLUGIN_API = 1

APP_PROJECT = "jackfield"
STAGE_PROJECT = "jackfield_stage"

hookspec = pluggy.HookspecMarker(APP_PROJECT)
hookimpl = pluggy.HookimplMarker(APP_PROJECT)
stagespec = pluggy.HookspecMarker(STAGE_PROJECT)
stageimpl = pluggy.HookimplMarker(STAGE_PROJECT)

Submit = Callable[[Context[Any], EngineRequest], Awaitable[PoolingOutputs]]
Stream = Callable[[Context[Any], EngineRequest], AsyncIterator[Delta]]


class AppHooks:
    """Called once, at start-up."""

    @hookspec
    def jackfield_register_endpoints(self, registry: EndpointRegistry) -> None:
        """Add the plugin's Endpoint objects to `registry`; the entry point's name must be the endpoint's."""

    @hookspec
    def jackfield_wrap_submit(self, endpoint: Endpoint[Any, Any], submit: Submit) -> Submit | None:
        """Return an async callable around the engine call of `endpoint`, or None to leave it.

        The place for awaits: a cache, a quota service, a retry. Runs after tokenization and admission. Plugins are folded in the order of
        their names, the first outermost.
        """

    @hookspec
    def jackfield_wrap_stream(self, endpoint: Endpoint[Any, Any], stream: Stream) -> Stream | None:
        """The same for the operation `generate`, whether the answer is a stream or not: an async callable that yields deltas."""

    @hookspec
    def jackfield_poolers(self, registry: PoolerRegistry) -> None:
        """Add operations that the torch engine computes for this plugin's endpoints.

        `registry.add("name", "package.module:factory", fits=...)`; see `jackfield.PoolerRegistry`.
        """

    @hookspec
    def jackfield_tool_parsers(self, registry: ToolParserRegistry) -> None:
        """Add families of models by how they write calls of tools.

        `registry.add("name", make, fits=...)`; see `jackfield.ToolParserRegistry` and `jackfield.ToolParser`.
        """

    @hookspec
    def jackfield_reasoning_parsers(self, registry: ReasoningParserRegistry) -> None:
        """Add families of models by how they mark their reasoning.

        `registry.add("name", make, fits=...)`; see `jackfield.ReasoningParserRegistry` and `jackfield.ReasoningParser`.
        """

    @hookspec(firstresult=True)
    def jackfield_model_source(self, uri: str) -> str | None:
        """Resolve a model's `source` to a local folder or file, or None. Hub ids, paths and `package:` are built in, and come last."""

    @hookspec(firstresult=True)
    def jackfield_engine(self, spec: ModelSpec, settings: EngineSettings, log_level: str) -> EngineClient | None:
        """Supply an engine that serves this one model, or None; the torch engine is built in, and comes last.

        `spec.engine` is the name that the operator asks for; with "torch" nobody is asked. settings: of [engine]. log_level: of the server.
        """


class StageHooks:
    """Called for each request, in this order. All but the last give their first (and only) result."""

    @stagespec(firstresult=True)
    def preprocess(self, ctx: Context[Any]) -> Sequence[Prompt]:
        """The request's prompts."""
        raise NotImplementedError

    @stagespec(firstresult=True)
    def pooling_params(self, ctx: Context[Any]) -> PoolingParams:
        """What to compute from the prompts."""
        raise NotImplementedError

    @stagespec(firstresult=True)
    def sampling_params(self, ctx: Context[Any]) -> SamplingParams:
        """How to generate after the prompts."""
        raise NotImplementedError

    @stagespec(firstresult=True)
    def build_response(self, ctx: Context[Any]) -> Any:
        """The answer's body."""

    @stagespec(firstresult=True)
    def build_chunk(self, ctx: Context[Any], delta: Delta) -> Any:
        """The event of a stream for this delta, or several."""

    @stagespec
    def request_finished(self, ctx: Context[Any], error: BaseException | None) -> None:
        """The request is over; `error` is what ended it, or None. Observers are called one by one, so that none stops another."""
