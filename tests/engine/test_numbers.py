"""The engine's vectors against sentence-transformers and transformers, computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from jackfield.client import EngineRequest, ModelSpec
from jackfield.engine.core import Engine
from jackfield.outputs import PoolingOutputs
from jackfield.params import PoolingParams
from jackfield.prompts import TextPrompt
from jackfield.settings import EngineSettings
from jackfield.tokenization import ModelTokenizer, pack_ids
from tests.checkpoints import IN_BUCKETS, KINDS, save_checkpoint, save_sentence_transformer

TEXTS = [
    "The cat sits outside",
    "a",
    "",
    "A man is playing guitar while the band waits",
    "x" * 200,
    "The cat sits outside",
    "naïve café 🌍",
]


class Harness:
    """A loaded model with its tokenizer."""

    def __init__(self, folder: Path | str, **options: Any) -> None:
        self.engine = Engine(EngineSettings(threads=1))
        spec = ModelSpec(id="m", path=str(folder), **options)
        self.card = self.engine.load([spec], lambda step: None)["m"]
        self.tokenizer = ModelTokenizer(self.card)

    def run(self, texts: list[str], params: PoolingParams, prefix: str = "") -> PoolingOutputs:
        prompts = self.tokenizer([TextPrompt(text=text, prefix=prefix, truncate=-1) for text in texts])
        request = EngineRequest(
            id=1,
            model="m",
            token_ids=[pack_ids(p.token_ids) for p in prompts],
            prefix_lengths=[p.prefix_length for p in prompts],
            params=params,
        )
        self.engine.submit(request)
        events = []
        while self.engine.has_work():
            events += self.engine.step()
        assert [request_id for request_id, _ in events] == [1]
        outcome = events[0][1]
        assert isinstance(outcome, PoolingOutputs), outcome
        return outcome

    def embed(self, texts: list[str], **params: Any) -> np.ndarray:
        prefix = params.pop("prefix", "")
        return np.stack(self.run(texts, PoolingParams(outputs=("embed",), **params), prefix)["embed"])


def reference(folder: Path | str, texts: list[str], **options: Any) -> np.ndarray:
    model = SentenceTransformer(str(folder), device="cpu")
    vectors = [model.encode([text], **options)[0] for text in texts]  # one by one: no padding anywhere
    return np.stack(vectors)


def assert_close(ours: np.ndarray, theirs: np.ndarray, atol: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    scale = max(1.0, float(np.abs(theirs).max()))
    assert float(np.abs(ours - theirs).max()) <= atol * scale
    cosine = (ours * theirs).sum(1) / (np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1))
    assert float(cosine.min()) >= 1 - 1e-5


def test_minilm(minilm: str) -> None:
    harness = Harness(minilm)
    assert harness.card.execution == "packed"
    assert harness.card.max_length == 256
    texts = [*TEXTS, "".join(f"sentence number {i} about topic {i % 7}. " for i in range(120))]
    assert_close(harness.embed(texts), reference(minilm, texts))


@pytest.mark.parametrize("kind", KINDS)
def test_architectures(kind: str, tmp_path: Path) -> None:
    """Every architecture, with lengths up to the model's limit, packed unless it cannot be."""
    folder = save_sentence_transformer(tmp_path / kind, kind, max_seq_length=None)
    harness = Harness(folder)
    assert harness.card.execution == ("buckets" if kind in IN_BUCKETS else "packed")
    assert harness.card.max_length == 128
    texts = [*TEXTS, "y" * 300, *(chr(97 + n % 26) * n for n in range(1, 126, 9))]
    assert_close(harness.embed(texts), reference(folder, texts))


def test_lengths_across_a_rope_switch_are_not_mixed(tmp_path: Path) -> None:
    """From 33 tokens on this model turns its positions by other frequencies, and it keeps those of the batch before."""
    folder = save_sentence_transformer(tmp_path / "m", "longrope", max_seq_length=None)
    harness = Harness(folder)
    texts = ["x" * n for n in (20, 60, 5, 100, 30, 31, 29)]
    expected = reference(folder, texts)
    assert_close(harness.embed(texts), expected)
    for text, vector in zip(texts, expected, strict=True):
        assert_close(harness.embed([text]), vector[None])


