"""Runs the sequences of a step through one model and gives each its outputs."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jackfield.client import ModelCard
from jackfield.engine.attention import PackedBatch, packed_batch
from jackfield.engine.backends import Backend
from jackfield.engine.generation.growing import Generator
from jackfield.engine.poolers import Pooler, SequenceResult, pool, spans_of
from jackfield.engine.scheduler import Sequence

__all__ = ["BackendRunner", "ModelRunner", "Runner"]


class Runner(ABC):
    """A loaded model: hidden states of its batches, and from them the outputs. poolers: by output.

    packed: sequences of any lengths make a good batch; else those of lengths near to each other.
    """

    def __init__(self, card: ModelCard, poolers: dict[str, Pooler], *, packed: bool, has_segments: bool) -> None:
        self.card = card
        self.poolers = poolers
        self.packed = packed
        self.has_segments = has_segments
        # What generates, for a model that does.
        self.generator: Generator | None = None

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
        hidden = self.hidden([s.token_ids for s in unique], [s.segment for s in unique])
        results = pool(self.poolers, hidden, spans_of(unique))
        return [results[place] for place in places]

    def hidden(self, token_ids: list[bytes], segments: list[int] | None = None) -> torch.Tensor:
        """Last hidden states `[T, H]` of prompts given shortest first, end to end. segments: tokens of each one's first part; 0 for all."""
        prompts = [np.frombuffer(ids, dtype=np.int32) for ids in token_ids]
        return self._hidden(prompts, segments if segments and self.has_segments and any(segments) else None)

    @abstractmethod
    def _hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor: ...


class BackendRunner(Runner):
    """A model whose hidden states come from a plugin's backend."""

    def __init__(self, card: ModelCard, backend: Backend, poolers: dict[str, Pooler], *, has_segments: bool) -> None:
        super().__init__(card, poolers, packed=False, has_segments=has_segments)
        self._backend = backend

    def _hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        states = torch.as_tensor(self._backend.hidden(prompts, segments))
        tokens = sum(map(len, prompts))
        if states.dim() != 2 or len(states) != tokens or states.dtype != torch.float32:
            raise ValueError(f"the backend gave {states.dtype} of the shape {tuple(states.shape)} for {tokens} tokens")
        return states


class ModelRunner(Runner):
    """A loaded torch model and how its batches run.

    packed: sequences end to end in one row; else in batches of equal length. position_offset: the position id of a
    first token. has_segments: whether the model tells the first part of a pair from the second (`token_type_ids`). rope_switch: a prompt of
    more tokens than this has other rotary frequencies than one of fewer, and the model keeps those of its last batch; 0: nothing such.
    """

    def __init__(
        self,
        card: ModelCard,
        model: torch.nn.Module,
        poolers: dict[str, Pooler],
        *,
        packed: bool,
        position_offset: int,
        has_segments: bool,
        rope_switch: int,
        forward_args: dict[str, Any],
    ) -> None:
        super().__init__(card, poolers, packed=packed, has_segments=has_segments)
        self.model = model
        self.rope_switch = rope_switch
        # The frequencies of its rotary positions are the model's: whoever sets them keeps others from computing until it has.
        self.rope_lock = threading.Lock()
        self.forward_args = forward_args
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._positions = np.arange(position_offset, card.max_length + position_offset + 1)

    def _hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        if not self.rope_switch:
            return self._forward(prompts, segments)
        # Shortest first, so one cut parts those before the switch from those after it. Frequencies are set within the pass: one at a time.
        cut = sum(len(prompt) <= self.rope_switch for prompt in prompts)
        halves = [slice(0, cut), slice(cut, len(prompts))]
        with self.rope_lock:
            states = [self._forward(prompts[half], segments and segments[half]) for half in halves if prompts[half]]
        return states[0] if len(states) == 1 else torch.cat(states)

    def _forward(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        return self._packed(prompts, segments) if self.packed else self._buckets(prompts, segments)

    def _packed(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        lengths = [len(prompt) for prompt in prompts]
        batch = PackedBatch(lengths, self.device, self.dtype)
        # Padding is the token 0 at the first position: any valid one will do, nothing of it is read.
        ids = np.zeros(batch.layout.total, dtype=np.int64)
        positions = np.full(batch.layout.total, self._positions[0], dtype=np.int64)
        for prompt, start in zip(prompts, batch.layout.starts, strict=True):
            ids[start : start + len(prompt)] = prompt
            positions[start : start + len(prompt)] = self._positions[: len(prompt)]
        more = {} if segments is None else {"token_type_ids": self._row(_kinds(segments, lengths, batch.layout.starts, batch.layout.total))}
        with packed_batch(batch):
            output = self.model(input_ids=self._row(ids), position_ids=self._row(positions), **more, **self.forward_args)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden.index_select(0, batch.rows.to(self.device))

    def _buckets(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        done = 0
        for length, group in itertools.groupby(prompts, key=len):
            rows = np.stack(list(group)).astype(np.int64)
            batch = torch.from_numpy(rows).to(self.device)
            more = {}
            if segments is not None:
                count = len(rows)
                kinds = _kinds(segments[done : done + count], [length] * count, [length * n for n in range(count)], length * count)
                more = {"token_type_ids": torch.from_numpy(kinds.reshape(count, length)).to(self.device)}
            done += len(rows)
            output = self.model(input_ids=batch, attention_mask=torch.ones_like(batch), **more, **self.forward_args)
            parts.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(parts)

    def _row(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values)[None].to(self.device)


def _kinds(segments: list[int], lengths: list[int], starts: list[int], total: int) -> NDArray[np.int64]:
    """Token type ids of a row: 1 from the end of a sequence's first part on."""
    kinds = np.zeros(total, dtype=np.int64)
    for segment, length, start in zip(segments, lengths, starts, strict=True):
        if segment:
            kinds[start + segment : start + length] = 1
    return kinds
