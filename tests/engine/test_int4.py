"""4-bit products against the same weights in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from jackfield import ModelError
from jackfield.engine.blocks import Blocks, dequantized
from jackfield.engine.gguf import convert
from jackfield.engine.int4 import Int4Linear, use_int4
from tests.checkpoints import save_checkpoint
from tests.gguf_files import save_gguf

OUT, IN = 48, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("int4")
    (root / "folder").mkdir()
    convert(save_gguf(root / "tiny.gguf", tied=False), root / "folder", torch.float32, lambda percent: None)
    return root / "folder"


def blocks(out: int = OUT) -> Blocks:
    random = torch.Generator().manual_seed(0)
    q = torch.randint(0, 256, (out, IN // 2), generator=random, dtype=torch.uint8)
    scale, least = (torch.rand(2, out, IN // 32, generator=random) * 0.1).half()
    return q, scale, -8 * least


def off(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made.double() - right).norm() / right.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("plain_from", [None, 16])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (16,), (1, 200)])
def test_product(shape: tuple[int, ...], plain_from: int | None, dtype: torch.dtype, tolerance: float) -> None:
    weights = blocks()
    bias = torch.randn(OUT).to(dtype)
    layer = Int4Linear(*weights, bias, dtype=dtype, plain_from=plain_from)
    states = torch.randn(*shape, IN).to(dtype)
    made = layer(states)
    assert (made.dtype, made.shape) == (dtype, (*shape, OUT))
    assert off(made, states.double() @ dequantized(weights).double().T + bias.double()) < tolerance


def test_states_that_lie_apart() -> None:
    weights = blocks()
    states = torch.randn(IN, 4).T
    assert off(Int4Linear(*weights)(states), states.double() @ dequantized(weights).double().T) < 2e-6


def test_a_number_of_outputs_that_torch_does_not_take() -> None:
    with pytest.raises(ValueError, match="a multiple of 16 outputs, not 40"):
        Int4Linear(*blocks(40))


@pytest.mark.parametrize(("auto", "count"), [(AutoModelForCausalLM, 14), (AutoModel, 14)])
def test_a_model(folder: Path, auto: type, count: int) -> None:
    """The output layer has 262 rows, which stays as it is."""
    plain, model = (auto.from_pretrained(folder) for _ in range(2))  # type: ignore[attr-defined]
    assert use_int4(model, folder) == count
    ids = torch.arange(10, 30)[None]
    with torch.inference_mode():
        for made, right in zip(model(ids).to_tuple()[:1], plain(ids).to_tuple()[:1], strict=True):
            assert off(made, right.double()) < 1e-5
    assert sum(parameter.numel() for parameter in model.parameters()) < sum(parameter.numel() for parameter in plain.parameters())


def test_the_same_tokens(folder: Path) -> None:
    plain, model = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    use_int4(model, folder, plain_from=4)
    made, right = (
        one.generate(torch.tensor([[1, 70, 75, 90, 31]]), do_sample=False, max_new_tokens=24, eos_token_id=-1, pad_token_id=0).tolist()
        for one in (model, plain)
    )
    assert made == right


def test_a_folder_without_blocks(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "llama", "llama", head="ForCausalLM")
    with pytest.raises(ModelError, match=r"has no int4\.safetensors"):
        use_int4(AutoModelForCausalLM.from_pretrained(folder), folder)
