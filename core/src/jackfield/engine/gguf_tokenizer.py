"""The tokenizer of a GGUF file.

transformers builds it; what it leaves to chance is decided here. A byte-level tokenizer cuts texts into words before it looks for tokens,
in the way that `tokenizer.ggml.pre` names. transformers knows some of these names and takes GPT-2's way for all others, which gives other
tokens than the model was trained with. The names, and what goes with them, are those of llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from jackfield.errors import ModelError

__all__ = ["read_tokenizer"]

BYTE_LEVEL = "gpt2"
# Cut as GPT-2 does it, which is what transformers takes for a name that it does not know. Files that name none are older than the names.
AS_GPT2 = {
    "",
    "default",
    "gpt-2",
    "phi-2",
    "mpt",
    "olmo",
    "jais",
    "trillion",
    "granite-docling",
    "mellum",
    "gigachat",
    "exaone4",
    "a.x-4.0",
}
# The same, with every digit a word of its own.
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# Cut as Qwen 2 does it.
AS_QWEN2 = {"stablelm2"}
# A word that is a token stays whole whatever the merges say, and a text begins with the begin token if the file does not say otherwise.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
# What transformers remembers of how it was asked, and what is no setting of a tokenizer.
_NO_SETTINGS = ("is_local", "local_files_only")


def read_tokenizer(file: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready to be saved.

    metadata: the file's keys that begin with `tokenizer.`. Raises: ModelError for a way of cutting texts that is not known here.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    if metadata.get("tokenizer.ggml.model") == BYTE_LEVEL:
        _cut_words(tokenizer, str(metadata.get("tokenizer.ggml.pre") or ""))
        if "tokenizer.ggml.add_bos_token" not in metadata and metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS:
            tokenizer.add_bos_token = True
            tokenizer.init_kwargs["add_bos_token"] = True
    for name in _NO_SETTINGS:
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def _cut_words(tokenizer: Any, name: str) -> None:
    backend = tokenizer.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif name in AS_QWEN2:
        split = pre_tokenizers.Split(transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX, behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif name not in AS_GPT2 and name not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelError(
            f"its tokenizer cuts texts in the way {name!r} (tokenizer.ggml.pre), which is known neither to transformers "
            f"{transformers.__version__} nor here, so it would give other tokens than the model was trained with"
        )
    if name in WHOLE_WORDS:
        model = backend.model
        model.ignore_merges = True
        backend.model = model
