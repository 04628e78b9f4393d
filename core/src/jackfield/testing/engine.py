"""An engine without a model: every operation, the same answer for the same tokens, latency and faults on demand."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from jackfield.client import EngineHealth, EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.errors import EngineUnavailable, ServingError
from jackfield.hookspecs import hookimpl
from jackfield.outputs import Delta, FloatArray, PoolingOutputs, TokenLogprob
from jackfield.params import OPERATIONS, PoolingParams, SamplingParams

__all__ = ["FakeEngine"]


class FakeEngine:
    """An EngineClient, and the plugin that offers it for every model.

    embedding_size, num_labels: sizes of its answers. max_length, vocab_size, operations, matryoshka, sampling: what its models' cards say.
    latency_s: how long each request takes. fault: called with each request; an error that it returns is raised, of one that generates after
    `fault_after` tokens. nan: answers hold a NaN.

    What it generates are the prompt's own tokens, then an end token, 0. Its sampled choices begin with different ones, by seed and number.
    `says`, when set, gives what each choice of a request says instead: its deltas, as tokens. It knows nothing of grammars.

    `requests` collects what was submitted, `aborted` the ids of requests whose caller gave up. `hold()` keeps all requests waiting until
    `go()`, with `after` those that generate once they have said so many tokens; `die()` makes it unavailable, as a dead process is.
    """

    def __init__(
        self,
        *,
        embedding_size: int = 8,
        num_labels: int = 3,
        max_length: int = 512,
        vocab_size: int = 300,
        operations: Iterable[str] = OPERATIONS,
        matryoshka: bool = False,
        sampling: Mapping[str, float] | None = None,
        latency_s: float = 0.0,
        fault: Callable[[EngineRequest], ServingError | None] | None = None,
        fault_after: int = 0,
        nan: bool = False,
    ) -> None:
        self.embedding_size = embedding_size
        self.num_labels = num_labels
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.operations = tuple(operations)
        self.matryoshka = matryoshka
        self.sampling = dict(sampling or {})
        self.latency_s = latency_s
        self.fault = fault
        self.fault_after = fault_after
        self.nan = nan
        self.says: Callable[[EngineRequest], Sequence[Sequence[int]]] | None = None
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.ended: set[tuple[int, int]] = set()
        self._specs: dict[str, ModelSpec] = {}
        self._state = EngineHealth(state="stopped")
        self._holding = False
        self._hold_after = 0
        self._waiting: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @hookimpl
    def jackfield_engine(self, spec: ModelSpec) -> FakeEngine:
        """Serve every model."""
        self._specs[spec.id] = spec
        return self

    async def start(self, progress: Callable[[Progress], None] | None = None) -> dict[str, ModelCard]:
        """Cards for the models that it was offered."""
        self._state = EngineHealth(state="ready")
        self._loop = asyncio.get_running_loop()
        return {model: self._card(spec) for model, spec in self._specs.items()}

    async def stop(self) -> None:
        """Fail what is held."""
        self._state = EngineHealth(state="stopped")
        self.go()

    def hold(self, *, after: int = 0) -> None:
        """Let no request finish from now on. after: tokens that each choice of one that generates may say before."""
        self._holding = True
        self._hold_after = after

    def go(self) -> None:
        """Let the held requests finish. Like `die`, to be called from any thread."""
        self._holding = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        for event in self._waiting:
            event.set()

    def die(self, detail: str = "killed by a test") -> None:
        """Be dead: what is held or being said fails, later requests too, health says so."""
        self._state = EngineHealth(state="dead", detail=detail)
        self.go()

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """Answer from the tokens alone."""
        await self._admit(request)
        params = request.params
        assert isinstance(params, PoolingParams)
        values = {name: [self._output(name, ids, params) for ids in request.token_ids] for name in params.outputs}
        return PoolingOutputs(values=values)

    async def stream(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Say the prompts' tokens again, choice by choice in turn, a delta a token."""
        await self._admit(request)
        params = request.params
        assert isinstance(params, SamplingParams)
        growing = {
            prompt * params.n + sample: self._pieces(request, raw, params, sample)
            for prompt, raw in enumerate(request.token_ids)
            for sample in range(params.n)
        }
        try:
            async for delta in self._grow(request, params, growing):
                yield delta
        except (asyncio.CancelledError, GeneratorExit):
            if any((request.id, index) not in self.ended for index in growing):
                self.aborted.append(request.id)
            raise

    async def _grow(
        self, request: EngineRequest, params: SamplingParams, growing: dict[int, list[tuple[int, ...]]]
    ) -> AsyncIterator[Delta]:
        """The deltas; what has ended leaves `growing`."""
        position = 0
        while growing:
            await asyncio.sleep(0)
            if self._holding and self._hold_after and position >= self._hold_after:
                await self._wait()
            self._check_ready()
            if self.fault_after and position == self.fault_after and self.fault and (error := self.fault(request)):
                raise error
            for index, pieces in list(growing.items()):
                if (request.id, index) in self.ended:
                    del growing[index]
                    continue
                delta = self._delta(request, params, index, pieces, position)
                if delta.finish_reason is not None:
                    del growing[index]
                yield delta
            position += 1

    def end_choice(self, request_id: int, index: int) -> None:
        """No more deltas of it."""
        self.ended.add((request_id, index))

    def _pieces(self, request: EngineRequest, raw: bytes, params: SamplingParams, sample: int) -> list[tuple[int, ...]]:
        """What a choice will say, delta by delta, its end token included unless max_tokens comes first."""
        if self.says is not None:
            pieces = [*map(tuple, self.says(request)), (0,)]
        else:
            ids = np.frombuffer(raw, dtype=np.int32).tolist()
            if params.temperature:
                start = (sample + (params.seed or 0)) % len(ids)
                ids = ids[start:] + ids[:start]
            if params.ignore_eos and params.max_tokens is not None:
                ids = ids * (params.max_tokens // len(ids) + 1)
            pieces = [*((token,) for token in ids), (0,)]
        told: list[tuple[int, ...]] = []
        left = sum(map(len, pieces)) if params.max_tokens is None else params.max_tokens
        for piece in pieces:
            if left > 0:
                told.append(piece[:left])
            left -= len(piece)
        return told or [()]

    def _delta(self, request: EngineRequest, params: SamplingParams, index: int, pieces: list[tuple[int, ...]], position: int) -> Delta:
        last = position == len(pieces) - 1
        tokens = pieces[position]
        prompt = np.frombuffer(request.token_ids[index // params.n], dtype=np.int32).tolist()
        told = params.prompt_logprobs
        first = position == 0 and index % params.n == 0 and told is not None
        return Delta(
            index=index,
            token_ids=tokens,
            logprobs=() if params.logprobs is None else tuple(self._logprob(token, params.logprobs) for token in tokens),
            finish_reason=("stop" if tokens[-1:] == (0,) else "length") if last else None,
            prompt_logprobs=(None, *(self._logprob(token, told or 0) for token in prompt[1:])) if first else (),
        )

    def _logprob(self, token: int, count: int) -> TokenLogprob:
        top = tuple(TokenLogprob(token_id=(token + i) % self.vocab_size, logprob=-0.5 - i, rank=i + 1) for i in range(count))
        return TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=top)

    def health(self) -> EngineHealth:
        """Ready unless it died."""
        return self._state

    def stats(self) -> EngineStats:
        """How many requests came."""
        return EngineStats(num_steps=len(self.requests), num_sequences=sum(len(r.token_ids) for r in self.requests))

    async def _admit(self, request: EngineRequest) -> None:
        self.requests.append(request)
        try:
            if self._holding and not (self._hold_after and isinstance(request.params, SamplingParams)):
                await self._wait()
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        self._check_ready()
        error = self.fault(request) if self.fault is not None and not self.fault_after else None
        if error is not None:
            raise error

    async def _wait(self) -> None:
        """Until `go`."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def _check_ready(self) -> None:
        if self._state.state != "ready":
            raise EngineUnavailable(f"The engine is {self._state.state}: {self._state.detail}.")

    def _output(self, operation: str, ids: bytes, params: PoolingParams) -> FloatArray:
        tokens = len(ids) // 4
        shape: tuple[int, ...] = (self.embedding_size,)
        if operation in ("token_embed", "hidden_states"):
            shape = (tokens, self.embedding_size)
        elif operation in ("classify", "token_classify"):
            shape = (self.num_labels,) if operation == "classify" else (tokens, self.num_labels)
        elif operation in ("score", "logits"):
            shape = (1,)
        unit = operation in ("embed", "token_embed") and params.use_activation is not False
        values = _values(ids + operation.encode(), shape, params.dimensions if unit else None, unit).copy()
        if self.nan:
            values.flat[0] = np.nan
        return values

    def _card(self, spec: ModelSpec) -> ModelCard:
        return ModelCard(
            id=spec.id,
            path=spec.path,
            architecture="FakeModel",
            execution="other",
            dtype="float32",
            device="cpu",
            operations=self.operations,
            max_length=self.max_length,
            vocab_size=self.vocab_size,
            embedding_size=self.embedding_size,
            matryoshka=self.matryoshka,
            sampling=self.sampling,
            labels=tuple(f"LABEL_{i}" for i in range(self.num_labels)),
        )


@lru_cache(maxsize=4096)
def _values(seed: bytes, shape: tuple[int, ...], dimensions: int | None, unit: bool) -> FloatArray:
    """Numbers that are the same for the same seed, cut and of length 1 if so wished. Kept, so that a benchmark pays for them once."""
    values = np.random.default_rng(zlib.crc32(seed)).standard_normal(shape, dtype=np.float32)[..., :dimensions]
    return values / np.linalg.norm(values, axis=-1, keepdims=True) if unit else values
