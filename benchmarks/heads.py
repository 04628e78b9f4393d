"""Reranking, scores and classification served, beside the bare packed forward pass of the same run.

A cross-encoder and a classifier of MiniLM's size: MiniLM's own weights under heads of random ones, written into a temporary folder.
`--save FOLDER` keeps them, with one for entities, and does no more: `config/heads.toml` serves them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from benchmarks.embed import Limit
from benchmarks.loadgen import run_load
from benchmarks.results import machine, write
from benchmarks.servers import serving
from benchmarks.workload import bodies, model_folder
from jackfield.engine.cpu import usable_cpus

__all__ = ["main", "save_config", "save_heads"]

# What is measured: the work of the limit, the model that does it, the path, and the number of connections.
WORKS = {
    "rerank": ("rerank", "ranker", "/rerank", 4),
    "score1": ("score1", "ranker", "/score", 32),
    "classify1": ("texts", "mood", "/classify", 32),
}


HEADS: dict[str, tuple[Any, list[str]]] = {
    "ranker": (AutoModelForSequenceClassification, ["LABEL_0"]),
    "mood": (AutoModelForSequenceClassification, ["NEGATIVE", "NEUTRAL", "POSITIVE"]),
    "names": (AutoModelForTokenClassification, ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]),
}


def save_heads(folder: Path, names: tuple[str, ...] = ("ranker", "mood")) -> dict[str, str]:
    """Write the models; returns their folders by name."""
    torch.manual_seed(0)
    for name in names:
        kind, labels = HEADS[name]
        model = kind.from_pretrained(model_folder(), num_labels=len(labels), id2label=dict(enumerate(labels)), initializer_range=0.5)
        model.save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(Path(model_folder()) / file, folder / name)
    return {"minilm": model_folder(), **{name: str(folder / name) for name in names}}


def save_config(folder: Path, models: dict[str, str], dtype: str) -> str:
    """A configuration with these models and every endpoint that they have work for; returns its path."""
    lines = [f'[models.{name}]\nsource = "{source}"\ndtype = "{dtype}"\n' for name, source in models.items()]
    lines += [f"[endpoints.{name}]\n" for name in ("embed", "score", "rerank", "classify", "pooling")]
    path = folder / f"{len(models)}.toml"
    path.write_text("".join(lines))
    return str(path)


def round_of(config: str, models: dict[str, str], dtype: str, slices: int, seconds: float) -> dict[str, Any]:
    """One round: limits and server in turn, a few seconds each, since the machine's own speed drifts."""
    limits = {name: Limit(models[model], dtype, work) for name, (work, model, _, _) in WORKS.items()}
    figures: dict[str, Any] = {name: {"limit": [], "load": []} for name in WORKS}
    with serving(config) as server:
        figures["ready_s"] = server.ready_s
        for name, (_, model, path, connections) in WORKS.items():
            requests = bodies(name, model)
            run_load(server.url + path, requests, connections, seconds=3)
            for _ in range(slices):
                figures[name]["limit"].append(limits[name].ask(f"many {seconds}"))
                figures[name]["load"].append(asdict(run_load(server.url + path, requests, connections, seconds=seconds)))
            figures[name]["limit"].append(limits[name].ask(f"many {seconds}"))
    for limit in limits.values():
        limit.end()
    return figures


def ratios(figures: dict[str, Any]) -> list[float]:
    """What a second of each slice, of the mean of the limit before and after it."""
    limits = figures["limit"]
    return [load["texts_per_s"] * 2 / (limits[i] + limits[i + 1]) for i, load in enumerate(figures["load"])]


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all slices of all rounds."""

    result: dict[str, float] = {}
    for name, unit in (("rerank", "documents"), ("score1", "pairs"), ("classify1", "texts")):
        mine = [figures[name] for figures in rounds]
        loads = [load for figures in mine for load in figures["load"]]
        result[f"{name}, limit {unit}/s"] = statistics.median(limit for figures in mine for limit in figures["limit"])
        result[f"{name}, {unit}/s"] = statistics.median(load["texts_per_s"] for load in loads)
        result[f"{name}, of the limit"] = statistics.median(ratio for figures in mine for ratio in ratios(figures))
        result[f"{name}, errors"] = sum(load["errors"] for load in loads)
    result["ready s"] = statistics.median(figures["ready_s"] for figures in rounds)
    return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    """Run and write benchmarks/results/heads-DTYPE.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", nargs="?", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--save", type=Path, help="write the models into this folder, and stop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    if arguments.save:
        print(*save_heads(arguments.save, tuple(HEADS)).values(), sep="\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = save_heads(folder)
        config = save_config(folder, models, arguments.dtype)
        for number in range(arguments.rounds):
            rounds.append(round_of(config, models, arguments.dtype, arguments.slices, arguments.seconds))
            print(f"round {number + 1}: {json.dumps(summary(rounds[-1:]))}", flush=True)
    for key, value in summary(rounds).items():
        print(f"{key:32} {value}")
    if not arguments.dry:
        what = f"all-MiniLM-L6-v2 and two heads over its weights, {arguments.dtype}"
        write(f"heads-{arguments.dtype}", {"what": what, **machine(), "summary": summary(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
