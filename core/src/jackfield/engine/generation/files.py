"""What a model's files say of its generating, read without torch: end tokens and the defaults of sampling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from msgspec import Struct

from jackfield.client import ModelSpec
from jackfield.engine.folder import read_json

__all__ = ["GenerationFiles", "read_generation"]

# Of generation_config.json, by their names in SamplingParams, with what is no value of theirs. `do_sample` is not among them: a request
# without a temperature samples, as OpenAI's clients expect, whatever `generate` would do.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class GenerationFiles(Struct, frozen=True, kw_only=True):
    """end_ids: every token that the files call an end. sampling: as in ModelCard."""

    end_ids: tuple[int, ...] = ()
    sampling: dict[str, float] = {}


def read_generation(spec: ModelSpec, folder: Path, config: dict[str, Any]) -> GenerationFiles:
    """Of a transformers folder. Raises: ModelError for a file that cannot be read."""
    generation = read_json(spec, folder / "generation_config.json") or {}
    ends = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id")), *_tokenizer_end(spec, folder)}
    sampling: dict[str, float] = {}
    for name, own in _DEFAULTS.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            sampling[own] = value
    return GenerationFiles(end_ids=tuple(sorted(ends)), sampling=sampling)


def _ids(given: Any) -> list[int]:
    return [given] if isinstance(given, int) else [one for one in given or () if isinstance(one, int)]


def _tokenizer_end(spec: ModelSpec, folder: Path) -> list[int]:
    """The id of the tokenizer's own end token: chat models end a turn with it, and their config.json names another."""
    tokenizer = read_json(spec, folder / "tokenizer_config.json") or {}
    end = tokenizer.get("eos_token")
    content = end.get("content") if isinstance(end, dict) else end
    if not content:
        return []
    added = tokenizer.get("added_tokens_decoder") or {
        entry["id"]: entry for entry in (read_json(spec, folder / "tokenizer.json") or {}).get("added_tokens", ())
    }
    return [int(token_id) for token_id, entry in added.items() if entry.get("content") == content]
