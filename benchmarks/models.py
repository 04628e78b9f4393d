"""Memory of one process with one, two and three models: it should grow by the weights of each, and little else."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.heads import save_config, save_heads
from benchmarks.loadgen import run_load
from benchmarks.results import machine, write
from benchmarks.servers import Server, pss_bytes, serving
from benchmarks.workload import bodies
from jackfield.engine.cpu import usable_cpus

__all__ = ["main"]

# By model, the route that uses it, and the requests.
WORK = {"minilm": ("/v1/embeddings", "embed1"), "ranker": ("/score", "score1"), "mood": ("/classify", "classify1")}


def sizes(server: Server) -> list[float]:
    """PSS of the HTTP process and of the engine's, in MB."""
    return [round(pss_bytes([process]) / 1e6, 1) for process in server.processes()]


def main() -> None:
    """Run and write benchmarks/results/models.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = save_heads(folder)
        weights = {model: next(Path(source).glob("*.safetensors")).stat().st_size / 1e6 for model, source in models.items()}
        for dtype in ("float32", "bfloat16"):
            for count in range(1, len(models) + 1):
                chosen = dict(list(models.items())[:count])
                with serving(save_config(folder, chosen, dtype)) as server:
                    idle = sizes(server)
                    for model in chosen:
                        path, kind = WORK[model]
                        run_load(server.url + path, bodies(kind, model)[:32], 4, seconds=30, count=32)
                    used = sizes(server)
                stored = sum(weights[model] for model in chosen) / (1 if dtype == "float32" else 2)
                rows.append({"dtype": dtype, "models": list(chosen), "weights_mb": round(stored, 1), "idle_mb": idle, "used_mb": used})
                told = f"idle {sum(idle):.0f} MB {idle}, used {sum(used):.0f} MB {used}"
                print(f"{dtype}, {count} models, weights {stored:.0f} MB: {told}", flush=True)
    if not arguments.dry:
        what = "PSS of the HTTP process and of the engine's, MiniLM and two heads over its weights; used: after 32 requests to each model"
        write("models", {"what": what, **machine(), "rows": rows})


if __name__ == "__main__":
    main()
