"""The door between the HTTP side and an engine: messages and the protocol, no live objects.

Whatever stands behind `EngineClient` (the torch engine in its own process, the same engine in this one, a plugin's engine, the fake of
`jackfield.testing`) serves one or more models and knows nothing of HTTP or hooks. Times are `time.monotonic()` seconds, one clock for all
processes of a machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from jackfield.outputs import Delta, PoolingOutputs
from jackfield.params import PoolingParams, SamplingParams

__all__ = [
    "EngineClient",
    "EngineHealth",
    "EngineRequest",
    "EngineStats",
    "Execution",
    "ModelCard",
    "ModelSpec",
    "Progress",
]

Execution = Literal["packed", "buckets", "plain", "other"]
State = Literal["loading", "ready", "stuck", "dead", "stopped"]


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A model as the operator asked for it, its source already resolved to a local folder or file.

    dtype: "auto" keeps float32 and runs half-precision checkpoints in bfloat16 where the device does. quantization: "int4" generates by the
    file's own 4-bit weights where that is faster. max_length: None takes it from the files. engine: the name of the one that is to run it;
    empty: a plugin's that offers itself, else torch. matryoshka: True or a list of sizes allows `dimensions` whatever the files say; None
    leaves it to them. options: for a plugin's engine. poolers: of plugins, that fit this model: by operation, where their code is
    (`package.module:name`).
    """

    id: str
    path: str
    source: str = ""
    aliases: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["", "int4"] = ""
    device: str = "auto"
    engine: str = ""
    max_length: int | None = None
    pooling: str | None = None
    matryoshka: bool | tuple[int, ...] | None = None
    options: dict[str, Any] = {}
    poolers: dict[str, str] = {}


class ModelCard(Struct, frozen=True, kw_only=True):
    """What a model can do, read from its files, and how it runs, known once it is loaded.

    operations: names of `jackfield.params.OPERATIONS`, and of plugins' poolers. max_length: tokens. embedding_size: numbers a vector (None:
    no vectors). pooling: what makes a vector of the tokens' states, several joined by +. dimensions: allowed sizes of a shortened vector;
    empty means any up to embedding_size if matryoshka, else none.
    prompts: the model's instructions by name; default_prompt is put before every text, as sentence-transformers does.
    exclude_prompt: the instruction's tokens stay out of the vector. lowercase: texts are lower-cased before the tokenizer.
    labels: the names of a classifier's classes by number, None for one that its files do not name. activation, score_activation: what
    makes probabilities of logits for classify and for score: "softmax", "sigmoid", "none", or a module of torch.nn.modules by its path.
    sampling: what a request that generates does unless it says otherwise, by the names of SamplingParams: the model's generation_config.
    dtype, device, execution: None until the model is loaded. execution: how batches run, "packed" (end to end, no padding), "buckets" (of
    equal length), "plain" (a model that generates by transformers' own `generate`, one request at a time), "other" (a plugin's engine).
    """

    id: str
    path: str
    architecture: str
    operations: tuple[str, ...]
    max_length: int
    vocab_size: int
    embedding_size: int | None = None
    pooling: str | None = None
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    normalize: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    exclude_prompt: bool = False
    lowercase: bool = False
    labels: tuple[str | None, ...] = ()
    activation: str = "none"
    score_activation: str = "none"
    sampling: dict[str, float] = {}
    dtype: str | None = None
    device: str | None = None
    execution: Execution | None = None
    notes: tuple[str, ...] = ()


class EngineRequest(Struct, frozen=True, kw_only=True):
    """A unit of work: all prompts of one HTTP request for one model.

    id is the engine's own and unique. token_ids: one buffer of native int32 a prompt, validated against the model: an eighth of the
    memory of Python lists while they queue, and read in one go where they are computed. prefix_lengths: leading tokens of each prompt
    that are the model's instruction. segments: leading tokens of each prompt that are a pair's first part; 0 for no pair. deadline: when
    the answer is worth nothing any more. Smaller priority runs sooner. cache_salt: prompts of different ones share no computed blocks.
    """

    id: int
    model: str
    token_ids: list[bytes]
    params: PoolingParams | SamplingParams
    prefix_lengths: list[int] | None = None
    segments: list[int] | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""


class EngineStats(Struct, frozen=True, kw_only=True):
    """Counters since the engine started, for metrics: sequences and tokens waiting now, steps, tokens and sequences computed.

    Of generation: choices that run now, tokens generated, prompt tokens that were found in the cache, and those looked for, choices that
    had to give their blocks up, blocks of the cache in use and in all.
    """

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    busy_s: float = 0.0
    token_budget: int = 0
    num_running: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0


class EngineHealth(Struct, frozen=True, kw_only=True):
    """`ready` serves; `loading` will; `stuck` has work and does not move; `dead` ended and is being restarted."""

    state: State
    detail: str = ""
    restarts: int = 0


class Progress(Struct, frozen=True, kw_only=True):
    """Something to show while a model loads or converts: done of total, in the unit that `what` names; total 0 when unknown."""

    model: str
    what: str
    done: int = 0
    total: int = 0


@runtime_checkable
class EngineClient(Protocol):
    """What the pipeline knows of an engine."""

    async def start(self, progress: Callable[[Progress], None] | None = None) -> dict[str, ModelCard]:
        """Load the models and return their cards by id.

        Raises: ModelError when a model cannot be loaded.
        """
        ...

    async def stop(self) -> None:
        """End the engine; what is in flight fails with EngineUnavailable. Safe to call twice."""
        ...

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """Compute a pooling request. Cancelling the awaiting task aborts it in the engine.

        Raises: a ServingError (see `jackfield.errors`), exactly once a request.
        """
        ...

    def stream(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Generate; ends after each choice had its finish_reason. Closing the iterator aborts the request.

        What a consumer has not taken yet may be joined: one delta of a choice with the tokens of several.
        Raises: a ServingError, and nothing comes after it.
        """
        ...

    def end_choice(self, request_id: int, index: int) -> None:
        """A choice has met a stop text: its remaining deltas are not wanted, the others of its request are. May be ignored; its blocks
        are then kept until its own end."""
        ...

    def health(self) -> EngineHealth:
        """Now; cheap enough for every probe."""
        ...

    def stats(self) -> EngineStats:
        """The latest counters that are known on this side."""
        ...
