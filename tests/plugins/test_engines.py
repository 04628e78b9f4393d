"""A model's engine by name, and another forward pass in jackfield's own engine."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jackfield import (
    ConfigError,
    Endpoint,
    EngineClient,
    EngineRequest,
    EngineSettings,
    ModelError,
    ModelSpec,
    PluginError,
    PoolingParams,
    hookimpl,
)
from jackfield.engine import local_engine
from jackfield.testing import FakeEngine, RunningServer, make_server
from jackfield_classify import ClassifyEndpoint
from jackfield_embed import EmbedEndpoint
from jackfield_pooling import PoolingEndpoint
from jackfield_score import ScoreEndpoint
from tests.checkpoints import save_checkpoint, save_sentence_transformer
from tests.conftest import Run, Write
from tests.plugins import plain_backend, sparse

TEXTS = ["a text", "x", "another text, longer than the others by a lot", ""]


class Plain:
    """A plugin that brings a forward pass of its own."""

    def __init__(self, backend: str = "load") -> None:
        self.backend = f"tests.plugins.plain_backend:{backend}"
        self.specs: list[ModelSpec] = []
        self.engine: EngineClient | None = None

    @hookimpl
    def jackfield_engine(self, spec: ModelSpec, settings: EngineSettings, log_level: str) -> EngineClient | None:
        assert settings.threads == 1
        assert log_level == "info"
        if spec.engine != "plain":
            return None
        self.specs.append(spec)
        self.engine = self.engine or local_engine(self.specs, settings, backend=self.backend)
        return self.engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "masked": save_checkpoint(root / "masked", "bert", head="ForMaskedLM"),
        "vectors": save_sentence_transformer(root / "vectors", "roberta", dense=[(16, "torch.nn.modules.activation.Tanh")]),
        "classes": save_checkpoint(root / "classes", "bert", head="ForSequenceClassification", num_labels=3),
        "ranker": save_checkpoint(root / "ranker", "distilbert", head="ForSequenceClassification", num_labels=1),
        "tokens": save_checkpoint(root / "tokens", "bert", head="ForTokenClassification", num_labels=3),
    }


ENDPOINTS: list[type[Endpoint[Any, Any]]] = [EmbedEndpoint, ClassifyEndpoint, PoolingEndpoint, ScoreEndpoint]


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    """Every model twice: on torch, and on the plugin's backend."""
    models = {
        f"{name}-{engine}": {"source": str(path), "engine": engine} for name, path in folders.items() for engine in ("torch", "plain")
    }
    with make_server(*(kind() for kind in ENDPOINTS), Plain(), sparse, models=models, real=True) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/v1/embeddings", "masked", {"input": TEXTS[:3]}),
        ("/v1/embeddings", "vectors", {"input": TEXTS[:3]}),
        ("/classify", "classes", {"input": TEXTS}),
        ("/score", "ranker", {"queries": "what?", "documents": TEXTS[:3]}),
        ("/score", "masked", {"queries": "what?", "documents": TEXTS[:3]}),
        ("/pooling", "tokens", {"input": TEXTS, "task": "token_classify"}),
        ("/sparse", "masked", {"input": TEXTS}),
    ],
)
def test_all_operations_work_on_a_backend(server: RunningServer, path: str, model: str, body: dict[str, Any]) -> None:
    with server.client() as client:
        answers = [client.post(path, json={**body, "model": f"{model}-{engine}"}) for engine in ("torch", "plain")]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    right, got = ([numbers(item) for item in answer.json()["data"]] for answer in answers)
    for one, other in zip(right, got, strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5)


def numbers(item: Any) -> Any:
    """Whatever an item holds."""
    value = next((item[key] for key in ("embedding", "probs", "score", "data") if key in item), item)
    return list(value.values()) if isinstance(value, dict) else value


def test_what_is_told_of_it(server: RunningServer) -> None:
    with server.client() as client:
        entry = client.get("/v1/models/masked-plain").json()
        assert (entry["execution"], entry["dtype"], entry["device"]) == ("other", "float32", "cpu")
        assert "sparse" in entry["operations"]
        assert client.get("/health").json()["engines"] == {"plain": "ready", "torch": "ready"}
        assert 'jackfield_engine_up{engine="plain"} 1.0' in client.get("/metrics").text


def test_the_torch_model_is_let_go(server: RunningServer) -> None:
    gc.collect()
    assert plain_backend.seen["torch"]() is None


