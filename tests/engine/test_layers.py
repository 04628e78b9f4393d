"""Layers put in place of a model's own compute what those did, for every class that is replaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

from jackfield.engine.layers import PostNormLayer, replace_layers
from jackfield.engine.linear import replace_linears

SIZES = {"vocab_size": 90, "max_position_embeddings": 40, "initializer_range": 0.3}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
MODELS = {
    "Bert": BERT,
    "Camembert": BERT,
    "Data2VecText": BERT,
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Electra": {**BERT, "embedding_size": 16},
    "Ernie": BERT,
    "Roberta": BERT,
    "XLMRoberta": BERT,
}


def model(name: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], **options)
    built: torch.nn.Module = getattr(transformers, f"{name}Model")(config).eval().requires_grad_(False)
    return built


@torch.inference_mode()
def hidden(built: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(5, 35).view(2, 15)
    states: torch.Tensor = built(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return states


def check(built: torch.nn.Module) -> None:
    before = hidden(built)
    assert replace_layers(built) == 2
    assert sum(isinstance(module, PostNormLayer) for module in built.modules()) == 2
    replace_linears(built)
    torch.testing.assert_close(hidden(built), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_each_class(name: str) -> None:
    check(model(name))


@pytest.mark.parametrize(("name", "option"), [("Bert", {"hidden_act": "gelu_new"}), ("DistilBert", {"activation": "relu"})])
def test_other_activations(name: str, option: dict[str, str]) -> None:
    check(model(name, **option))


def test_a_decoder_stays_as_it_is() -> None:
    assert replace_layers(model("Bert", is_decoder=True)) == 0


def test_linear_layers_alone_and_on_several_threads() -> None:
    """The layers that are not replaced as a whole: joined ones keep what they have computed until each part was asked for."""
    built = model("Bert")
    before = hidden(built)
    replace_linears(built)
    with ThreadPoolExecutor(4) as pool:
        for states in pool.map(hidden, [built] * 200):
            torch.testing.assert_close(states, before, rtol=1e-4, atol=1e-5)
