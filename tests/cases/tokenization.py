"""Family E: tokenization."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tests.cases.bench import Bench, case, steps


@case("E01")
def ids_out_of_range(bench: Bench) -> None:
    *wrong, empty = steps("E01")
    for step in wrong:
        bench.post("/detokenize", step["body"], 400)
    assert bench.post("/detokenize", empty["body"]) == {"prompt": ""}


@case("E02")
def round_trip(bench: Bench) -> None:
    for step in steps("E02"):
        tokens = bench.post("/tokenize", step["body"])["tokens"]
        assert bench.post("/detokenize", {"model": "smollm2", "tokens": tokens}) == {"prompt": step["body"]["prompt"]}
    assert bench.post("/tokenize", {"model": "smollm2", "prompt": " hello", "add_special_tokens": False})["tokens"] == [33662]
    assert bench.post("/tokenize", {"model": "smollm2", "prompt": "Hello, world!", "add_special_tokens": False})["tokens"] == [
        19556,
        28,
        905,
        17,
    ]


@case("E04")
def chat_form(bench: Bench, smol: Bench) -> None:
    generation, without, both, neither = (step["body"] for step in steps("E04"))
    tokens = bench.post("/tokenize", generation)["tokens"]
    assert len(tokens) == 31
    chat = {"messages": generation["messages"], "max_tokens": 1}
    assert smol.post("/v1/chat/completions", chat)["usage"]["prompt_tokens"] == 31
    assert tokens[-4:] == [1, 520, 9531, 198]
    assert bench.post("/tokenize", without)["count"] == 27
    bench.post("/tokenize", both, 400)
    bench.post("/tokenize", neither, 400)


@case("E06")
def template_kwargs_cannot_override(bench: Bench, smol: Bench) -> None:
    first, second = (step["body"] for step in steps("E06"))
    assert bench.post("/tokenize", first, 400)["error"]["param"] == "chat_template_kwargs"
    assert smol.post("/v1/chat/completions", second, 400)["error"]["param"] == "chat_template_kwargs"


@case("E07")
def huge_text(bench: Bench) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(bench.send, "POST", "/tokenize", json=step["body"]) for step in steps("E07")[:2]]
        slowest = 0.0
        while not all(future.done() for future in waiting):
            started = time.monotonic()
            assert bench.send("GET", "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.02)
        assert all(future.result().status_code == 200 for future in waiting)
    assert slowest < 1