def test_the_factory_is_told_how_to_run(server: RunningServer) -> None:
    assert plain_backend.seen["dtype"] == "float32"
    settings = plain_backend.seen["settings"]
    assert (settings.threads, settings.lanes) == (1, 1)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("off", r"plain_backend:off does not give what torch gives \(relative difference 1.0e-02 .*\); engine = \"torch\" runs it"),
        ("short", r"the backend gave torch.float32 of the shape \(\d+, 32\) for \d+ tokens"),
        ("broken", "model 'm': the backend tests.plugins.plain_backend:broken raised RuntimeError: no such device"),
        ("refusing", "^model 'm': not this one$"),
        ("missing", "raised AttributeError"),
    ],
)
def test_a_backend_that_is_wrong(folders: dict[str, Path], backend: str, reason: str) -> None:
    models = {"m": {"source": str(folders["vectors"]), "engine": "plain"}}
    with pytest.raises(ModelError, match=reason), make_server(EmbedEndpoint(), Plain(backend), models=models, real=True):
        pass


def test_in_a_process_of_its_own(folders: dict[str, Path]) -> None:
    """Two lanes call the backend at once; a NumPy array will do. Steps are signs of life, whatever the backend does in them."""
    specs = [ModelSpec(id="m", path=str(folders["vectors"]))]
    ids = np.array([0, 100, 150, 2], dtype=np.int32)

    async def run() -> Any:
        settings = EngineSettings(threads=2, heartbeat_s=0.1, stall_s=0.8)
        engine = local_engine(specs, settings, backend="tests.plugins.plain_backend:slow")
        try:
            await engine.start()
            params = PoolingParams(outputs=("embed",))
            requests = [EngineRequest(id=n, model="m", token_ids=[ids[: n % 3 + 2].tobytes()] * (n + 1), params=params) for n in range(9)]
            outputs = await asyncio.gather(*(engine.submit(request) for request in requests))
            prompts = [np.arange(number, number + 60, dtype=np.int32).tobytes() for number in range(200)]
            begun = time.monotonic()
            await engine.submit(EngineRequest(id=len(requests), model="m", token_ids=prompts, params=params))
            assert time.monotonic() - begun > settings.stall_s
            return outputs
        finally:
            await engine.stop()

    for number, outputs in enumerate(asyncio.run(run())):
        assert [vector.shape for vector in outputs["embed"]] == [(16,)] * (number + 1)


def test_torch_is_a_name(folders: dict[str, Path]) -> None:
    """Nobody is asked, whoever would take every model."""
    models = {"m": {"source": str(folders["vectors"]), "engine": "torch"}}
    with make_server(EmbedEndpoint(), Everything(), models=models, real=True) as server, server.client() as client:
        assert client.get("/health").json()["engines"] == {"torch": "ready"}


class Everything(FakeEngine):
    """Takes what it is offered, and asks for less than the hook has."""


def test_an_engine_that_offers_itself(folders: dict[str, Path]) -> None:
    models = {name: {"source": str(folders["vectors"])} for name in ("m", "n")}
    with make_server(EmbedEndpoint(), Everything(), models=models, real=True) as server, server.client() as client:
        assert client.get("/health").json()["engines"] == {"m": "ready"}
        assert client.get("/v1/models/n").json()["execution"] == "other"


def test_an_engine_that_nobody_has(folders: dict[str, Path]) -> None:
    models = {"m": {"source": str(folders["vectors"]), "engine": "plian"}}
    with (
        pytest.raises(
            ConfigError, match=r"^\[models.m\] engine = 'plian': no plugin .*pip install jackfield-plian.*loaded plugins: Plain\.$"
        ),
        make_server(EmbedEndpoint(), Plain(), models=models, real=True),
    ):
        pass


def test_an_engine_that_is_none(folders: dict[str, Path]) -> None:
    class Wrong:
        @hookimpl
        def jackfield_engine(self, spec: ModelSpec) -> str:
            return "an engine"

    models = {"m": {"source": str(folders["vectors"])}}
    with (
        pytest.raises(PluginError, match="jackfield_engine gave str for model 'm'"),
        make_server(EmbedEndpoint(), Wrong(), models=models, real=True),
    ):
        pass


def test_what_a_model_cannot_is_found_before_anything_is_loaded(run: Run, write: Write, folders: dict[str, Path]) -> None:
    """As with torch, since the engine reads the same files."""
    path = write(f'[models.m]\nsource = "{folders["classes"]}"\nengine = "openvino"\n[endpoints.embed]\nmodels = ["m"]')
    code, _, err = run("check", str(path))
    assert code == 2
    assert "bound to model 'm', which cannot embed" in err


def test_the_name_of_an_engine_enables_its_plugin(run: Run, write: Write, folders: dict[str, Path]) -> None:
    path = write(f'[models.m]\nsource = "{folders["vectors"]}"\nengine = "openvino"\n[endpoints.embed]')
    assert run("check", str(path))[:2] == (0, "ok: 1 models (m), endpoints embed\n")
    assert "openvino\tjackfield-openvino\t0.1.0\tloaded" in run("plugins", str(path))[1]
    path = write(f'[models.m]\nsource = "{folders["vectors"]}"\nengine = "none"\n[endpoints.embed]')
    code, _, err = run("check", str(path))
    assert code == 2
    assert "[models.m] engine = 'none': no plugin supplies it" in err
