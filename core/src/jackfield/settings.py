"""The configuration as structs: every key of the core, its default and its meaning.

`config/default.toml` shows the same keys; a test holds the two equal. An endpoint's own keys are in a subclass of `EndpointSettings`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

__all__ = ["CorsSettings", "EndpointSettings", "EngineSettings", "ModelSettings", "ServerSettings", "Settings"]

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
LogLevel = Literal["debug", "info", "warning", "error"]


class CorsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server.cors]: no origin is allowed until one is named."""

    allow_origins: list[str] = []
    allow_methods: list[str] = field(default_factory=lambda: ["GET", "POST", "OPTIONS"])
    allow_headers: list[str] = field(default_factory=lambda: ["authorization", "content-type", "x-request-id", "x-request-timeout"])
    max_age_s: Annotated[int, Meta(ge=0)] = 600


class ServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server]: the HTTP side."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    root_path: str = ""
    api_keys: list[str] = []
    api_key_file: str = ""
    offline: bool = False
    plugin_errors: Literal["stop", "skip"] = "stop"
    max_body_bytes: PositiveInt = 64 * 2**20
    max_queue_requests: PositiveInt = 1024
    max_queue_bytes: PositiveInt = 512 * 2**20
    max_queue_tokens: PositiveInt = 4_000_000
    max_prompts: PositiveInt = 4096
    clamp_max_tokens: bool = False
    default_deadline_s: Annotated[float, Meta(ge=0)] = 0.0
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    drain_delay_s: Annotated[float, Meta(ge=0)] = 0.0
    keep_alive_s: PositiveInt = 75
    tokenizer_threads: Annotated[int, Meta(ge=0)] = 0
    block_warning_ms: PositiveInt = 100
    docs: bool = True
    metrics: bool = True
    access_log: bool = False
    log_level: LogLevel = "info"
    max_log_lines_per_s: PositiveInt = 100
    cors: CorsSettings = field(default_factory=CorsSettings)


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine]: the scheduler and the process that runs the models."""

    mode: Literal["process", "thread"] = "process"
    token_budget: Annotated[int, Meta(ge=0)] = 0
    max_wait_ms: PositiveInt = 200
    threads: Annotated[int, Meta(ge=0)] = 0
    lanes: Annotated[int, Meta(ge=0)] = 0
    kv_cache_mib: Annotated[int, Meta(ge=0)] = 0
    prefix_cache: bool = True
    max_running: PositiveInt = 256
    max_step_ms: PositiveInt = 100
    heartbeat_s: PositiveFloat = 1.0
    stall_s: PositiveFloat = 30.0
    max_restarts: Annotated[int, Meta(ge=0)] = 5


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[models.ID]: where a model comes from and how it runs."""

    source: str
    revision: str = ""
    aliases: list[str] = []
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["", "int4"] = ""
    device: str = "auto"
    engine: str = ""
    max_length: Annotated[int, Meta(ge=0)] = 0
    pooling: str = ""
    matryoshka: bool | list[PositiveInt] | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    options: dict[str, Any] = {}


class EndpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[endpoints.NAME]: the keys that every endpoint has; an endpoint's own settings inherit them.

    models: ids it serves, the first is the default; empty takes every model that fits. prefix: its routes are mounted there.
    threaded: its stages run in a thread, for stages that block.
    """

    models: list[str] = []
    prefix: str = ""
    threaded: bool = False


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole; endpoint and plugin tables are decoded by their owners' structs once those are loaded."""

    server: ServerSettings = field(default_factory=ServerSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    models: dict[str, ModelSettings] = {}
    endpoints: dict[str, dict[str, Any]] = {}
    plugins: dict[str, dict[str, Any]] = {}
