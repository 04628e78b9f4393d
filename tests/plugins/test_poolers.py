"""A plugin adds an operation to the engine, and an endpoint of its own asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from jackfield import EngineRequest, ModelError, ModelSpec, PluginError, PoolerRegistry, PoolingParams, hookimpl
from jackfield.engine.process import EngineProcess
from jackfield.settings import EngineSettings
from jackfield.testing import ContractCase, contract_cases, make_client
from tests.checkpoints import save_checkpoint
from tests.http.raw import check_error
from tests.plugins import sparse

TEXTS = ["a text", "x", "another text, longer than the others, " * 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "masked": save_checkpoint(root / "masked", "bert", head="ForMaskedLM"),
        "plain": save_checkpoint(root / "plain", "bert"),
    }


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    with make_client(sparse, models={name: {"source": str(path)} for name, path in folders.items()}, real=True) as made:
        yield made


@torch.inference_mode()
def test_the_operation_is_computed_for_a_model_that_it_fits(client: httpx.Client, folders: dict[str, Path]) -> None:
    tokenizer, whole = AutoTokenizer.from_pretrained(folders["masked"]), AutoModelForMaskedLM.from_pretrained(folders["masked"]).eval()
    got = client.post("/sparse", json={"input": TEXTS})
    assert got.status_code == 200, got.text
    for text, found in zip(TEXTS, got.json()["data"], strict=True):
        ids = tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"]
        row = whole(input_ids=ids).logits[0].relu().log1p().amax(0)
        assert set(found) == {str(token) for token in np.flatnonzero(row)}
        np.testing.assert_allclose([found[str(token)] for token in np.flatnonzero(row)], row[row > 0], atol=1e-4)


def test_what_a_model_can_is_told(client: httpx.Client) -> None:
    assert client.get("/v1/models/masked").json()["operations"] == ["embed", "token_embed", "hidden_states", "sparse"]
    assert client.get("/v1/models/plain").json()["operations"] == ["embed", "token_embed", "hidden_states"]
    assert "cannot sparse" in check_error(client.post("/sparse", json={"model": "plain", "input": "x"}), 400)


@pytest.mark.parametrize("case", contract_cases(sparse), ids=str)
def test_contract(case: ContractCase) -> None:
    case.run()


def module(name: str, **hooks: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(hooks)
    return made


def with_pooler(register: Callable[[PoolerRegistry], None]) -> ModuleType:
    """The plugin with another way of adding its pooler."""

    def jackfield_poolers(registry: PoolerRegistry) -> None:
        register(registry)

    return module(
        "sparse",
        jackfield_register_endpoints=sparse.jackfield_register_endpoints,
        jackfield_poolers=hookimpl(jackfield_poolers),
    )


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("OfAll", "depends on the batch"),
        ("TooFew", "5 tensors for 6"),
        ("Double", "float64"),
        ("Broken", "no sparse_linear.pt in masked"),
        ("Missing", "has no attribute 'Missing'"),
    ],
)
def test_a_wrong_pooler_is_told_when_the_model_is_loaded(folders: dict[str, Path], factory: str, says: str) -> None:
    plugin = with_pooler(lambda registry: registry.add("sparse", f"tests.plugins.sparse_pooler:{factory}", fits=sparse.fits))
    with (
        pytest.raises(ModelError, match=says) as raised,
        make_client(plugin, models={"masked": {"source": str(folders["masked"])}}, real=True),
    ):
        pass
    assert f"tests.plugins.sparse_pooler:{factory} of 'sparse'" in str(raised.value)


def no_name(registry: PoolerRegistry) -> None:
    registry.add("a b", "x:y", fits=sparse.fits)


def taken(registry: PoolerRegistry) -> None:
    registry.add("embed", "x:y", fits=sparse.fits)


def no_path(registry: PoolerRegistry) -> None:
    registry.add("sparse", "tests/plugins/sparse_pooler.py", fits=sparse.fits)


def no_function(registry: PoolerRegistry) -> None:
    registry.add("sparse", "x:y", fits=True)  # type: ignore[arg-type]


def failing(registry: PoolerRegistry) -> None:
    def fits(card: Any, config: Any) -> bool:
        return bool(config["no_such_key"])

    registry.add("sparse", "x:y", fits=fits)


@pytest.mark.parametrize(
    ("register", "says"),
    [
        (no_name, "'a b' is no identifier"),
        (taken, "'embed' is there already"),
        (no_path, "package.module:name"),
        (no_function, "is bool"),
        (failing, "raised KeyError for model 'masked'"),
        (lambda registry: None, "names the operation 'sparse', which no engine has"),
    ],
)
def test_wrong_registrations_name_the_plugin(folders: dict[str, Path], register: Callable[[PoolerRegistry], None], says: str) -> None:
    with (
        pytest.raises(PluginError, match=says) as raised,
        make_client(with_pooler(register), models={"masked": {"source": str(folders["masked"])}}, real=True),
    ):
        pass
    assert "'sparse'" in str(raised.value)


def test_two_plugins_with_one_operation(folders: dict[str, Path]) -> None:
    other = module("another", jackfield_poolers=sparse.jackfield_poolers)
    with (
        pytest.raises(PluginError, match="plugins 'another' and 'sparse' both add the operation 'sparse'"),
        make_client(sparse, other, models={"masked": {"source": str(folders["masked"])}}, real=True),
    ):
        pass


def test_in_a_process_of_its_own(folders: dict[str, Path]) -> None:
    """Only the engine's process imports the pooler."""
    spec = ModelSpec(id="masked", path=str(folders["masked"]), poolers={"sparse": "tests.plugins.sparse_pooler:SparsePooler"})
    ids = np.array([1, 100, 150, 2], dtype=np.int32)

    async def run() -> Any:
        engine = EngineProcess([spec], EngineSettings(threads=1))
        try:
            cards = await engine.start()
            assert "sparse" in cards["masked"].operations
            params = PoolingParams(outputs=("sparse", "embed"))
            return await engine.submit(EngineRequest(id=1, model="masked", token_ids=[ids.tobytes()] * 2, params=params))
        finally:
            await engine.stop()

    outputs = asyncio.run(run())
    with torch.inference_mode():
        whole = AutoModelForMaskedLM.from_pretrained(folders["masked"]).eval()
        right = whole(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].relu().log1p().amax(0)
    np.testing.assert_allclose(outputs["sparse"], [right, right], atol=1e-4)
    assert outputs["embed"][0].shape == (32,)
