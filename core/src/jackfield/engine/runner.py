"""Runs the sequences of a step through one model and gives each its outputs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jackfield.client import ModelCard
from jackfield.engine.attention import PackedBatch, packed_batch
from jackfield.engine.pooler import Pooler, SequenceResult
from jackfield.engine.scheduler import Sequence

__all__ = ["ModelRunner"]


class ModelRunner:
    """A loaded model and how its batches run.

    packed: sequences end to end in one row; else in batches of equal length. takes_positions: forward has a `position_ids` argument.
    position_offset: the position id of a first token.
    """

    def __init__(
        self,
        card: ModelCard,
        model: torch.nn.Module,
        pooler: Pooler,
        *,
        packed: bool,
        causal: bool,
        position_offset: int,
        forward_args: dict[str, Any],
    ) -> None:
        self.card = card
        self.model = model
        self.pooler = pooler
        self.packed = packed
        self.causal = causal
        self.forward_args = forward_args
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._positions = np.arange(position_offset, card.max_length + position_offset + 1)

    @torch.inference_mode()
    def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """One result a sequence, in their order: arrays by output, or the error of that sequence alone.

        Identical prompts that ask for the same are computed once.
        """
        places: list[int] = []
        unique: list[Sequence] = []
        known: dict[object, int] = {}
        for sequence in sequences:
            place = known.setdefault(sequence.key, len(unique))
            if place == len(unique):
                unique.append(sequence)
            places.append(place)
        results = self.pooler(self.hidden([sequence.token_ids for sequence in unique]), unique)
        return [results[place] for place in places]

    def hidden(self, token_ids: list[bytes]) -> torch.Tensor:
        """Last hidden states `[T, H]` of prompts given shortest first, end to end."""
        prompts = [np.frombuffer(ids, dtype=np.int32) for ids in token_ids]
        return self._packed(prompts) if self.packed else self._buckets(prompts)

    def _packed(self, prompts: list[NDArray[np.int32]]) -> torch.Tensor:
        lengths = [len(prompt) for prompt in prompts]
        batch = PackedBatch(lengths, self.device, self.dtype, causal=self.causal)
        # Padding is the token 0 at the first position: any valid one will do, nothing of it is read.
        ids = np.zeros(batch.layout.total, dtype=np.int64)
        positions = np.full(batch.layout.total, self._positions[0], dtype=np.int64)
        for prompt, start in zip(prompts, batch.layout.starts, strict=True):
            ids[start : start + len(prompt)] = prompt
            positions[start : start + len(prompt)] = self._positions[: len(prompt)]
        with packed_batch(batch):
            output = self.model(
                input_ids=torch.from_numpy(ids)[None].to(self.device),
                position_ids=torch.from_numpy(positions)[None].to(self.device),
                **self.forward_args,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden.index_select(0, batch.rows.to(self.device))

    def _buckets(self, prompts: list[NDArray[np.int32]]) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for _, group in itertools.groupby(prompts, key=len):
            batch = torch.from_numpy(np.stack(list(group)).astype(np.int64)).to(self.device)
            output = self.model(input_ids=batch, attention_mask=torch.ones_like(batch), **self.forward_args)
            parts.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(parts)
