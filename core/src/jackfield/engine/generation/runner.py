"""Runs the steps of a model that generates: tokens through the model, their keys and values into the cache, the last ones to a sampler."""

from __future__ import annotations

import threading
from typing import Any

import torch

from jackfield.engine.generation.blocks import BlockPool
from jackfield.engine.generation.cache import KVCache
from jackfield.engine.generation.grammars import start_masks
from jackfield.engine.generation.growing import GrowingChoice
from jackfield.engine.generation.head import LogitsHead
from jackfield.engine.generation.paged import Chunk, PagedBatch, paged_batch
from jackfield.engine.generation.rows import Result, Row
from jackfield.engine.generation.sampler import sample, tell
from jackfield.engine.generation.scheduler import Work
from jackfield.outputs import TokenLogprob

__all__ = ["PagedRunner", "padded_rows"]

# Rows of a prompt whose logits are made at once, where they are to be told: of a vocabulary of 150,000 these are 40 MB.
TOLD_ROWS = 64


def padded_rows(count: int) -> int:
    """Up to 8 rows as they are, more in steps of an eighth of what they are: 36 numbers up to 1,024.

    oneDNN keeps kernels for each number of rows that a product has met, half a MB of each layer that is unlike the others.
    """
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


class PagedRunner:
    """A model's base and head over one cache: a Generator.

    position_offset: the position id of a first token. switch: sequences of more tokens than this have other rotary frequencies, and are
    computed apart. rope_lock: held while they are, since the model keeps those of its last pass. share: whether prompts find each other's
    blocks.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        head: LogitsHead,
        cache: KVCache,
        *,
        end_ids: tuple[int, ...],
        max_running: int,
        share: bool,
        position_offset: int,
        switch: int,
        rope_lock: threading.Lock,
        forward_args: dict[str, Any],
    ) -> None:
        self.cache = cache
        self.pool = BlockPool(cache.num_blocks, cache.block_size, share=share)
        self.end_ids = end_ids
        self.max_running = max_running
        self._base = base
        self._head = head
        self._position_offset = position_offset
        self.switch = switch
        self._rope_lock = rope_lock
        self._forward_args = forward_args
        self._device = next(base.parameters()).device

    @torch.inference_mode()
    def clear(self, blocks: list[int]) -> None:
        """Let these blocks hold zeros."""
        if blocks:
            self.cache.clear(blocks)

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """One result a work, in their order."""
        if not self.switch:
            return self._run(works, beyond=False)
        results: dict[int, Result] = {}
        with self._rope_lock:
            for beyond in (False, True):
                part = [work for work in works if (len(work.choice.token_ids) > self.switch) == beyond]
                if part:
                    results |= {id(work): result for work, result in zip(part, self._run(part, beyond=beyond), strict=True)}
        return [results[id(work)] for work in works]

    def _run(self, works: list[Work], *, beyond: bool) -> list[Result]:
        batch = PagedBatch(self.cache, [Chunk(work.choice.held.blocks, work.start, work.num_tokens) for work in works])
        ids: list[int] = []
        for place in batch.order:
            work = works[place]
            ids += work.choice.token_ids[work.start : work.start + work.num_tokens]
        due = [place for place, work in enumerate(works) if work.samples and not work.choice.is_full]
        rows = [_row(works[place]) for place in due]
        masks = start_masks(rows)
        states = self.states(batch, ids, beyond=beyond)
        sampled = {}
        if due:
            logits = self._head(states[[batch.last[place] for place in due]])
            sampled = dict(zip(due, sample(logits, rows, masks.result() if masks else None), strict=True))
        return [
            Result(sampled.get(place), self._told(work, states[batch.last[place] + 1 - work.num_tokens : batch.last[place] + 1]))
            for place, work in enumerate(works)
        ]

    def states(self, batch: PagedBatch, ids: list[int], *, beyond: bool = False) -> torch.Tensor:
        """Last hidden states `[rows, H]` of a batch's tokens, in its order, and of padding after them. beyond: as of sequences longer than
        the switch."""
        padding = padded_rows(len(ids)) - len(ids)
        # In the cache of nobody. Where positions beyond the switch are meant, one is there, whatever the others' are.
        places = [*batch.positions(), *[self.switch if beyond else 0] * (padding or beyond)]
        ids = [*ids, *[0] * (padding or beyond)]
        with paged_batch(batch):
            output = self._base(
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([places], device=self._device).add_(self._position_offset),
                **self._forward_args,
            )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def _told(self, work: Work, states: torch.Tensor) -> list[TokenLogprob]:
        """Log-probabilities of the prompt's tokens after the first of the step. states: of the step's tokens."""
        choice = work.choice
        if not isinstance(choice, GrowingChoice) or choice.told_prompt is None:
            return []
        params = choice.row.params
        targets = choice.token_ids[work.start + 1 : min(work.start + work.num_tokens + 1, choice.num_prompt)]
        told: list[TokenLogprob] = []
        for start in range(0, len(targets), TOLD_ROWS):
            part = targets[start : start + TOLD_ROWS]
            known = self._head(states[start : start + len(part)]).log_softmax(dim=-1)
            told += [tell(row, target, params.prompt_logprobs or 0) for row, target in zip(known, part, strict=True)]
        return told


def _row(work: Work) -> Row:
    assert isinstance(work.choice, GrowingChoice)
    return work.choice.row
