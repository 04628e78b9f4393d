"""Real tiny models of each kind behind the endpoint, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from jackfield.testing import RunningServer, make_server
from jackfield_tei import TeiEndpoint
from tests.checkpoints import save_checkpoint

HEAD = "ForSequenceClassification"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tei")
    return {
        "base": save_checkpoint(root / "base", "bert"),
        "mood": save_checkpoint(root / "mood", "bert", head=HEAD, num_labels=3, id2label={0: "sad", 1: "calm", 2: "glad"}),
        "ranker": save_checkpoint(root / "ranker", "bert", head=HEAD, num_labels=1),
    }


@pytest.fixture(scope="session")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    models = {name: {"source": str(folder)} for name, folder in folders.items()}
    with make_server(TeiEndpoint(), models=models, real=True) as running:
        yield running


@torch.inference_mode()
def states_of(folder: Path, texts: list[str]) -> list[np.ndarray[Any, Any]]:
    """Last hidden states, `[tokens, hidden]` a text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    encoded = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    return [model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].numpy() for ids in encoded]


def vectors_of(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """Means of states, of length 1."""
    means = np.stack([states.mean(axis=0) for states in states_of(folder, texts)])
    unit: np.ndarray[Any, Any] = means / np.linalg.norm(means, axis=1, keepdims=True)
    return unit


@torch.inference_mode()
def logits_of(folder: Path, texts: list[tuple[str, ...]]) -> np.ndarray[Any, Any]:
    """Logits of texts and pairs, `[n, labels]`."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = [tokenizer(*text, return_tensors="pt", return_token_type_ids=True) for text in texts]
    wanted = ("input_ids", "attention_mask", "token_type_ids")
    return torch.cat([model(**{name: one[name] for name in wanted if name in one}).logits for one in encoded]).numpy()
