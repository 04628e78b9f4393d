"""Prometheus metrics. Labels are bounded: route templates, model ids, reasons; never a path, a key or a request's id."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jackfield.admission import Admission
from jackfield.client import EngineClient
from jackfield.context import Context
from jackfield.errors import ServingError

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry a server, so that several servers in a process (tests) do not meet. Not safe for threads: the event loop's alone."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = _Counter("jackfield_requests", "HTTP requests answered.", ["method", "path", "status"])
        self._seconds = _Histogram("jackfield_request_seconds", "From the request's head to the answer's end.", ["path"])
        self._stages = _Histogram(
            "jackfield_stage_seconds",
            "Time a request spends in a stage: preprocess, tokenize, engine (queue included), first_token of it, build_response.",
            ["endpoint", "stage"],
        )
        self._tokens = _Counter("jackfield_prompt_tokens", "Prompt tokens of served requests, after truncation.", ["endpoint", "model"])
        self._outcomes = _Counter(
            "jackfield_endpoint_requests",
            "Requests by endpoint, model and outcome (ok or the error's class).",
            ["endpoint", "model", "outcome"],
        )
        self._blocked = _Counter(
            "jackfield_blocking_stages",
            "Stages that blocked the event loop longer than [server] block_warning_ms.",
            ["endpoint", "stage"],
        )
        self._faults = _Counter(
            "jackfield_plugin_faults", "Exceptions that are no answer to a client, by the plugin whose code raised them.", ["plugin"]
        )
        for family in (self._requests, self._seconds, self._stages, self._tokens, self._outcomes, self._blocked, self._faults):
            self.registry.register(family)

    def request(self, method: str, path: str, status: int, seconds: float) -> None:
        """An HTTP request is over."""
        self._requests.add((method, path, str(status)), 1)
        self._seconds.observe((path,), seconds)

    def finished(self, ctx: Context[Any], error: BaseException | None) -> None:
        """A request of an endpoint is over."""
        name, model = ctx.endpoint.name, ctx.model.id
        for stage, seconds in ctx.timings_s.items():
            self._stages.observe((name, stage), seconds)
        if error is None:
            self._tokens.add((name, model), ctx.num_prompt_tokens)
        outcome = "ok" if error is None else type(error).__name__ if isinstance(error, ServingError) else "bug"
        self._outcomes.add((name, model, outcome), 1)

    def blocked(self, endpoint: str, stage: str) -> None:
        """A stage blocked the event loop."""
        self._blocked.add((endpoint, stage), 1)

    def fault(self, plugin: str) -> None:
        """An exception came out of a plugin's code."""
        self._faults.add((plugin,), 1)

    def watch_log(self, dropped: Mapping[str, int]) -> None:
        """Read the lines that were left out of the log, by source, whenever the metrics are."""
        self.registry.register(_LogLines(dropped))

    def watch(self, admission: Admission, engines: Callable[[], Iterable[tuple[str, EngineClient]]]) -> None:
        """Read the queue and the engines whenever the metrics are."""
        self.registry.register(_Gauges(admission, engines))

    def text(self) -> bytes:
        """The exposition, in Prometheus' text format."""
        return generate_latest(self.registry)


# prometheus_client's own counters and histograms take a lock for each number, and were a twelfth of the time of a small request; these are
# written by one thread and read when somebody asks.


class _Counter(Collector):
    def __init__(self, name: str, documentation: str, labels: list[str]) -> None:
        self._family = partial(CounterMetricFamily, name, documentation, labels=labels)
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(self, labels: tuple[str, ...], amount: float) -> None:
        self._values[labels] += amount

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class _Histogram(Collector):
    def __init__(self, name: str, documentation: str, labels: list[str]) -> None:
        self._family = partial(HistogramMetricFamily, name, documentation, labels=labels)
        # By labels: the sum, and how many lie within each bound and beyond the last.
        self._values: dict[tuple[str, ...], tuple[list[float], list[int]]] = {}

    def observe(self, labels: tuple[str, ...], seconds: float) -> None:
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = ([0.0], [0] * (len(_SECONDS) + 1))
        total, counts = found
        total[0] += seconds
        counts[bisect_left(_SECONDS, seconds)] += 1

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        bounds = [*map(str, _SECONDS), "+Inf"]
        for labels, (total, counts) in self._values.items():
            family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total[0])
        yield family


