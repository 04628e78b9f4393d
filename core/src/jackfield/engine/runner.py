"""Runs the sequences of a step through one model and gives each its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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
        self.device = next(model.parameters()).device
        longest = card.max_length + position_offset + 1
        self._positions = torch.arange(position_offset, longest)

    @torch.inference_mode()
    def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """One result a sequence, in their order: arrays by output, or the error of that sequence alone.

        Identical prompts (same ids, same instruction length) are computed once.
        """
        unique: dict[tuple[bytes, int], int] = {}
        representatives: list[Sequence] = []
        places: list[int] = []
        for sequence in sequences:
            lengths = sequence.group.request.prefix_lengths
            key = (sequence.token_ids, lengths[sequence.index] if lengths else 0)
            place = unique.setdefault(key, len(representatives))
            if place == len(representatives):
                representatives.append(sequence)
            places.append(place)
        hidden = self.hidden([s.token_ids for s in representatives])
        if len(representatives) == len(sequences):
            return self.pooler(hidden, sequences)
        return self._spread(hidden, sequences, representatives, places)

    def hidden(self, token_ids: list[bytes]) -> torch.Tensor:
        """Last hidden states `[T, H]` of prompts given shortest first, end to end."""
        lengths = [len(ids) // 4 for ids in token_ids]
        ids = torch.from_numpy(np.frombuffer(b"".join(token_ids), dtype=np.int32).astype(np.int64))
        if self.packed:
            return self._packed(ids, lengths)
        return self._buckets(ids, lengths)

    def _packed(self, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        positions = torch.cat([self._positions[:length] for length in lengths])
        batch = PackedBatch(lengths, self.device, causal=self.causal)
        with packed_batch(batch):
            output = self.model(input_ids=ids[None].to(self.device), position_ids=positions[None].to(self.device), **self.forward_args)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _buckets(self, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for start, end, count, length in PackedBatch(lengths, torch.device("cpu"), causal=self.causal).groups:
            batch = ids[start:end].view(count, length).to(self.device)
            output = self.model(input_ids=batch, attention_mask=torch.ones_like(batch), **self.forward_args)
            parts.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(parts)

    def _spread(
        self, hidden: torch.Tensor, sequences: list[Sequence], representatives: list[Sequence], places: list[int]
    ) -> list[SequenceResult]:
        """Pool for every sequence from the states of its representative: parameters may differ where prompts do not."""
        starts = np.cumsum([0, *(s.length for s in representatives)])
        rows = np.concatenate([np.arange(starts[p], starts[p + 1]) for p in places])
        return self.pooler(hidden[torch.from_numpy(rows).to(hidden.device)], sequences)
