"""An engine's numbers never depend on what runs beside a prompt, in which order it came, or on the size of a step: tiny real models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from jackfield.client import EngineRequest, ModelSpec
from jackfield.engine.core import Engine
from jackfield.outputs import FloatArray, PoolingOutputs
from jackfield.params import PoolingParams
from jackfield.settings import EngineSettings
from tests.checkpoints import VOCAB, save_sentence_transformer

KINDS = ("bert", "roberta", "distilbert", "mpnet")
# Around the steps of a small block (16) and the sizes of whole ones (64, 128).
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129)
# Less than most prompts, less than most batches, and room for all.
BUDGETS = (20, 150, 8192)
FORMS = (
    PoolingParams(outputs=("embed",)),
    PoolingParams(outputs=("hidden_states", "embed"), use_activation=False),
    PoolingParams(outputs=("token_embed",)),
)
ATOL = 1e-5


class Prompt(NamedTuple):
    """So many tokens of one of a few endless texts; the first `prefix` of them are an instruction, which is not pooled."""

    length: int
    text: int
    prefix: int = 0

    @property
    def ids(self) -> bytes:
        drawn = np.random.default_rng(self.text).integers(4, VOCAB, max(LENGTHS))
        return drawn[: self.length].astype(np.int32).tobytes()


class Ask(NamedTuple):
    """A request, and what happens after it: whether it is aborted, and how many steps run before the next one comes."""

    prompts: list[Prompt]
    form: int
    priority: int = 0
    aborted: bool = False
    steps: int = 0


prompts = st.builds(Prompt, length=st.sampled_from(LENGTHS), text=st.integers(0, 2), prefix=st.sampled_from([0, 0, 1, 3]))
asks = st.builds(
    Ask,
    prompts=st.lists(prompts, min_size=1, max_size=5),
    form=st.integers(0, len(FORMS) - 1),
    priority=st.integers(-1, 1),
    aborted=st.sampled_from([False, False, False, True]),
    steps=st.sampled_from([0, 0, 0, 1, 2]),
)
# Every length twice, longest first, in one request: one step of equal and of unequal neighbours, where the budget allows it.
ALL_LENGTHS = [Ask([Prompt(length, text=0) for length in reversed(LENGTHS) for _ in range(2)], form=1)]
# Many short ones, no two alike: blocks that hold several.
CROWD = [Ask([Prompt(length, text) for text in range(3) for length in LENGTHS if length < 64], form=1)]
# One text by three instructions and in three forms: alike in their tokens, and not in their results.
ALIKE = [Ask([Prompt(17, 1, prefix) for prefix in (0, 3, 1)], form) for form in range(len(FORMS))]


class Bench:
    """Models of one kind, an engine for each budget, and what each prompt gives when it is alone."""

    def __init__(self, folder: str, execution: str) -> None:
        self.folder = folder
        self._spec = ModelSpec(id="m", path=folder, max_length=max(LENGTHS))
        self._execution = execution
        self._alone: dict[tuple[Prompt, int], dict[str, FloatArray]] = {}
        self._engines: dict[int, Engine] = {}
        self._next_id = 0

    def engine(self, budget: int) -> Engine:
        if budget not in self._engines:
            engine = Engine(EngineSettings(threads=1, token_budget=budget))
            card = engine.load([self._spec], lambda progress: None)["m"]
            assert card.execution == self._execution
            self._engines[budget] = engine
        return self._engines[budget]

    def request(self, ask: Ask) -> EngineRequest:
        self._next_id += 1
        return EngineRequest(
            id=self._next_id,
            model="m",
            token_ids=[prompt.ids for prompt in ask.prompts],
            prefix_lengths=[min(prompt.prefix, prompt.length - 1) for prompt in ask.prompts],
            params=FORMS[ask.form],
            priority=ask.priority,
        )

    def alone(self, prompt: Prompt, form: int) -> dict[str, FloatArray]:
        if (prompt, form) not in self._alone:
            (values,) = self.run(max(BUDGETS), [Ask([prompt], form)])
            self._alone[prompt, form] = {name: rows[0] for name, rows in values.items()}
        return self._alone[prompt, form]

    def run(self, budget: int, batch: list[Ask]) -> list[dict[str, list[FloatArray]]]:
        """What each request that was not aborted gives; whatever the engine still has is finished first."""
        engine = self.engine(budget)
        requests = [self.request(ask) for ask in batch]
        events = []
        for ask, request in zip(batch, requests, strict=True):
            engine.submit(request)
            if ask.aborted:
                engine.abort(request.id)
            for _ in range(ask.steps):
                events += engine.step()
        while engine.has_work():
            events += engine.step()
        kept = [request.id for ask, request in zip(batch, requests, strict=True) if not ask.aborted]
        assert sorted(request_id for request_id, _ in events) == kept, "not one event for each request"
        outcomes = dict(events)
        values = []
        for request_id in kept:
            outcome = outcomes[request_id]
            assert isinstance(outcome, PoolingOutputs), outcome
            values.append(outcome.values)
        return values

    def check(self, budget: int, batch: list[Ask]) -> None:
        """Raises: AssertionError where a result differs from the prompt's own."""
        kept = [ask for ask in batch if not ask.aborted]
        for ask, values in zip(kept, self.run(budget, batch), strict=True):
            assert set(values) == set(FORMS[ask.form].outputs)
            for name, rows in values.items():
                assert len(rows) == len(ask.prompts)
                for prompt, row in zip(ask.prompts, rows, strict=True):
                    np.testing.assert_allclose(row, self.alone(prompt, ask.form)[name], rtol=0, atol=ATOL, err_msg=f"{name} of {prompt}")


