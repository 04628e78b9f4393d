"""The models that the cases name, and one server over all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cases.bench import QUICK, Bench, serving
from tests.checkpoints import save_checkpoint, save_sentence_transformer


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


@pytest.fixture(scope="session")
def one_model(minilm: str) -> str:
    """The tables of a server that a case ends or harms: what it is asked needs no second model, whose load would be waited for again."""
    return f'[models.minilm]\nsource = "{minilm}"\n[endpoints.embed]\n'


@pytest.fixture(scope="session")
def mended(tmp_path_factory: pytest.TempPathFactory, one_model: str) -> Iterator[Bench]:
    """A server whose engine the cases stop and kill: it stays, with a new one. Each of them first waits until it is whole."""
    with serving(tmp_path_factory.mktemp("mended"), one_model, *QUICK) as running:
        yield running


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


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Bench]:
    """A server that chats, in float32."""
    tables = f'[models.smollm2]\nsource = "{smollm2}"\ndtype = "float32"\n[endpoints.chat]\n[endpoints.tokenize]\n'
    with serving(tmp_path_factory.mktemp("smol"), tables) as running:
        yield running


# Heads of tiny BERTs with MiniLM's tokenizer, by the names that families B and C give them.
HEADS: dict[str, dict[str, Any]] = {
    "bert-ce": {"num_labels": 1},
    "bert-ce-id": {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    "bert-ce-id-old": {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    "bert-clf-3": {"num_labels": 3},
    "clf-multi": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "clf-single": {"num_labels": 3, "problem_type": "single_label_classification"},
    "clf-regression": {"num_labels": 1, "problem_type": "regression"},
    "clf-regression-3": {"num_labels": 3, "problem_type": "regression"},
    "clf-named": {"id2label": {0: "NEG", 1: "POS"}},
    "clf-unnamed": {"num_labels": 2},
    "clf-hole": {"num_labels": 2},
    "clf-20": {"num_labels": 20},
    "bert-clf": {"num_labels": 2},
    "nan-clf": {"num_labels": 2},
}


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory, minilm: str) -> dict[str, Path]:
    """The folders of `HEADS`."""
    root = tmp_path_factory.mktemp("heads")
    made: dict[str, Path] = {}
    for seed, (name, more) in enumerate(HEADS.items()):
        folder = save_checkpoint(root / name, "bert", head="ForSequenceClassification", seed=seed, vocab_size=30522, longer=384, **more)
        for path in Path(minilm).glob("*token*"):
            shutil.copy(path, folder / path.name)
        shutil.copy(Path(minilm) / "vocab.txt", folder / "vocab.txt")
        made[name] = folder
    poison(made["nan-clf"], "classifier.weight", 0)
    edit(made["clf-unnamed"], {"id2label": None, "num_labels": 2})
    edit(made["clf-hole"], {"id2label": {"1": "POS"}, "num_labels": 2})
    edit(made["clf-20"], {"id2label": None, "num_labels": 20})
    return made


def edit(folder: Path, changes: dict[str, object]) -> None:
    """Change keys of a config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    config.pop("label2id", None)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory, heads: dict[str, Path], minilm: str) -> Iterator[Bench]:
    """One server over all heads and an embedder, with every endpoint."""
    tables = [f'[models."{name}"]\nsource = "{folder}"\nmax_length = 512' for name, folder in heads.items()]
    tables.append(f'[models.minilm]\nsource = "{minilm}"')
    tables += [f"[endpoints.{name}]" for name in ("embed", "score", "rerank", "classify", "tokenize")]
    with serving(tmp_path_factory.mktemp("scorer"), "\n".join(tables)) as running:
        yield running
