"""The root: puts plugins, models, engines, pipeline and HTTP together. One of the few modules that name both http and engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from jackfield.admission import Admission
from jackfield.binding import bind_models, check_aliases, check_models, endpoint_models, needs_engine, serves_model
from jackfield.blame import CORE, Blame
from jackfield.client import EngineClient, EngineHealth, ModelCard, ModelSpec, Progress
from jackfield.config import Where
from jackfield.context import Model
from jackfield.encoding import BodyDecoder
from jackfield.engine import local_engine
from jackfield.engine.conversion import converted
from jackfield.engine.cpu import usable_cpus
from jackfield.engine.files import read_model_files
from jackfield.errors import BadRequest, ConfigError, JackfieldError, ModelError, PluginError
from jackfield.http.app import HttpParts, build_http, check_routes
from jackfield.http.metrics import Metrics
from jackfield.http.shell import Shell
from jackfield.http.system import ModelEntry
from jackfield.logs import FloodGate, own_source
from jackfield.parsing import check_parsers, choose_reasoning_parser, choose_tool_parser, collect_parsers
from jackfield.pipeline import BoundModel, BoundRoute, Pipeline, engine_stream, engine_submit
from jackfield.plugins import TORCH, LoadedEndpoint, Plugins, collect_poolers, fitting_poolers, load_plugins, plugin_tables
from jackfield.prompts import ChatPrompt
from jackfield.rendering import template_traits
from jackfield.settings import Settings
from jackfield.sources import resolve_source
from jackfield.stages import Stages, check_endpoint, fold_stream, fold_submit
from jackfield.tokenization import ModelTokenizer, TokenizerPool
from jackfield.watchdog import Watchdog

__all__ = ["App"]

log = logging.getLogger("jackfield")


class App:
    """A server that is configured and not yet started.

    `asgi` is the application; its lifespan starts and stops the engines. Everything that can be wrong with the configuration or a plugin
    is found by the constructor.

    Raises: StartupError.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        where: Where = "the configuration",
        plugins: Plugins | None = None,
        all_endpoints: bool = False,
        background: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """where: what the settings come from. plugins: loaded already (by a test kit), instead of what is installed. all_endpoints: enable
        each installed endpoint that fits. background: the lifespan does not wait for the models; requests get 503 until they are loaded.
        progress: is told how far the constructor is with what takes long (a GGUF file that is converted); the log, by default."""
        self.settings = settings
        self.started = time.time()
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_ready: Callable[[], None] = lambda: None
        # What engines have to end by themselves, whatever they wait for; None: what they take.
        self.stop_timeout_s: float | None = None
        self._background = background
        self._progress = progress or _log_progress
        self.plugins = plugins or load_plugins(
            settings.endpoints, plugin_tables(settings), on_error=settings.server.plugin_errors, all_endpoints=all_endpoints, where=where
        )
        if not self.plugins.endpoints:
            raise ConfigError(
                "No endpoint is enabled: add a table such as [endpoints.embed], or install a plugin (pip install jackfield-embed)."
            )
        root_path = settings.server.root_path
        if root_path and not root_path.startswith("/"):
            raise ConfigError(f'[server] root_path = {root_path!r} must begin with a slash, such as "/llm"')
        if not settings.models:
            raise ConfigError('No model is configured: add a table such as [models.NAME] with source = "...".')
        check_aliases(settings.models)
        self._poolers = collect_poolers(self.plugins)
        self._parsers = collect_parsers(self.plugins)
        check_parsers(settings.models, self._parsers)
        self.specs = {model: self._spec(model) for model in settings.models}
        self.engines: dict[str, EngineClient] = {}
        self._engine_of: dict[str, EngineClient] = {}
        self.cards: dict[str, ModelCard] = {}
        self._choose_engines()
        self.models: dict[str, BoundModel] = {}
        self.metrics = Metrics()
        server = settings.server
        self.admission = Admission(
            max_requests=server.max_queue_requests, max_bytes=server.max_queue_bytes, max_tokens=server.max_queue_tokens
        )
        self.metrics.watch(self.admission, self.engines.items)
        self._blame = Blame([*self.plugins.manager.list_name_plugin(), *((name, e.endpoint) for name, e in self.plugins.endpoints.items())])
        self._watchdog = Watchdog(server.block_warning_ms / 1000, self.metrics.blocked)
        self._routes: list[tuple[BoundRoute, LoadedEndpoint]] = self._bind_routes()
        for loaded in self.plugins.endpoints.values():
            check_models(loaded, self.cards, settings.models)

    @property
    def asgi(self) -> Shell:
        """The ASGI application, made at the first use."""
        if not hasattr(self, "_asgi"):
            self._asgi = self._build_http()
        return self._asgi

    def state(self) -> str:
        """Why requests are not served, or an empty text."""
        if self.asgi.draining:
            return "shutting down"
        if self._pipeline.not_ready:
            return self._pipeline.not_ready
        return next((f"engine {name} is {h.state}" for name, h in self._healths().items() if h.state != "ready"), "")

    def model_entries(self) -> list[ModelEntry]:
        """What /v1/models shows."""
        entries: list[ModelEntry] = []
        for model, spec in self.specs.items():
            card = self.cards.get(model)
            if card is None:
                continue
            served = sorted(
                {route.endpoint.name for route, loaded in self._routes if serves_model(route.route, loaded, model, card, self.specs)}
            )
            entries.append(
                ModelEntry(
                    id=model,
                    created=int(self.started),
                    root=spec.source,
                    max_model_len=card.max_length,
                    aliases=list(spec.aliases),
                    endpoints=served,
                    operations=list(card.operations),
                    embedding_size=card.embedding_size,
                    execution=card.execution,
                    dtype=card.dtype,
                    quantization=spec.quantization or None,
                    device=card.device,
                )
            )
        return entries

    async def start(self) -> None:
        """Load tokenizers and engines side by side, then bind. Raises: StartupError."""
        server = self.settings.server
        self._pool = TokenizerPool(server.tokenizer_threads or max(1, min(4, usable_cpus() // 2)))
        self._pipeline.tokenizers = self._pool
        starting = [_start_engine(name, client, self.on_progress) for name, client in self.engines.items()]
        tokenizers = asyncio.create_task(asyncio.to_thread(self._load_tokenizers, dict(self.cards)))
        loaded = await asyncio.gather(*starting)
        for cards in loaded:
            self.cards.update(cards)
        made = await tokenizers
        late = {model: card for model, card in self.cards.items() if model not in made}
        if late:
            made |= await asyncio.to_thread(self._load_tokenizers, late)
        for model, card in self.cards.items():
            tokenizer = made[model]
            tokenizer.card = card
            for note in card.notes:
                log.info("model %s: %s", model, note)
            self.models[model] = BoundModel(
                model=self._model(model, card, tokenizer),
                tokenizer=tokenizer,
                engine=self._engine_of.get(model),
            )
        for route, endpoint in self._routes:
            check_models(endpoint, self.cards, self.settings.models)
            bind_models(route, endpoint, self.models, self.settings.models)
        self._watchdog.start()
        self._pipeline.not_ready = ""
        self.on_ready()

    def _model(self, model: str, card: ModelCard, tokenizer: ModelTokenizer) -> Model:
        settings, dialect = self.settings.models[model], tokenizer.dialect()
        traits = template_traits(dialect.template)
        return Model(
            id=model,
            card=card,
            aliases=self.specs[model].aliases,
            tokenizer_info=tokenizer.info,
            has_chat_template=tokenizer.has_chat_template,
            template_knows_tools=traits.knows_tools,
            template_knows_calls=traits.knows_calls,
            template_takes_system=_takes_system(tokenizer),
            tool_parser=choose_tool_parser(self._parsers, model, settings.tool_parser, dialect),
            reasoning_parser=choose_reasoning_parser(self._parsers, model, settings.reasoning_parser, dialect),
            tokens_apart=tokenizer.tokens_apart,
        )

    async def stop(self) -> None:
        """End the engines, the tokenizer threads and the process that tries grammars."""
        self._pipeline.not_ready = "it is shutting down"
        self._watchdog.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.stop_timeout_s):
                await asyncio.gather(*(client.stop() for client in self.engines.values()))
        self._pool.close()
        await self._pipeline.grammars.close()

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        task: asyncio.Task[None] | None = None
        if self._background:
            task = asyncio.create_task(self._start_in_background())
        else:
            try:
                await self.start()
            except Exception as error:
                self.failure = error
                raise
        try:
            yield
        finally:
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await self.stop()

    async def _start_in_background(self) -> None:
        try:
            await self.start()
        except Exception as error:  # a bug as well: a server that says "loading" for ever would be worse than one that ends
            self.failure = error
            self.on_failure()

    def _spec(self, model: str) -> ModelSpec:
        settings = self.settings.models[model]
        path = self.plugins.first("jackfield_model_source", uri=settings.source)
        if path is None:
            path = resolve_source(model, settings.source, revision=settings.revision, offline=self.settings.server.offline)
        if Path(path).is_file():
            path = converted(model, path, dtype=settings.dtype, device=settings.device, progress=self._progress)
        sizes = settings.matryoshka
        return ModelSpec(
            id=model,
            path=path,
            source=settings.source,
            aliases=tuple(settings.aliases),
            dtype=settings.dtype,
            quantization=settings.quantization,
            device=settings.device,
            engine=settings.engine,
            max_length=settings.max_length or None,
            pooling=settings.pooling or None,
            matryoshka=tuple(sizes) if isinstance(sizes, list) else sizes,
            options=settings.options,
        )

    def _choose_engines(self) -> None:
        """A plugin's engine where one offers itself, else the torch engine; none for a model that no endpoint computes with."""
        computing = {
            model
            for loaded in self.plugins.endpoints.values()
            if needs_engine(loaded.endpoint)
            for model in endpoint_models(loaded, self.specs)
        }
        own: list[ModelSpec] = []
        self.specs = {model: self._with_poolers(spec) for model, spec in self.specs.items()}
        for model, spec in self.specs.items():
            client = self._plugin_engine(spec) if model in computing else None
            if client is not None:
                self._engine_of[model] = client
                if client not in self.engines.values():
                    name = spec.engine or model
                    self.engines[model if name in self.engines else name] = client
            elif model in computing:
                own.append(spec)
            if client is None or getattr(client, "reads_model_files", False):
                self.cards[model] = read_model_files(spec).card
        if own:
            engine = local_engine(own, self.settings.engine, log_level=self.settings.server.log_level)
            self.engines["torch"] = engine
            self._engine_of |= dict.fromkeys((spec.id for spec in own), engine)

    def _plugin_engine(self, spec: ModelSpec) -> EngineClient | None:
        """What plugins offer for a model, or None for the torch engine. Raises: PluginError; ConfigError for an engine that nobody has."""
        if spec.engine == TORCH:
            return None
        settings = self.settings
        client: object = self.plugins.first("jackfield_engine", spec=spec, settings=settings.engine, log_level=settings.server.log_level)
        if client is None and spec.engine:
            loaded = [info.name for info in self.plugins.infos if info.state == "loaded" and info.name not in self.plugins.endpoints]
            raise ConfigError(
                f"[models.{spec.id}] engine = {spec.engine!r}: no plugin supplies it to this model (pip install jackfield-{spec.engine}?). "
                f"Built in is {TORCH!r}; loaded plugins: {', '.join(loaded) or 'none'}."
            )
        if client is not None and not isinstance(client, EngineClient):
            raise PluginError(f"jackfield_engine gave {type(client).__name__} for model {spec.id!r}; an EngineClient is expected")
        return client

    def _with_poolers(self, spec: ModelSpec) -> ModelSpec:
        if not self._poolers:
            return spec
        try:
            files = read_model_files(spec)
        except ModelError:
            return spec  # told later, unless a plugin's engine takes it that reads files of another kind
        return msgspec.structs.replace(spec, poolers=fitting_poolers(self._poolers, files.card, files.config))

    def _load_tokenizers(self, cards: dict[str, ModelCard]) -> dict[str, ModelTokenizer]:
        return {model: ModelTokenizer(card) for model, card in cards.items()}

    def _bind_routes(self) -> list[tuple[BoundRoute, LoadedEndpoint]]:
        submit, stream = engine_submit(self.models), engine_stream(self.models)
        routes: list[tuple[BoundRoute, LoadedEndpoint]] = []
        manager = self.plugins.manager
        for loaded in self.plugins.endpoints.values():
            endpoint = loaded.endpoint
            check_endpoint(endpoint, self._poolers)
            stages = Stages(endpoint, self.plugins.cross_cutting())
            folded_submit, folded_stream = fold_submit(endpoint, submit, manager), fold_stream(endpoint, stream, manager)
            for route in endpoint.routes:
                try:
                    decoder = BodyDecoder(route.request)
                except TypeError as error:
                    raise PluginError(
                        f"endpoint {endpoint.name!r}: {route.paths[0]} has a request type that cannot be decoded: {error}"
                    ) from error
                bound = BoundRoute(
                    endpoint=endpoint,
                    route=route,
                    settings=loaded.settings,
                    decoder=decoder,
                    stages=stages,
                    id_prefix=route.id_prefix or endpoint.id_prefix,
                    models={},
                    others={},
                    submit=folded_submit,
                    stream=folded_stream,
                )
                routes.append((bound, loaded))
        check_routes(
            (bound.endpoint.name, bound.settings.prefix, bound.route.method, path) for bound, _ in routes for path in bound.route.paths
        )
        return routes

    def _build_http(self) -> Shell:
        server = self.settings.server
        self._pipeline = Pipeline(
            admission=self.admission,
            max_prompts=server.max_prompts,
            watchdog=self._watchdog,
            default_deadline_s=server.default_deadline_s,
            clamp_max_tokens=server.clamp_max_tokens,
            observe=self.metrics.finished,
            blame=self._found_fault,
        )
        self._pipeline.not_ready = "the models are loading"
        return build_http(
            HttpParts(
                settings=server,
                api_keys=api_keys(self.settings),
                version=version("jackfield"),
                pipeline=self._pipeline,
                routes=[bound for bound, _ in self._routes],
                metrics=self.metrics,
                models=self.model_entries,
                engines=self._healths,
                is_ready=self.state,
                lifespan=self._lifespan,
            )
        )

    def watch_log(self, gate: FloodGate) -> None:
        """Tell lines of plugins apart by plugin, and show in the metrics what the gate leaves out."""
        gate.source = self._log_source
        self.metrics.watch_log(gate.dropped)

    def _log_source(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        owner = self._blame.owner(record.name)
        if owner == CORE and error is not None:
            owner = self._blame.of(error)
        return own_source(record) if owner == CORE else owner

    def _found_fault(self, error: BaseException) -> str:
        plugin = self._blame.of(error)
        self.metrics.fault(plugin)
        return plugin

    def _healths(self) -> dict[str, EngineHealth]:
        return {name: client.health() for name, client in self.engines.items()}


def _takes_system(tokenizer: ModelTokenizer) -> bool:
    """Whether the model's template takes a system message: some raise."""
    if not tokenizer.has_chat_template:
        return False
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    try:
        tokenizer([ChatPrompt(messages=messages)])
    except BadRequest:
        return False
    return True


def _log_progress(step: Progress) -> None:
    if step.done in (0, step.total):
        log.info("%s", step.what)


async def _start_engine(name: str, client: EngineClient, on_progress: Callable[[Progress], None]) -> dict[str, ModelCard]:
    try:
        return await client.start(on_progress)
    except JackfieldError:
        raise
    except Exception as error:  # a plugin's engine may raise anything
        raise PluginError(f"engine {name!r} ({type(client).__name__}) did not start: {type(error).__name__}: {error}") from error


def api_keys(settings: Settings) -> list[str]:
    """The keys of the configuration and of its key file, one a line. Raises: ConfigError."""
    keys = list(settings.server.api_keys)
    if not all(key.strip() for key in keys):
        raise ConfigError("[server] api_keys (or JACKFIELD_API_KEY) holds an empty key, which would let everybody in; give one, or none")
    if settings.server.api_key_file:
        path = Path(settings.server.api_key_file)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"[server] api_key_file = {str(path)!r} cannot be read: {error.strerror}") from None
        keys += [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError(f"[server] api_key_file = {str(path)!r} holds no key")
    return keys