@pytest.fixture(scope="module", params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    kind: str = request.param
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": False}
    folder = save_sentence_transformer(tmp_path_factory.mktemp(kind), kind, pooling=pooling, max_seq_length=None, longer=1)
    return Bench(str(folder), "buckets" if kind == "mpnet" else "packed")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(batch=ALL_LENGTHS, budget=max(BUDGETS))
@example(batch=CROWD, budget=max(BUDGETS))
@example(batch=ALIKE, budget=max(BUDGETS))
@given(batch=st.lists(asks, min_size=1, max_size=6), budget=st.sampled_from(BUDGETS))
def test_no_result_depends_on_its_neighbours(bench: Bench, batch: list[Ask], budget: int) -> None:
    bench.check(budget, batch)


def test_alone_is_what_transformers_gives(bench: Bench) -> None:
    """What the property compares with is right itself: hidden states at every length, by transformers' own attention."""
    model = AutoModel.from_pretrained(bench.folder, attn_implementation="eager")
    for prompt in (Prompt(length, text=2) for length in LENGTHS):
        with torch.inference_mode():
            ids = torch.from_numpy(np.frombuffer(prompt.ids, np.int32).astype(np.int64))[None]
            theirs = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].numpy()
        ours = bench.alone(prompt, form=1)
        np.testing.assert_allclose(ours["hidden_states"], theirs, rtol=0, atol=ATOL)
        np.testing.assert_allclose(ours["embed"], theirs.mean(0), rtol=0, atol=ATOL)
        assert float(np.abs(ours["embed"]).max()) > 0.1


def test_the_property_can_fail(bench: Bench) -> None:
    """Prompts that differ give vectors further apart than the tolerance, so that a mixed-up answer is seen."""
    rows = [bench.alone(Prompt(length, text), 0)["embed"] for length in LENGTHS for text in range(3)]
    rows += [bench.alone(Prompt(17, 1, prefix), 0)["embed"] for prefix in (1, 3)]
    distances = [float(np.abs(one - other).max()) for number, one in enumerate(rows) for other in rows[:number]]
    assert min(distances) > 100 * ATOL
