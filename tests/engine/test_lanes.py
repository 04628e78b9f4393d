"""Lanes: steps side by side give each request its one event, and the numbers it has alone; a little work is one lane's with all threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from jackfield.client import EngineRequest, ModelSpec
from jackfield.engine.core import MIN_SHARE, Engine, Event
from jackfield.engine.lanes import Lanes
from jackfield.outputs import PoolingOutputs
from jackfield.params import PoolingParams
from jackfield.settings import EngineSettings
from tests.checkpoints import VOCAB, save_sentence_transformer

EMBED = PoolingParams(outputs=("embed",))
# Two that are packed, and one in buckets.
KINDS = ("bert", "distilbert", "mpnet")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_transformer(tmp_path_factory.mktemp("lanes") / request.param, request.param)


def load(folder: Path, **settings: int) -> Engine:
    engine = Engine(EngineSettings(**settings))  # type: ignore[arg-type]
    engine.load([ModelSpec(id="m", path=str(folder))], lambda progress: None)
    return engine


def request(number: int, *lengths: int) -> EngineRequest:
    """Prompts of those lengths, no two alike."""
    rng = np.random.default_rng(number)
    ids = [rng.integers(4, VOCAB, length).astype(np.int32).tobytes() for length in lengths]
    return EngineRequest(id=number, model="m", token_ids=ids, params=EMBED)


def test_results_do_not_depend_on_lanes(folder: Path) -> None:
    rng = np.random.default_rng(0)
    requests = [request(number, *rng.integers(1, 60, rng.integers(1, 6)).tolist()) for number in range(1, 101)]
    alone = load(folder, threads=1)
    expected: dict[int, object] = {}
    for one in requests:
        alone.submit(one)
        while alone.has_work():
            expected.update(alone.step())

    engine = load(folder, threads=3, lanes=3, token_budget=150)
    assert engine.lanes == 3
    events: list[Event] = []
    names: set[str] = set()
    lock = threading.Lock()

    def deliver(delivered: list[Event]) -> None:
        with lock:
            names.add(threading.current_thread().name)
            events.extend(delivered)
            if len(events) == len(requests):
                lanes.stop()

    lanes = Lanes(engine, deliver)
    for one in requests:
        lanes.submit(one)
    lanes.run()

    assert sorted(number for number, _ in events) == [one.id for one in requests]
    for number, outcome in events:
        own = expected[number]
        assert isinstance(outcome, PoolingOutputs)
        assert isinstance(own, PoolingOutputs)
        np.testing.assert_allclose(np.stack(outcome["embed"]), np.stack(own["embed"]), atol=1e-5)
    assert len(names) > 1, "one lane did everything"
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_sequences) == (0, sum(len(one.token_ids) for one in requests))


def test_a_little_is_the_first_lanes_and_has_all_threads(folder: Path) -> None:
    engine = load(folder, threads=2, lanes=2)
    engine.submit(request(1, 5))
    assert (engine.has_work(0), engine.has_work(1)) == (True, False)
    assert engine.step(1) == []
    ((number, outcome),) = engine.step(0)
    assert (number, type(outcome), torch.get_num_threads()) == (1, PoolingOutputs, 2)


def test_much_is_shared(folder: Path) -> None:
    engine = load(folder, threads=2, lanes=2)
    half = MIN_SHARE // 2
    engine.submit(request(1, half, half - 1, half - 2))
    engine.submit(request(2, half, half - 1, half - 2))
    assert (engine.has_work(0), engine.has_work(1)) == (True, True)
    engine.step(1)
    assert torch.get_num_threads() == 1
    stats = engine.stats()
    assert (stats.num_steps, stats.num_sequences + stats.num_waiting) == (1, 6)
    assert 0 < stats.num_waiting < 6


def test_a_lane_alone_takes_everything(folder: Path) -> None:
    engine = load(folder, threads=2, lanes=1)
    engine.submit(request(1, 50, 40, 30))
    engine.submit(request(2, 50, 40, 30))
    assert sorted(number for number, _ in engine.step()) == [1, 2]


def test_what_fails_on_a_lane_ends_all_of_them(folder: Path) -> None:
    def deliver(events: list[Event]) -> None:
        raise BrokenPipeError("nobody reads")

    lanes = Lanes(load(folder, threads=2, lanes=2), deliver)
    lanes.submit(request(1, 5))
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        lanes.run()
