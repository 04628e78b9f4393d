"""4-bit products against the same weights in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield import ModelError
from jackfield.engine.blocks import Blocks, dequantized
from jackfield.engine.decoders import replace_decoders
from jackfield.engine.gguf import convert
from jackfield.engine.int4 import Int4Linear, Product, find_limit, stored_blocks
from tests.checkpoints import CAUSAL, save_causal, save_checkpoint
from tests.engine.generating import Driver, greedy
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
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (16,), (1, 200)])
def test_product(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    weights = blocks()
    bias = torch.randn(OUT).to(dtype)
    layer = Int4Linear(weights, bias, dtype=dtype)
    states = torch.randn(*shape, IN).to(dtype)
    made = layer(states)
    assert (made.dtype, made.shape) == (dtype, (*shape, OUT))
    assert off(made, states.double() @ dequantized(weights).double().T + bias.double()) < tolerance


def test_states_that_lie_apart() -> None:
    weights = blocks()
    states = torch.randn(IN, 4).T
    assert off(Int4Linear(weights, dtype=torch.float32)(states), states.double() @ dequantized(weights).double().T) < 2e-6


def test_a_number_of_outputs_that_torch_does_not_take() -> None:
    with pytest.raises(ValueError, match="a multiple of 16 outputs, not 40"):
        Int4Linear(blocks(40), dtype=torch.float32)


@pytest.mark.parametrize(("costs", "limit"), [({}, 32), ({4: 3.0}, 2), ({4: 0.96}, 2), ({1: 3.0, 2: 0.1}, 0)])
def test_the_number_of_rows_is_measured(costs: dict[int, float], limit: int) -> None:
    """costs: seconds of a product of 4 bits for so many rows, elsewhere half a second; a plain one takes a second."""
    now = 0.0

    def few(states: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += costs.get(states.shape[1], 0.5)
        return states

    def many(states: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 1.0
        return states

    assert find_limit([Product(few, many, 64)] * 4, torch.float32, clock=lambda: now) == limit


def test_both_forms_of_a_layer(folder: Path) -> None:
    """With norms folded into the one and beside the other."""
    base = AutoModelForCausalLM.from_pretrained(folder).base_model
    random = torch.Generator().manual_seed(1)
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.data = torch.rand(parameter.shape, generator=random) + 0.5
    assert replace_decoders(base) == len(base.layers)
    with torch.inference_mode(), stored_blocks(folder) as read:
        for number, layer in enumerate(base.layers):
            for product in layer.products(read, f"model.layers.{number}", torch.float32):
                states = torch.randn(1, 3, product.size, generator=random)
                assert off(product.few(states), product.many(states).double()) < 2e-6


def test_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 4 bits at up to 2 tokens a step, as if that had been faster: with one text going on, and with more than that."""
    monkeypatch.setattr("jackfield.engine.decoders.find_limit", lambda products, dtype: 2)
    driver = Driver(folder, quantization="int4")
    assert driver.card.notes[-1] == "steps of up to 2 tokens of generation by the file's 4-bit weights"
    prompts = [[1, 70, 75, 90, 31], [1, 80, 81], [5, 6, 7, 8, 9, 10, 11]]
    for together in (prompts[:1], prompts):
        requests = [driver.submit(prompt, max_tokens=24) for prompt in together]
        driver.run()
        assert [driver.tokens(request) for request in requests] == [greedy(folder, prompt, 24) for prompt in together]


def test_where_it_is_never_faster(smollm2: Path) -> None:
    """Torch has no fast product of 4 bits in float32."""
    driver = Driver(smollm2, quantization="int4", kv_cache_mib=64)
    assert driver.card.notes[-1] == "its 4-bit weights are slower here than its float32 ones, and are not used"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama", r"model 'm': quantization = \"int4\": .* has no int4\.safetensors: 4-bit products need a model from a GGUF"),
        ("gpt2", "need layers of Llama's kind, and GPT2Model runs with its own"),
        ("bert", 'quantization = "int4" is of models that generate'),
    ],
)
def test_refused(tmp_path: Path, kind: str, message: str) -> None:
    folder = (save_causal if kind in CAUSAL else save_checkpoint)(tmp_path / kind, kind)
    with pytest.raises(ModelError, match=message):
        Driver(folder, quantization="int4")
