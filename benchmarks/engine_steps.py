"""What a step of the engine costs, by its tokens, beside the bare packed forward of the same prompts: in one process, in turn, medians.

The engine is the real one (scheduler, runner, pooler), without sockets and messages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from tokenizers import Tokenizer
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel

from benchmarks.limit import attend, forward
from benchmarks.results import machine, write
from benchmarks.workload import model_folder, sentences
from jackfield.client import EngineRequest, ModelSpec
from jackfield.engine.core import Engine
from jackfield.engine.cpu import usable_cpus
from jackfield.params import PoolingParams
from jackfield.settings import EngineSettings
from jackfield.tokenization import pack_ids

__all__ = ["main"]

EMBED = PoolingParams(outputs=("embed",))
BUDGETS = (1, 128, 256, 512, 1024, 2048)


def batches(budget: int, count: int) -> list[list[list[int]]]:
    """Prompts in order of arrival, cut at so many tokens; of a budget of 1, one prompt each."""
    tokenizer = Tokenizer.from_file(f"{model_folder()}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    cut: list[list[list[int]]] = [[]]
    room = budget
    for encoding in tokenizer.encode_batch_fast(sentences()):
        if cut[-1] and len(encoding.ids) > room:
            cut.append([])
            room = budget
        cut[-1].append(encoding.ids)
        room -= len(encoding.ids)
        if len(cut) > count:
            break
    return cut[:count]


def main() -> None:
    """Run and write benchmarks/results/steps-DTYPE.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--count", type=int, default=60, help="batches of each size")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    AttentionInterface.register("limit", attend)
    AttentionMaskInterface.register("limit", lambda *args, **kwargs: None)
    bare = AutoModel.from_pretrained(model_folder(), dtype=getattr(torch, arguments.dtype), attn_implementation="limit").eval()
    engine = Engine(EngineSettings(token_budget=100_000, lanes=1))
    engine.load([ModelSpec(id="m", path=model_folder(), dtype=arguments.dtype)], lambda progress: None)
    rows = {}
    number = 0
    with torch.inference_mode():
        for budget in BUDGETS:
            work = batches(budget, arguments.count)
            times: dict[str, list[float]] = {"bare": [], "engine": []}
            for batch in [*work[:5], *work]:  # the first ones warm up
                prompts = [(ids, [0] * len(ids)) for ids in sorted(batch, key=len)]
                started = time.perf_counter()
                forward(bare, prompts)
                between = time.perf_counter()
                for prompt in batch:
                    number += 1
                    engine.submit(
                        EngineRequest(id=number, model="m", token_ids=[pack_ids(prompt)], params=PoolingParams(outputs=("embed",)))
                    )
                events = engine.step()
                times["engine"].append((time.perf_counter() - between) * 1e3)
                times["bare"].append((between - started) * 1e3)
                assert len(events) == len(batch)
            row = {kind: round(statistics.median(values[5:]), 2) for kind, values in times.items()}
            row["tokens"] = round(statistics.mean(sum(map(len, batch)) for batch in work), 1)
            row["engine/bare"] = round(statistics.median(e / b for e, b in zip(times["engine"][5:], times["bare"][5:], strict=True)), 3)
            rows[str(budget)] = row
            print(f"budget {budget:5}: {row}", flush=True)
    if not arguments.dry:
        write(
            f"steps-{arguments.dtype}", {"what": f"milliseconds a step, all-MiniLM-L6-v2, {arguments.dtype}", **machine(), "summary": rows}
        )


if __name__ == "__main__":
    main()
