"""The limit that a server is compared with: the bare packed forward pass in one process, tokenised ahead, no server.

Transformers' model as it is, attention over groups of equal length, mean pooling and normalisation of texts, the pooler over the first
token of pairs; the best of several batch sizes, in order of arrival and sorted by length. It stays alive between measurements, so that
limit and server can be measured in turn.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from itertools import cycle, groupby
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel

from benchmarks.workload import pairs, sentences

__all__ = ["main"]

Prompt = tuple[list[int], list[int]]  # ids, types
_layout: list[tuple[int, int, int]] = []  # start, count, length of each group of equal length


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **kwargs: Any) -> tuple[Any, None]:
    """Attention by groups of equal length."""
    heads, dim = query.shape[1], query.shape[3]
    parts = []
    for start, count, length in _layout:
        q, k, v = (t[0, :, start : start + count * length].reshape(heads, count, length, dim).transpose(0, 1) for t in (query, key, value))
        parts.append(scaled_dot_product_attention(q, k, v, scale=scaling).permute(0, 2, 1, 3).reshape(-1, heads, dim))
    return torch.cat(parts).unsqueeze(0), None


def length_of(prompt: Prompt) -> int:
    """Tokens."""
    return len(prompt[0])


def forward(model: Any, prompts: list[Prompt]) -> torch.Tensor:
    """Prompts, shortest first: unit vectors of texts, what a head reads of pairs."""
    start = 0
    _layout.clear()
    for length, group in groupby(prompts, key=length_of):
        count = len(list(group))
        _layout.append((start, count, length))
        start += count * length
    ids, types = (torch.tensor([[number for prompt in prompts for number in prompt[part]]]) for part in (0, 1))
    lengths = torch.tensor([length_of(prompt) for prompt in prompts])
    positions = torch.tensor([[position for prompt in prompts for position in range(length_of(prompt))]])
    hidden = model(input_ids=ids, position_ids=positions, token_type_ids=types).last_hidden_state[0]
    if types.any():
        pooled: torch.Tensor = model.pooler(hidden[lengths.cumsum(0) - lengths][:, None])
        return pooled
    owner = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
    sums = torch.zeros(len(prompts), hidden.shape[1]).index_add_(0, owner, hidden.float())
    return normalize(sums / lengths[:, None], dim=1)


def batches(prompts: list[Prompt], budget: int, *, by_length: bool) -> list[list[Prompt]]:
    """Cut into batches of at most `budget` tokens."""
    result: list[list[Prompt]] = [[]]
    room = budget
    for prompt in sorted(prompts, key=length_of) if by_length else prompts:
        if length_of(prompt) > room:
            result.append([])
            room = budget
        result[-1].append(prompt)
        room -= length_of(prompt)
    return [sorted(batch, key=length_of) for batch in result]


class Limit:
    """The model and its prompts; the best batch size is found once, by trying each."""

    def __init__(self, folder: str, dtype: str, work: str) -> None:
        self.model: Any = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="limit").eval()
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        tokenizer.no_padding()
        tokenizer.enable_truncation(256 if work == "texts" else 512)
        given: Any = sentences()[:1600] if work == "texts" else [pair for group in pairs(work) for pair in group]
        self.prompts = [(encoding.ids, encoding.type_ids) for encoding in tokenizer.encode_batch_fast(given)]
        self.mean_length = statistics.mean(map(length_of, self.prompts))
        cuts = [batches(self.prompts, budget, by_length=by_length) for budget in (512, 1024, 2048, 4096) for by_length in (True, False)]
        self.rate(cuts[2], 2)
        self.rates = [self.rate(cut, 4) for cut in cuts]
        self.best = cuts[self.rates.index(max(self.rates))]

    def rate(self, cut: list[list[Prompt]], seconds: float) -> float:
        """Texts of mean length a second: tokens are counted, since the batches of a short measurement are not of mean length."""
        tokens, started = 0, time.perf_counter()
        for batch in cycle(random.Random(1).sample(cut, len(cut))):
            forward(self.model, batch)
            tokens += sum(map(length_of, batch))
            if time.perf_counter() - started > seconds:
                break
        return tokens / self.mean_length / (time.perf_counter() - started)

    def one(self, count: int) -> float:
        """Median milliseconds of one text at a time."""
        times = []
        for prompt in self.prompts[:count]:
            started = time.perf_counter()
            forward(self.model, [prompt])
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)


def main() -> None:
    """Answer `many SECONDS` and `one COUNT` on standard input, a number a line; the first line is what the calibration found."""
    folder, dtype, threads, work = sys.argv[1:]
    torch.set_num_threads(int(threads))
    AttentionInterface.register("limit", attend)
    AttentionMaskInterface.register("limit", lambda *args, **kwargs: None)
    with torch.inference_mode():
        limit = Limit(folder, dtype, work)
        print(max(limit.rates), flush=True)
        for line in sys.stdin:
            command, value = line.split()
            print(limit.rate(limit.best, float(value)) if command == "many" else limit.one(int(value)), flush=True)


if __name__ == "__main__":
    main()
