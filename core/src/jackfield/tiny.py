"""Tiny models of random weights, made on the spot: `source = "tiny:bert"` serves something before there is a model.

A BERT of two layers over single bytes, the same for the same name and release. Its answers mean nothing.
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
}
HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 32, 2, 4, 64, 512
# With weights of transformers' 0.02 the model would be nearly the identity.
STD = 0.25
SPECIALS = ("<s>", "</s>", "<pad>")
VOCAB = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_model(kind: str) -> str:
    """The folder of a kind, written into the cache at the first call. Raises: KeyError for a kind that there is not."""
    folder = cache_folder() / "tiny" / f"{kind}-{version('jackfield')}"
    return str(made_once(folder, lambda made: write_tiny(made, kind)))


def write_tiny(folder: Path, kind: str = "bert", *, weights: bool = True) -> None:
    """Write a model into an existing folder. weights: False leaves them out, for what reads a model's files alone."""
    architecture, labels = KINDS[kind]
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": POSITIONS,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": SPECIALS.index("<pad>"),
    }
    if labels:
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if weights:
        save_file(_weights(architecture, len(labels)), folder / "model.safetensors", metadata={"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    """Single bytes as tokens, `<s>` and `</s>` around a text, as between the texts of a pair."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    frame = [(token, vocab[token]) for token in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=frame)
    return tokenizer


def _weights(architecture: str, num_labels: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """By transformers' names for a BERT (`models/bert/modeling_bert.py`)."""
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
    random = np.random.default_rng(0)
    made = {name: random.normal(0, STD, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: values + 1 if name.endswith("LayerNorm.weight") else values for name, values in made.items()}


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