def test_dynamic_rope_ends_where_it_was_trained(tmp_path: Path) -> None:
    """Beyond, its frequencies depend on the longest text that it has ever met."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = save_checkpoint(tmp_path / "m", "llama", rope_parameters=rope)
    assert Harness(folder).card.max_length == 32


@pytest.mark.parametrize(
    "pooling",
    [
        {"word_embedding_dimension": 32, "pooling_mode_cls_token": True},
        {"word_embedding_dimension": 32, "pooling_mode_max_tokens": True},
        {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        {"word_embedding_dimension": 32, "pooling_mode_mean_sqrt_len_tokens": True},
        {"word_embedding_dimension": 32, "pooling_mode_weightedmean_tokens": True},
        {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True},
        {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True},
        {"embedding_dimension": 32, "pooling_mode": ["lasttoken", "weightedmean"]},
        {"word_embedding_dimension": 32},
    ],
    ids=lambda p: "+".join(k.removeprefix("pooling_mode_") for k in p if k.startswith("pooling_mode")) or "default",
)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_modes(pooling: dict[str, Any], normalize: bool, tmp_path: Path) -> None:
    folder = save_sentence_transformer(tmp_path / "m", pooling=pooling, normalize=normalize)
    assert_close(Harness(folder).embed(TEXTS), reference(folder, TEXTS))


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_instruction_left_out_of_the_vector(mode: str, tmp_path: Path) -> None:
    pooling = {"embedding_dimension": 32, "pooling_mode": mode, "include_prompt": False}
    folder = save_sentence_transformer(tmp_path / "m", pooling=pooling, prompts={"query": "Find this: "})
    harness = Harness(folder)
    assert harness.card.exclude_prompt
    texts = [t for t in TEXTS if len(t) < 40]
    assert_close(harness.embed(texts, prefix="Find this: "), reference(folder, texts, prompt_name="query"))
    assert_close(harness.embed(texts), reference(folder, texts))


@pytest.mark.parametrize(
    "activation", ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.GELU"]
)
def test_dense(activation: str, tmp_path: Path) -> None:
    folder = save_sentence_transformer(tmp_path / "m", dense=[(48, activation), (24, activation)])
    harness = Harness(folder)
    assert harness.card.embedding_size == 24
    assert_close(harness.embed(TEXTS), reference(folder, TEXTS))


def test_lower_case(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tmp_path / "m", do_lower_case=True)
    harness = Harness(folder)
    texts = ["The CAT sits OUTSIDE", "the cat sits outside"]
    ours = harness.embed(texts)
    assert_close(ours, reference(folder, texts))
    assert_close(ours[:1], ours[1:])


@pytest.mark.parametrize(("asked", "positions", "limit"), [(64, 128, 64), (None, 128, 128), (500, 128, 128)])
def test_maximum_length(asked: int | None, positions: int, limit: int, tmp_path: Path) -> None:
    """As sentence-transformers decides it, except where that is more than the model has positions."""
    folder = save_sentence_transformer(tmp_path / "m", "bert", max_seq_length=asked)
    harness = Harness(folder)
    assert harness.card.max_length == limit
    if asked != 500:
        model = SentenceTransformer(str(folder), device="cpu")
        assert model.max_seq_length == limit
        assert_close(harness.embed(["z" * 400]), reference(folder, ["z" * 400]))


def test_plain_folder_takes_the_mean(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", "bert")
    harness = Harness(folder)
    assert any("mean" in note for note in harness.card.notes)
    theirs = reference(folder, TEXTS)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    assert_close(harness.embed(TEXTS), theirs)


def test_pooling_by_configuration(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tmp_path / "a")
    cls = save_sentence_transformer(tmp_path / "b", pooling={"embedding_dimension": 32, "pooling_mode": "cls"})
    assert_close(Harness(folder, pooling="cls").embed(TEXTS), reference(cls, TEXTS))


def test_token_states(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tmp_path / "m")
    harness = Harness(folder)
    model = SentenceTransformer(str(folder), device="cpu")
    outputs = harness.run(TEXTS, PoolingParams(outputs=("token_embed", "hidden_states", "embed"), use_activation=False))
    for text, tokens, hidden, vector in zip(TEXTS, outputs["token_embed"], outputs["hidden_states"], outputs["embed"], strict=True):
        theirs = model.encode([text], output_value="token_embeddings")[0].numpy()
        assert_close(tokens, theirs)
        assert_close(hidden, theirs)
        assert_close(vector[None], theirs.mean(0)[None])


def test_dimensions_are_cut_then_normalised(minilm: str) -> None:
    harness = Harness(minilm)
    full = reference(minilm, TEXTS)[:, :128]
    assert_close(harness.embed(TEXTS, dimensions=128), full / np.linalg.norm(full, axis=1, keepdims=True))
    assert_close(harness.embed(TEXTS, dimensions=128, use_activation=False), harness.embed(TEXTS, use_activation=False)[:, :128])


def test_half_precision_checkpoint(tmp_path: Path) -> None:
    """Runs in bfloat16 where the processor is good at it, in float32 elsewhere; either way close to float32."""
    folder = save_checkpoint(tmp_path / "m", "bert", dtype=torch.float16)
    harness = Harness(folder)
    theirs = reference(folder, TEXTS)
    ours = harness.embed(TEXTS, use_activation=False)
    cosine = (ours * theirs).sum(1) / (np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1))
    assert harness.card.dtype in ("bfloat16", "float32")
    assert cosine.min() >= 0.999
