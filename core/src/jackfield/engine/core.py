"""The engine: requests in, events out, step by step. No process, no thread, no socket of its own: those are its owners' matter.

Several threads may call `step` at once, one for each lane. A lane's steps have its share of the processor's threads. When what waits is too
little to be shared, and nothing runs, it is lane 0's, with all threads: the lane whose thread has loaded the models, since OpenMP keeps a
pool of threads for each thread that has asked for one, and with more of them than processors they sleep where they would spin.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch

from jackfield.client import EngineRequest, EngineStats, ModelCard, ModelSpec, Progress
from jackfield.engine.cpu import usable_cpus
from jackfield.engine.generation.grammars import Grammars, Matcher
from jackfield.engine.generation.growing import Generation
from jackfield.engine.generation.scheduler import Work
from jackfield.engine.generation.steps import StepSize, run_step
from jackfield.engine.loader import load_model, load_on_backend
from jackfield.engine.memory import large_blocks_apart
from jackfield.engine.poolers import SequenceResult
from jackfield.engine.runner import Runner
from jackfield.engine.scheduler import Group, Scheduler, Sequence, Step
from jackfield.errors import DeadlineExceeded, EngineUnavailable, InternalError, NonFiniteOutput, ServingError, StepFailed
from jackfield.outputs import Delta, FloatArray, PoolingOutputs
from jackfield.params import SamplingParams
from jackfield.settings import EngineSettings

__all__ = ["Engine", "Event"]

log = logging.getLogger("jackfield.engine")

# Tokens a step. CPU: benchmarks/ledger.md, "A step by its tokens". GPU: not measured yet.
CPU_TOKEN_BUDGET = 1024
GPU_TOKEN_BUDGET = 16384
# What waits is shared among the lanes that are free, but no less than this is split: benchmarks/ledger.md, "Lanes".
MIN_SHARE = 128
# Measured on 2 cores; more lanes, and lanes of several threads, were not.
CPU_LANES = 2

# By request: the one answer of pooling, the pieces of what is generated, or an error.
Event = tuple[int, PoolingOutputs | Delta | ServingError]


class Engine:
    """Models, one scheduler over all of them, and the step loop's body. backend: of another forward pass; empty: torch.

    Every request that was submitted gets exactly one event that ends it, unless it was aborted. lanes: how many threads may be in `step` at
    once. A step is of pooling, or of one model's generation; whichever had its turn longest ago comes next, and of a model that generates
    there is one step at a time.
    """

    def __init__(self, settings: EngineSettings, *, backend: str = "") -> None:
        self.settings = settings
        self._backend = backend
        self.lanes = 1
        self._threads = settings.threads or usable_cpus()
        self._own = _OwnThreads()
        self._own.use(self._threads)
        # Guards everything below; never held while a model runs.
        self._lock = threading.RLock()
        # Steps that run, and their threads.
        self._running = self._in_use = 0
        self._runners: dict[str, Runner] = {}
        self._scheduler = Scheduler(token_budget=CPU_TOKEN_BUDGET, max_wait_s=settings.max_wait_ms / 1000)
        self._events: list[Event] = []
        self._stats = EngineStats()
        self._generations: dict[str, Generation] = {}
        self._grammars: dict[str, Grammars] = {}
        self._sizes: dict[str, StepSize] = {}
        # Models whose generation takes a step at this moment; and when whose turn was, pooling's by an empty name.
        self._generating: set[str] = set()
        self._turns: dict[str, int] = {}
        self._num_turns = 0

    def load(self, specs: list[ModelSpec], progress: Callable[[Progress], None]) -> dict[str, ModelCard]:
        """Load the models in order; returns their cards.

        Raises: ModelError from the first that cannot be loaded.
        """
        lanes = min(self.settings.lanes or CPU_LANES, self._threads)
        resolved = msgspec.structs.replace(self.settings, threads=self._threads, lanes=lanes)
        for position, spec in enumerate(specs):
            progress(Progress(model=spec.id, what="loading models", done=position, total=len(specs)))
            with large_blocks_apart():
                self._runners[spec.id] = load_on_backend(spec, self._backend, resolved) if self._backend else load_model(spec, resolved)
        progress(Progress(model="", what="loading models", done=len(specs), total=len(specs)))
        self._scheduler.by_length = {model for model, runner in self._runners.items() if not runner.packed}
        on_gpu = any(runner.card.device != "cpu" for runner in self._runners.values())
        self._scheduler.token_budget = self.settings.token_budget or (GPU_TOKEN_BUDGET if on_gpu else CPU_TOKEN_BUDGET)
        self.lanes = 1 if on_gpu else lanes
        self._prepare_generation()
        return {model: runner.card for model, runner in self._runners.items()}

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. A fault of it comes as its event, never as an exception."""
        try:
            matcher = self._matcher(request)  # takes its time, without the lock
        except Exception as error:  # whatever a grammar brings about is its request's
            if not isinstance(error, ServingError):
                log.exception("a grammar could not be compiled")
                error = InternalError(f"The grammar could not be compiled: {type(error).__name__}.")
            with self._lock:
                self._events.append((request.id, error))
            return
        with self._lock:
            if request.model not in self._runners:
                self._events.append((request.id, InternalError(f"The engine has no model {request.model!r}.")))
            elif not request.token_ids or not all(request.token_ids):
                self._events.append((request.id, InternalError("The engine was given an empty prompt.")))
            elif isinstance(request.params, SamplingParams):
                self._submit_generation(request, matcher)
            else:
                self._scheduler.add(request, time.monotonic())

    def abort(self, request_id: int) -> None:
        """Forget a request: no event follows, and what of it still waits is never computed."""
        with self._lock:
            for generation in self._generations.values():
                generation.abort(request_id)
            group = self._scheduler.get(request_id)
            if group is not None:
                self._scheduler.finish(group)

    def end_choice(self, request_id: int, index: int) -> None:
        """Forget a choice: no delta of it follows; those of its request's others do."""
        with self._lock:
            for generation in self._generations.values():
                generation.end_choice(request_id, index)

    def has_work(self, lane: int = 0) -> bool:
        """Whether a call of `step` would do something now."""
        with self._lock:
            return bool(self._events) or self._width(lane) > 0

    def stats(self) -> EngineStats:
        """Counters since the start, and what waits now."""
        with self._lock:
            growing = list(self._generations.values())
            schedulers = [generation.scheduler for generation in growing]
            return msgspec.structs.replace(
                self._stats,
                num_waiting=self._scheduler.num_waiting + sum(scheduler.num_waiting for scheduler in schedulers),
                num_waiting_tokens=self._scheduler.num_waiting_tokens,
                token_budget=self._scheduler.token_budget,
                num_running=sum(scheduler.num_running for scheduler in schedulers),
                num_generated_tokens=sum(generation.num_tokens for generation in growing),
                num_cached_tokens=sum(generation.num_cached_tokens for generation in growing),
                num_prompt_tokens=sum(generation.num_prompt_tokens for generation in growing),
                num_preempted=sum(scheduler.num_preempted for scheduler in schedulers),
                num_used_blocks=sum(scheduler.pool.num_blocks - scheduler.pool.num_free for scheduler in schedulers),
                num_blocks=sum(scheduler.pool.num_blocks for scheduler in schedulers),
            )

    def step(self, lane: int = 0) -> list[Event]:
        """Drop what has expired, run one batch, and return the events there are by then."""
        begun = time.monotonic()
        with self._lock:
            for group in self._scheduler.expired(begun):
                self._end(group, DeadlineExceeded())
            width = self._width(lane)
            step = self._schedule(begun, width) if width else None
        if step is not None:
            try:
                self._own.use(width)
                if isinstance(step, Step):
                    self._run(step)
                else:
                    self._generate(*step)
            finally:
                with self._lock:
                    self._in_use -= width
                    self._running -= 1
                    self._count(step, time.monotonic() - begun, width)
        with self._lock:
            events, self._events = self._events, []
        return events

    def _width(self, lane: int) -> int:
        """Threads of a step that this lane would begin now; 0 when it is not its turn, or nothing is to be done."""
        waiting = self._scheduler.num_waiting
        due = self._due()
        if not due:
            return 0
        if self.lanes == 1:
            return self._threads
        little = not waiting or waiting == 1 or self._scheduler.num_waiting_tokens <= MIN_SHARE
        if not self._in_use and len(due) == 1 and little:
            return self._threads if lane == 0 else 0
        width = self._threads // self.lanes + (lane < self._threads % self.lanes)
        return width if self._in_use + width <= self._threads else 0

    def _due(self) -> list[str]:
        """What a step could be of: models that generate, by name, and pooling, by an empty one; whose turn it is first."""
        due = [model for model, generation in self._generations.items() if len(generation) and model not in self._generating]
        if self._scheduler.num_waiting:
            due.append("")
        return sorted(due, key=lambda name: self._turns.get(name, 0))

    def _schedule(self, now: float, width: int) -> Step | tuple[str, list[Work]] | None:
        """The next step: of what waits, the part of one of the lanes that are free."""
        name = self._due()[0]
        self._num_turns += 1
        self._turns[name] = self._num_turns
        step: Step | tuple[str, list[Work]] | None
        if name:
            works = self._generations[name].scheduler.plan(self._sizes[name].tokens)
            step = (name, works) if works else None
        else:
            share = math.ceil(self._scheduler.num_waiting_tokens / (self.lanes - self._running))
            budget = self._scheduler.token_budget
            if self.lanes == 1 and any(self._generations.values()):
                budget = min(budget, self._sizes[""].tokens)  # running texts wait for it
            step = self._scheduler.schedule(now, min(budget, max(share, MIN_SHARE)))
        if step is not None:
            self._in_use += width
            self._running += 1
            if name:
                self._generating.add(name)
        return step

    def _count(self, step: Step | tuple[str, list[Work]], seconds: float, width: int) -> None:
        stats = self._stats
        if isinstance(step, Step):
            tokens, sequences = step.num_tokens, len(step.sequences)
            self._sizes[""].took(tokens, seconds)
        else:
            name, works = step
            tokens, sequences = sum(work.num_tokens for work in works), 0
            self._sizes[name].took(sum(work.num_tokens for work in works if work.start < work.choice.num_prompt), seconds)
            self._generating.discard(name)
        self._stats = msgspec.structs.replace(
            stats,
            num_steps=stats.num_steps + 1,
            num_tokens=stats.num_tokens + tokens,
            num_sequences=stats.num_sequences + sequences,
            busy_s=stats.busy_s + seconds * width / self._threads,
        )

    def _prepare_generation(self) -> None:
        bound, most = self.settings.max_step_ms / 1000, self._scheduler.token_budget
        self._sizes = {"": StepSize(bound, least=MIN_SHARE, most=most)}
        for model, runner in self._runners.items():
            if runner.generator is not None:
                card = runner.card
                self._generations[model] = Generation(runner.generator, max_length=card.max_length)
                self._grammars[model] = Grammars(card.path, card.vocab_size, runner.generator.end_ids)
                self._sizes[model] = StepSize(bound, least=runner.generator.pool.block_size, most=most)

    def compile(self, request: EngineRequest) -> None:
        """Compile a request's grammar ahead, in whichever thread may take its time. What is wrong with it is told when it is submitted."""
        with suppress(Exception):
            self._matcher(request)

    def _matcher(self, request: EngineRequest) -> Matcher | None:
        """Of its grammar, if it has one and its model generates. Raises: BadRequest, NotSupported."""
        grammar = request.params.grammar if isinstance(request.params, SamplingParams) else None
        grammars = self._grammars.get(request.model)
        return None if grammar is None or grammars is None else grammars.matcher(grammar)

    def _submit_generation(self, request: EngineRequest, matcher: Matcher | None) -> None:
        generation = self._generations.get(request.model)
        if generation is None:
            self._events.append((request.id, InternalError(f"The model {request.model!r} does not generate.")))
        elif any(len(raw) // 4 > generation.max_length for raw in request.token_ids):
            self._events.append((request.id, InternalError("The engine was given a prompt that is longer than the model's context.")))
        else:
            generation.add(request, time.monotonic(), matcher)

    def _generate(self, model: str, works: list[Work]) -> None:
        generation = self._generations[model]
        results = run_step(generation.generator, works, model)
        with self._lock:
            self._events += generation.computed(works, results)

    def _run(self, step: Step) -> None:
        runner = self._runners[step.model]
        try:
            results = runner.run(step.sequences)
        except Exception:
            log.exception("a step of %d sequences of model %s raised; retrying one by one", len(step.sequences), step.model)
            for sequence in step.sequences:
                if not sequence.group.done:  # another prompt of its request has failed
                    self._deliver(sequence, self._run_alone(runner, sequence))
            return
        # Neighbours share blocks of attention, where a masked NaN is still NaN: whoever is hit by another's is right alone.
        for sequence, result in zip(step.sequences, results, strict=True):
            hit = isinstance(result, NonFiniteOutput) and len(results) > 1 and not sequence.group.done
            self._deliver(sequence, self._run_alone(runner, sequence) if hit else result)

    def _run_alone(self, runner: Runner, sequence: Sequence) -> SequenceResult:
        """Find the culprit: it fails with its own error, the others do not notice."""
        try:
            return runner.run([sequence])[0]
        except torch.OutOfMemoryError:
            return EngineUnavailable(f"Not enough memory for a prompt of {sequence.length} tokens.")
        except Exception as error:
            log.exception("request %d failed in the model", sequence.group.request.id)
            return StepFailed(f"The model failed on this input ({type(error).__name__}); the log has the details.")

    def _deliver(self, sequence: Sequence, result: SequenceResult) -> None:
        group = sequence.group
        with self._lock:
            if group.done:
                return
            if isinstance(result, ServingError):
                self._end(group, result)
                return
            group.results[sequence.index] = result
            group.remaining -= 1
            if group.remaining == 0:
                self._end(group, PoolingOutputs(values=_by_output(group)))

    def _end(self, group: Group, outcome: PoolingOutputs | ServingError) -> None:
        if self._scheduler.finish(group):
            self._events.append((group.request.id, outcome))


def _by_output(group: Group) -> dict[str, list[FloatArray]]:
    results = [result for result in group.results if result is not None]
    return {name: [result[name] for result in results] for name in results[0]}


class _OwnThreads(threading.local):
    """How many threads the products of the calling thread take; torch keeps that number for each thread."""

    count = 0

    def use(self, count: int) -> None:
        """Set it, if it is not so already."""
        if count != self.count:
            torch.set_num_threads(count)
            self.count = count
