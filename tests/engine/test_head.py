"""Logits in half precision: the greatest of a row are those of float32, whatever the model's head does to them afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield.engine.generation.best import greatest, near_greatest
from jackfield.engine.generation.head import logits_head
from tests.checkpoints import save_causal


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_best_token_is_that_of_float32(tmp_path: Path, kind: str, *, tied: bool, dtype: torch.dtype) -> None:
    folder = save_causal(tmp_path, kind, dtype=dtype, tie_word_embeddings=tied)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states = torch.randn(400, half.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.inference_mode():
        got, right = logits_head(half)(states), logits_head(whole)(states.float())
        rounded = half.lm_head(states).float()
    assert got.dtype == torch.float32
    best = right.argmax(-1)
    assert torch.equal(got.argmax(-1), best)
    rows = torch.arange(len(states))
    torch.testing.assert_close(got[rows, best], right[rows, best], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, right, rtol=0.02, atol=0.05)
    if dtype == torch.bfloat16:  # else this test would not need what it tests
        assert not torch.equal(rounded.argmax(-1), best)


@pytest.mark.parametrize("size", [1, 5, 128, 300, 1024])
def test_greatest(size: int) -> None:
    rows = torch.randint(0, 50, (64, size), generator=torch.Generator().manual_seed(size)).float()  # full of ties
    rows[3, size // 2] = float("nan")
    rows[4] = float("-inf")
    values, places = greatest(rows)
    assert torch.equal(places, rows.argmax(-1))
    assert torch.equal(values.nan_to_num(-1), rows.amax(-1).nan_to_num(-1))


@pytest.mark.parametrize("size", [7, 128, 300])
def test_near_greatest(size: int) -> None:
    rows = torch.randn(20, size, generator=torch.Generator().manual_seed(size))
    best = rows.amax(-1, keepdim=True)
    right = set(map(tuple, (rows >= best - 0.2 * best.abs()).nonzero().tolist()))
    assert set(zip(*(places.tolist() for places in near_greatest(rows, 0.2)), strict=True)) == right
