"""`tiny:` models: random weights, made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from jackfield import ModelError
from jackfield.testing import make_client, tiny_model
from jackfield_classify import ClassifyEndpoint
from jackfield_classify.tokens import TokenClassifyEndpoint
from jackfield_embed import EmbedEndpoint
from jackfield_score import RerankEndpoint


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JACKFIELD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("bert", AutoModel),
        ("ranker", AutoModelForSequenceClassification),
        ("classifier", AutoModelForSequenceClassification),
        ("entities", AutoModelForTokenClassification),
    ],
)
def test_transformers_loads_them_whole(kind: str, auto: Any) -> None:
    model, info = auto.from_pretrained(tiny_model(kind), output_loading_info=True)
    assert {key for key in info["missing_keys"] if "pooler" not in key} == set()
    assert not info["unexpected_keys"]
    assert float(next(model.parameters()).detach().std()) == pytest.approx(0.25, abs=0.05)
    assert tiny_model(kind) == tiny_model(kind)
    assert Path(tiny_model(kind)).parent.parent.name.startswith("cache")


def test_they_serve() -> None:
    models = {kind: {"source": f"tiny:{kind}"} for kind in ("bert", "ranker", "classifier", "entities")}
    endpoints = (EmbedEndpoint(), RerankEndpoint(), ClassifyEndpoint(), TokenClassifyEndpoint())
    with make_client(*endpoints, models=models, real=True) as client:
        assert len(client.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]) == 32
        for path, body in (
            ("/rerank", {"model": "ranker", "query": "a", "documents": ["b"]}),
            ("/classify", {"model": "classifier", "input": "a"}),
            ("/token_classify", {"model": "entities", "input": "a"}),
            ("/v1/embeddings", {"model": "bert", "messages": [{"role": "user", "content": "a"}]}),
        ):
            assert client.post(path, json=body).status_code == 200


def test_another_kind_is_told() -> None:
    with (
        pytest.raises(ModelError, match="'tiny:t5' is none of tiny:bert"),
        make_client(EmbedEndpoint(), models={"m": {"source": "tiny:t5"}}),
    ):
        pass
