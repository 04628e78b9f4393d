"""Tiny models of random weights, made on the spot: `source = "tiny:bert"` serves something before there is a model.

A BERT, or a Llama that generates, of two layers over single bytes, the same for the same name and release. Its answers mean nothing.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from jackfield.cache import cache_folder, made_once

__all__ = ["KINDS", "tiny_model", "write_tiny"]

# What each is, and the labels of its head.
KINDS: dict[str, tuple[str, list[str]]] = {
    "bert": ("BertModel", []),
    "ranker": ("BertForSequenceClassification", ["LABEL_0"]),
    "classifier": ("BertForSequenceClassification", ["NEGATIVE", "NEUTRAL", "POSITIVE"]),
    "entities": ("BertForTokenClassification", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]),
    "llama": ("LlamaForCausalLM", []),
}
HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 32, 2, 4, 64, 512
KV_HEADS = 2
# With weights of transformers' 0.02 the model would be nearly the identity.
STD = 0.25
SPECIALS = ("<s>", "</s>", "<pad>")
VOCAB = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Of what generates: a turn ends with the token that ends an answer.
TURNS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_model(kind: str) -> str:
    """The folder of a kind, written into the cache at the first call. Raises: KeyError for a kind that there is not."""
    folder = cache_folder() / "tiny" / f"{kind}-{version('jackfield')}"
    return str(made_once(folder, lambda made: write_tiny(made, kind)))


def write_tiny(folder: Path, kind: str = "bert", *, weights: bool = True) -> None:
    """Write a model into an existing folder. weights: False leaves them out, for what reads a model's files alone."""
    architecture, labels = KINDS[kind]
    generates = architecture == "LlamaForCausalLM"
    tokenizer = byte_tokenizer(closed=not generates)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": POSITIONS,
        "model_input_names": ["input_ids", *([] if generates else ["token_type_ids"]), "attention_mask"],
        "chat_template": TURNS_TEMPLATE if generates else CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    config = _llama_config(tokenizer.get_vocab_size()) if generates else _bert_config()
    config["architectures"] = [architecture]
    if labels:
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if weights:
        shapes = _llama_shapes(config["vocab_size"]) if generates else _bert_shapes(architecture, len(labels))
        save_file(_weights(shapes), folder / "model.safetensors", metadata={"format": "pt"})


def _bert_config() -> dict[str, Any]:
    return {
        "model_type": "bert",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": SPECIALS.index("<pad>"),
    }


def _llama_config(vocab_size: int) -> dict[str, Any]:
    """vocab_size: the tokenizer's own, so that each token that comes is one of it."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIALS.index("<s>"),
        "eos_token_id": SPECIALS.index("</s>"),
        "pad_token_id": SPECIALS.index("<pad>"),
    }


def byte_tokenizer(*, closed: bool = True) -> Tokenizer:
    """Single bytes as tokens, `<s>` before a text and `</s>` after it, and after the second of a pair.

    closed: False leaves `</s>` out, for what is to go on with the text.
    """
    vocab = {token: index for index, token in enumerate([*SPECIALS, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    frame = [(token, vocab[token]) for token in ("<s>", "</s>")]
    single, pair = ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1") if closed else ("<s> $A", "<s> $A $B:1")
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=frame)
    return tokenizer


def _bert_shapes(architecture: str, num_labels: int) -> dict[str, tuple[int, ...]]:
    """By transformers' names (`models/bert/modeling_bert.py`)."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        **_norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        within = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{within}.attention.self.{name}", HIDDEN, HIDDEN)
        shapes |= _linear(f"{within}.attention.output.dense", HIDDEN, HIDDEN) | _norm(f"{within}.attention.output.LayerNorm")
        shapes |= _linear(f"{within}.intermediate.dense", INNER, HIDDEN) | _linear(f"{within}.output.dense", HIDDEN, INNER)
        shapes |= _norm(f"{within}.output.LayerNorm")
    if architecture == "BertForSequenceClassification":
        shapes |= _linear("pooler.dense", HIDDEN, HIDDEN)
    prefix = "bert." if num_labels else ""
    shapes = {prefix + name: shape for name, shape in shapes.items()}
    if num_labels:
        shapes |= _linear("classifier", num_labels, HIDDEN)
    return shapes


def _llama_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """By transformers' names (`models/llama/modeling_llama.py`)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, HIDDEN)}
    shared = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        within = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", shared), ("v", shared), ("o", HIDDEN)):
            shapes[f"{within}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes |= {f"{within}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{within}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{within}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab_size, HIDDEN)}


def _weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Random ones; those of norms lie around 1."""
    random = np.random.default_rng(0)
    made = {name: random.normal(0, STD, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: values + 1 if name.lower().endswith("norm.weight") else values for name, values in made.items()}


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
