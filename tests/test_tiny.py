"""`tiny:` models: random weights, made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from jackfield import ModelError
from jackfield.testing import make_client, tiny_model
from jackfield.tiny import KINDS, write_tiny
from jackfield_chat import ChatEndpoint
from jackfield_classify import ClassifyEndpoint
from jackfield_classify.tokens import TokenClassifyEndpoint
from jackfield_completions import CompletionsEndpoint
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
        ("llama", AutoModelForCausalLM),
    ],
)
def test_transformers_loads_them_whole(kind: str, auto: Any) -> None:
    model, info = auto.from_pretrained(tiny_model(kind), output_loading_info=True)
    assert {key for key in info["missing_keys"] if "pooler" not in key} == set()
    assert not info["unexpected_keys"]
    assert float(next(model.parameters()).detach().std()) == pytest.approx(0.25, abs=0.05)
    assert tiny_model(kind) == tiny_model(kind)
    assert Path(tiny_model(kind)).parent.parent.name.startswith("cache")


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_same_wherever_they_are_made(tmp_path: Path, kind: str) -> None:
    write_tiny(tmp_path, kind)
    made = Path(tiny_model(kind))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {path.name: path.read_bytes() for path in made.iterdir()}


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


def test_one_generates() -> None:
    """Chat, completions and vectors of one model, and the texts are those that transformers generates."""
    hello = [{"role": "user", "content": "Hello"}]
    endpoints = (ChatEndpoint(), CompletionsEndpoint(), EmbedEndpoint())
    with make_client(*endpoints, models={"llama": {"source": "tiny:llama"}}, real=True) as client:
        assert len(client.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]) == 32
        greedy = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
        answers = [
            client.post("/v1/chat/completions", json={"messages": hello, **greedy}),
            client.post("/v1/completions", json={"prompt": "Hello", **greedy}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    chat, text = (answer.json() for answer in answers)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model("llama")), AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    rendered = tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=True)
    assert rendered == "<s>[user]Hello</s>[assistant]"
    for choice, ids, prompt in (
        (chat["choices"][0], chat["prompt_token_ids"], tokenizer(rendered, add_special_tokens=False, return_tensors="pt")),
        (text["choices"][0], text["choices"][0]["prompt_token_ids"], tokenizer("Hello", return_tensors="pt")),
    ):
        assert ids == prompt["input_ids"][0].tolist()
        whole = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0].tolist()
        assert choice["token_ids"] == whole[len(ids) :]


def test_its_end_token_ends_a_text() -> None:
    with make_client(CompletionsEndpoint(), models={"llama": {"source": "tiny:llama"}}, real=True) as client:
        body = {"prompt": "Hello", "max_tokens": 8, "allowed_token_ids": [1], "return_token_ids": True}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ("", [1], "stop", None)


def test_another_kind_is_told() -> None:
    with (
        pytest.raises(ModelError, match="'tiny:t5' is none of tiny:bert"),
        make_client(EmbedEndpoint(), models={"m": {"source": "tiny:t5"}}),
    ):
        pass