class _LogLines(Collector):
    def __init__(self, dropped: Mapping[str, int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("jackfield_log_lines_dropped", "Lines left out of the log, by who wrote too many.", labels=["source"])
        for source, count in dict(self._dropped).items():
            family.add_metric([source], count)
        yield family


class _Gauges(Collector):
    def __init__(self, admission: Admission, engines: Callable[[], Iterable[tuple[str, EngineClient]]]) -> None:
        self._admission = admission
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        admission = self._admission
        queue = GaugeMetricFamily("jackfield_queue", "What is in the server now.", labels=["unit"])
        queue.add_metric(["requests"], admission.num_requests)
        queue.add_metric(["bytes"], admission.num_bytes)
        queue.add_metric(["tokens"], admission.num_tokens)
        yield queue
        rejected = CounterMetricFamily("jackfield_rejections", "Requests refused with 429, by the limit they met.", labels=["reason"])
        for reason, count in admission.rejections.items():
            rejected.add_metric([reason], count)
        yield rejected
        yield from self._engine_metrics()

    def _engine_metrics(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("jackfield_engine_up", "1 while the engine is ready.", labels=["engine"])
        waiting = GaugeMetricFamily("jackfield_engine_waiting", "Waiting in the engine.", labels=["engine", "unit"])
        steps = CounterMetricFamily("jackfield_engine_steps", "Batches run.", labels=["engine"])
        tokens = CounterMetricFamily("jackfield_engine_tokens", "Tokens computed.", labels=["engine"])
        sequences = CounterMetricFamily("jackfield_engine_sequences", "Sequences computed.", labels=["engine"])
        busy = CounterMetricFamily("jackfield_engine_busy_seconds", "Time spent in batches.", labels=["engine"])
        fill = GaugeMetricFamily("jackfield_engine_batch_fill", "Mean share of the token budget that a batch uses.", labels=["engine"])
        restarts = CounterMetricFamily("jackfield_engine_restarts", "Restarts of the engine process.", labels=["engine"])
        for name, engine in self._engines():
            health, stats = engine.health(), engine.stats()
            up.add_metric([name], float(health.state == "ready"))
            waiting.add_metric([name, "sequences"], stats.num_waiting)
            waiting.add_metric([name, "tokens"], stats.num_waiting_tokens)
            steps.add_metric([name], stats.num_steps)
            tokens.add_metric([name], stats.num_tokens)
            sequences.add_metric([name], stats.num_sequences)
            busy.add_metric([name], stats.busy_s)
            budget = stats.num_steps * stats.token_budget
            fill.add_metric([name], stats.num_tokens / budget if budget else 0.0)
            restarts.add_metric([name], health.restarts)
        yield from (up, waiting, steps, tokens, sequences, busy, fill, restarts)
        yield from self._generation_metrics()

    def _generation_metrics(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("jackfield_generation_running", "Choices that are generated now.", labels=["engine"])
        tokens = CounterMetricFamily("jackfield_generated_tokens", "Tokens generated.", labels=["engine"])
        prompts = CounterMetricFamily(
            "jackfield_generation_prompt_tokens",
            "Prompt tokens, by whether they were computed or found in the cache.",
            labels=["engine", "from"],
        )
        preempted = CounterMetricFamily(
            "jackfield_generation_preempted", "Choices whose blocks of the cache others needed more.", labels=["engine"]
        )
        blocks = GaugeMetricFamily("jackfield_cache_blocks", "Blocks of the key-value caches.", labels=["engine", "state"])
        for name, engine in self._engines():
            stats = engine.stats()
            if not stats.num_blocks:
                continue  # it generates nothing
            running.add_metric([name], stats.num_running)
            tokens.add_metric([name], stats.num_generated_tokens)
            prompts.add_metric([name, "cache"], stats.num_cached_tokens)
            prompts.add_metric([name, "model"], stats.num_prompt_tokens - stats.num_cached_tokens)
            preempted.add_metric([name], stats.num_preempted)
            blocks.add_metric([name, "used"], stats.num_used_blocks)
            blocks.add_metric([name, "free"], stats.num_blocks - stats.num_used_blocks)
        yield from (running, tokens, prompts, preempted, blocks)
