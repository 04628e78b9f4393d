"""Tiny GGUF files of seeded weights, as llama.cpp's converter writes them: a Llama with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIALS = ["<|end|>", "<|start|>", "<|turn|>"]
MERGES = ["Ġ Ġ", "l l", "e ll"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['content'] }}<|turn|>{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
)
STD = 0.25
LAYER = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def save_gguf(
    path: Path,
    *,
    tied: bool = True,
    architecture: str = "llama",
    pre: str = "smollm",
    more: dict[str, np.ndarray[Any, Any]] | None = None,
    less: str = "",
    numbers: dict[str, int] | None = None,
) -> Path:
    """Q4_0 for what attends, Q4_1 for the rest, Q8_0 for the embeddings, float32 for the norms.

    tied: no output layer of its own. more: further tensors. less: the name of one that is left out. numbers: further keys.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    for name, number in {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 1, **(numbers or {})}.items():
        writer.add_uint32(name, number)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, shape: tuple[int, ...], kind: Type) -> None:
        values = random.normal(0, STD, shape).astype(np.float32) + (1 if "norm" in name else 0)
        if name != less:
            writer.add_tensor(name, values if kind == Type.F32 else gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (len(TOKENS), HIDDEN), Type.Q8_0)
    for layer in range(LAYERS):
        for name, shape in LAYER.items():
            add(f"blk.{layer}.{name}.weight", shape, Type.Q4_0 if name.startswith("attn") else Type.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", (HIDDEN,), Type.F32)
    add("output_norm.weight", (HIDDEN,), Type.F32)
    if not tied:
        add("output.weight", (len(TOKENS), HIDDEN), Type.Q4_0)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
