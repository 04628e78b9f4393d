"""GGUF files: what the folder holds that is made of one, compared with what transformers reads from the file itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from jackfield import ChatPrompt, ModelError, TextPrompt
from jackfield.client import ModelSpec
from jackfield.engine.blocks import INT4_FILE, dequantized
from jackfield.engine.conversion import converted
from jackfield.engine.files import read_model_files
from jackfield.engine.gguf import convert
from jackfield.tokenization import ModelTokenizer
from tests.gguf_files import HIDDEN, SPECIALS, TOKENS, save_gguf

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a file and convert it in this process; gives the folder."""

    def make_folder(dtype: torch.dtype = torch.float32, **how: Any) -> Path:
        folder = tmp_path / "folder"
        folder.mkdir()
        convert(save_gguf(tmp_path / "tiny.gguf", **how), folder, dtype, lambda percent: None)
        return folder

    return make_folder


def tokenizer(folder: Path) -> ModelTokenizer:
    return ModelTokenizer(read_model_files(ModelSpec(id="m", path=str(folder))).card)


def greedy(model: Any) -> list[int]:
    ids = model.generate(torch.tensor([[1, 70, 75, 90, 31]]), do_sample=False, max_new_tokens=24, eos_token_id=-1, pad_token_id=0)
    tokens: list[int] = ids[0].tolist()
    return tokens


@pytest.mark.parametrize("tied", [True, False])
def test_generates_what_the_file_generates(make: Make, tmp_path: Path, tied: bool) -> None:
    folder = make(tied=tied)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.tie_word_embeddings is tied
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in direct.state_dict().items())
    assert greedy(model) == greedy(direct)


def test_half_precision_is_cast_once(make: Make, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(torch.bfloat16), dtype="auto")
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[name], weight.bfloat16()) for name, weight in direct.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_give_the_weights(make: Make, dtype: torch.dtype) -> None:
    """All linear layers of the two 4-bit kinds; the rows of q and k are in transformers' order."""
    folder = make(dtype, tied=False)
    weights, blocks = load_file(folder / "model.safetensors"), load_file(folder / INT4_FILE)
    names = {name.removesuffix(".q") for name in blocks if name.endswith(".q")}
    assert names == {name for name in weights if name.endswith("proj.weight")} | {"lm_head.weight"}
    for name in names:
        made = dequantized((blocks[f"{name}.q"], blocks[f"{name}.scale"], blocks[f"{name}.min"]))
        assert torch.equal(made.to(dtype), weights[name])


def test_end_tokens_and_sampling(make: Make) -> None:
    numbers = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.padding_token_id": 5, "general.sampling.top_k": 20}
    generation = GenerationConfig.from_pretrained(make(numbers=numbers))
    assert generation.eos_token_id == [0, 2]
    assert (generation.bos_token_id, generation.pad_token_id, generation.top_k, generation.do_sample) == (1, 5, 20, True)


def test_one_end_token(make: Make) -> None:
    folder = make()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    assert "_model_name_or_path" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ", "1", "2"]),
        ("smollm", ["a", "ĠĠ", "1", "2"]),
        ("llama-bpe", ["<|start|>", "a", "Ġ", "Ġ", "1", "2"]),
    ],
)
def test_words_are_cut_as_the_file_says(make: Make, pre: str, words: list[str]) -> None:
    tokens = tokenizer(make(pre=pre))([TextPrompt(text="a  12")])[0]
    assert [TOKENS[number] for number in tokens.token_ids] == words


def test_template_and_decoding(make: Make) -> None:
    tiny = tokenizer(make())
    chat = ChatPrompt(messages=[{"role": "user", "content": "hello"}], add_generation_prompt=True, add_special_tokens=False)
    assert [TOKENS[number] for number in tiny([chat])[0].token_ids] == [SPECIALS[1], "h", "ell", "o", SPECIALS[2], SPECIALS[1]]
    text = "a\t  b , c . it 's\n\nné 🌍 123 "
    assert tiny([TextPrompt(text=text, with_text=True)])[0].text == text


def test_frequencies_of_llama_3(make: Make, tmp_path: Path) -> None:
    """Files of Llama 3.1 and later hold divisors of the rotary frequencies, which transformers does not read."""
    half = HIDDEN // 4 // 2
    frequencies = 1.0 / 10000.0 ** (np.arange(half) / half)
    turns = 8192 * frequencies / (2 * np.pi)
    smooth = (turns - 1) / 3
    factors = np.where(turns > 4, 1.0, np.where(turns < 1, 8.0, 1 / ((1 - smooth) / 8 + smooth)))
    model = AutoModelForCausalLM.from_pretrained(make(more={"rope_freqs.weight": factors.astype(np.float32)}))
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert torch.allclose(model.model.rotary_emb.inv_freq.double(), torch.from_numpy(frequencies / factors), rtol=1e-3)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"architecture": "bert"}, r"cannot read it \(architecture 'bert'\).*bert is not supported"),
        ({"pre": "deepseek-v3"}, "cuts texts in the way 'deepseek-v3'"),
        ({"less": "blk.1.ffn_up.weight"}, "lacks 1 of the weights of LlamaForCausalLM, the first 'model.layers.1.mlp.up_proj.weight'"),
        ({"more": {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}}, "1 of its 21 tensors have no place.*'blk.0.attn_q.bias'"),
        ({"more": {"rope_freqs.weight": np.full(8, 3, np.float32)}}, "its 8 factors of rotary frequencies"),
        ({"numbers": {"split.count": 3}}, "one of 3 parts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_wrong_is_refused(make: Make, how: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make(**how)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off(tmp_path: Path, share: float) -> None:
    whole = save_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match=f"its {cut.stat().st_size} bytes are no whole GGUF file"):
        convert(cut, tmp_path / "folder", torch.float32, lambda percent: None)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        converted("m", str(path), dtype="auto", device="cpu", progress=lambda step: None)
    return str(caught.value)


def test_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    assert refused(path) == f"model 'm': {path} (14 bytes) is no GGUF file: it does not begin with 'GGUF'"


def test_a_cache_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path / "file"))
    assert re.search("the cache .* cannot be written", refused(save_gguf(tmp_path / "tiny.gguf")))


def test_without_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path))
    path = save_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "of which gguf is missing (pip install gguf)" in refused(path)
