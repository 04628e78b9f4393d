"""Tiny checkpoints made from a config and a seed, in folders as sentence-transformers and transformers publish them.

Weights have a standard deviation of 0.2 or more: with transformers' 0.02 every model is nearly the identity, and errors hide.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

STD = 0.25
VOCAB = 300
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": STD,
}
# Families that begin with the special tokens of other vocabularies than ours.
LATER: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SMALL, "max_position_embeddings": 128, "pad_token_id": 0}),
    "roberta": ("Roberta", {**SMALL, "max_position_embeddings": 130, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {**SMALL, "max_position_embeddings": 130, "pad_token_id": 1, "type_vocab_size": 1}),
    "mpnet": ("MPNet", {**SMALL, "max_position_embeddings": 130, "pad_token_id": 1}),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": VOCAB,
            "dim": 32,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 128,
            "initializer_range": STD,
            "pad_token_id": 0,
        },
    ),
    "albert": ("Albert", {**SMALL, "embedding_size": 16, "max_position_embeddings": 128, "pad_token_id": 0}),
    "electra": ("Electra", {**SMALL, "embedding_size": 32, "max_position_embeddings": 128, "pad_token_id": 0}),
    "modernbert": (
        "ModernBert",
        {**SMALL, **LATER, "max_position_embeddings": 128, "local_attention": 16, "global_attn_every_n_layers": 2},
    ),
    "nomic-bert": ("NomicBert", {**SMALL, "max_position_embeddings": 128, "pad_token_id": 0}),
    "gte": ("Gte", {**SMALL, "max_position_embeddings": 128, "pad_token_id": 0}),
    "eurobert": ("EuroBert", {**SMALL, **LATER, "mask_token_id": 3, "max_position_embeddings": 128}),
    "deberta-v2": (
        "DebertaV2",
        {
            **SMALL,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
    "deberta": (
        "Deberta",
        {**SMALL, "max_position_embeddings": 128, "pad_token_id": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "llama": ("Llama", {**SMALL, **LATER, "num_key_value_heads": 2, "max_position_embeddings": 128}),
    "longrope": (
        "Llama",
        {
            **SMALL,
            **LATER,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 5.0, 8.0],
            },
        },
    ),
    "qwen2": ("Qwen2", {**SMALL, **LATER, "num_key_value_heads": 2, "max_position_embeddings": 128}),
    "qwen3": ("Qwen3", {**SMALL, **LATER, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}),
    "mistral": ("Mistral", {**SMALL, **LATER, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            **SMALL,
            **LATER,
            "num_hidden_layers": 7,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "sliding_window": 16,
            "use_bidirectional_attention": True,
        },
    ),
}
_GROUPED: dict[str, Any] = {**SMALL, **LATER, "num_key_value_heads": 2, "max_position_embeddings": 128}
# What generates: the names of the config's class and the model's, and the config.
CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "mistral": ("Mistral", "MistralForCausalLM", {**_GROUPED, "sliding_window": 16}),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 4}),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 7}),
    "phi3": ("Phi3", "Phi3ForCausalLM", _GROUPED),
    "phi3-longrope": (
        "Phi3",
        "Phi3ForCausalLM",
        {
            **_GROUPED,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 5.0, 8.0],
            },
        },
    ),
    "gpt2": (
        "GPT2",
        "GPT2LMHeadModel",
        {
            **LATER,
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": STD,
        },
    ),
    "smollm3": ("SmolLM3", "SmolLM3ForCausalLM", _GROUPED),
    "mamba": ("Mamba", "MambaForCausalLM", {**LATER, "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}
# Those whose attention is their own, outside of transformers' interface.
IN_BUCKETS = {"mpnet", "deberta", "deberta-v2"}
# The first ids of the vocabulary, by family.
SPECIALS = {0: ("<pad>", "<s>", "</s>", "<unk>"), 1: ("<s>", "<pad>", "</s>", "<unk>")}


def save_checkpoint(
    folder: Path,
    kind: str,
    *,
    head: str = "Model",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    longer: int = 0,
    **more: Any,
) -> Path:
    """A plain transformers folder of one of `KINDS`. head: the end of its class's name. longer: positions that it has beyond 128. more: of
    its configuration."""
    name, config = KINDS[kind]
    config = {**config, "max_position_embeddings": config["max_position_embeddings"] + longer, **more}
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms start as constants, which would hide a missing one
                parameter.add_(torch.randn_like(parameter) * STD)
    model.to(dtype).save_pretrained(folder)
    types = getattr(model.config, "type_vocab_size", 0) or 0
    save_tokenizer(folder, pad_id=config["pad_token_id"], has_types=types > 1)
    return folder


def save_causal(folder: Path, kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """A transformers folder of one of `CAUSAL`. more: of its configuration."""
    config_name, name, config = CAUSAL[kind]
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = getattr(transformers, name)(getattr(transformers, f"{config_name}Config")(**{**config, **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * STD)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder, pad_id=0)
    return folder


def save_tokenizer(folder: Path, *, pad_id: int, model_max_length: int | None = 128, has_types: bool = False) -> None:
    """Single bytes as tokens, framed by <s> and </s>; padding and truncation baked into the file, as published ones often have.

    has_types: it names `token_type_ids` as an input of the model, as BERT's does and RoBERTa's does not.
    """
    specials = SPECIALS[pad_id]
    vocab = {token: index for index, token in enumerate([*specials, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    frame = [("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=frame)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16, pad_id=pad_id, pad_token="<pad>")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    if has_types:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # type: ignore[assignment]
    if model_max_length is not None:
        config["model_max_length"] = model_max_length  # type: ignore[assignment]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_sentence_transformer(
    folder: Path,
    kind: str = "bert",
    *,
    pooling: dict[str, Any] | None = None,
    dense: list[tuple[int, str]] | None = None,
    normalize: bool = True,
    max_seq_length: int | None = 64,
    do_lower_case: bool = False,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    seed: int = 0,
    longer: int = 0,
) -> Path:
    """A sentence-transformers folder. dense: (out_features, activation) of Dense modules in order. longer: positions beyond 128."""
    save_checkpoint(folder, kind, seed=seed, longer=longer)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True} if pooling is None else pooling
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    width = 32 * _num_modes(pooling)
    for position, (out, activation) in enumerate(dense or ()):
        name = f"{position + 2}_Dense"
        _save_dense(folder / name, width, out, activation, seed + position)
        modules.append((name, "sentence_transformers.models.Dense"))
        width = out
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length, "do_lower_case": do_lower_case}))
    settings = {"prompts": prompts or {}, "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def _num_modes(pooling: dict[str, Any]) -> int:
    mode = pooling.get("pooling_mode")
    if mode is not None:
        return 1 if isinstance(mode, str) else len(mode)
    return max(1, sum(bool(value) for key, value in pooling.items() if key.startswith("pooling_mode_")))


def _save_dense(folder: Path, width: int, out: int, activation: str, seed: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {"linear.weight": torch.randn(out, width, generator=generator), "linear.bias": torch.randn(out, generator=generator)}
    save_file(weights, folder / "model.safetensors")
    config = {"in_features": width, "out_features": out, "bias": True, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(config))
