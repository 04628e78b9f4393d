"""Makes the generating side of a model when it is loaded, and tries it."""

from __future__ import annotations

import math
import threading
from typing import Any

import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from jackfield.client import ModelCard, ModelSpec
from jackfield.engine.attention import no_mask
from jackfield.engine.generation.blocks import BlockPool, Held
from jackfield.engine.generation.cache import KVCache
from jackfield.engine.generation.head import LogitsHead
from jackfield.engine.generation.paged import Chunk, PagedBatch
from jackfield.engine.generation.runner import PagedRunner
from jackfield.errors import ModelError
from jackfield.settings import EngineSettings

__all__ = ["cached_shapes", "cut_to_cache", "paged_runner", "paged_states"]

MIB = 2**20
CPU_CACHE_MIB = 512
# Not measured: no GPU has run this yet.
GPU_CACHE_MIB = 4096

PROBE = "jackfield_probe"
# Of the smallest cache that a model starts with.
MIN_BLOCKS = 80
# Tokens a piece of the trial's prompts.
TRIAL_CHUNK = 16

_seen: dict[int, tuple[int, int, int]] = {}


def _probe(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Notes what a layer caches. Its result is nothing that anybody reads."""
    _seen[int(module.layer_idx)] = (key.shape[1], key.shape[-1], value.shape[-1])  # type: ignore[arg-type]
    shared = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, enable_gqa=shared).transpose(1, 2), None


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, no_mask)


def paged_runner(
    spec: ModelSpec,
    base: Any,
    head: LogitsHead,
    shapes: list[tuple[int, int, int]],
    settings: EngineSettings,
    *,
    end_ids: tuple[int, ...],
    position_offset: int,
    switch: int,
    rope_lock: threading.Lock,
    forward_args: dict[str, Any],
) -> PagedRunner:
    """The runner of a base whose attention goes through the registry. shapes: what its layers cache.

    Raises: ModelError when the cache has no room for a few tokens.
    """
    cache = _make_cache(spec, shapes, next(base.parameters()), settings)
    return PagedRunner(
        base,
        head,
        cache,
        end_ids=end_ids,
        max_running=settings.max_running,
        share=settings.prefix_cache,
        position_offset=position_offset,
        switch=switch,
        rope_lock=rope_lock,
        forward_args=forward_args,
    )


def cut_to_cache(card: ModelCard, cache: KVCache) -> ModelCard:
    """The card of a model whose longest text must fit into its cache."""
    room = cache.num_blocks * cache.block_size
    if room >= card.max_length:
        return card
    note = f"context of {card.max_length} tokens cut to the {room} that its cache holds ([engine] kv_cache_mib)"
    return msgspec.structs.replace(card, max_length=room, notes=(*card.notes, note))


def _make_cache(spec: ModelSpec, shapes: list[tuple[int, int, int]], like: torch.Tensor, settings: EngineSettings) -> KVCache:
    """A cache of the configured size, of a parameter's dtype and device. Raises: ModelError."""
    mib = settings.kv_cache_mib or (CPU_CACHE_MIB if like.device.type == "cpu" else GPU_CACHE_MIB)
    cache = KVCache(shapes, mib * MIB, like.dtype, like.device)
    if cache.num_blocks < MIN_BLOCKS:
        raise ModelError(
            f"model {spec.id!r}: [engine] kv_cache_mib = {mib} holds {cache.num_blocks * cache.block_size} of its tokens; it takes "
            f"{math.ceil(MIN_BLOCKS * cache.block_bytes / MIB)} MiB to begin with"
        )
    return cache


@torch.inference_mode()
def paged_states(runner: PagedRunner, prompts: list[list[int]], switch: int) -> torch.Tensor:
    """Last hidden states `[T, H]` of prompts, end to end, computed as a generation would: in pieces, side by side, the last token alone."""
    states: list[list[torch.Tensor]] = [[] for _ in prompts]
    pairs = [places[start : start + 2] for places in _apart(prompts, switch) for start in range(0, len(places), 2)]
    for pair in pairs:
        pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
        helds, done = {place: Held() for place in pair}, dict.fromkeys(pair, 0)
        while going := [place for place in pair if done[place] < len(prompts[place])]:
            chunks = []
            for place in going:
                left = len(prompts[place]) - done[place]
                size = min(TRIAL_CHUNK, max(left - 1, 1))
                pool.grow(helds[place], done[place] + size)
                chunks.append(Chunk(helds[place].blocks, done[place], size))
            batch = PagedBatch(runner.cache, chunks)
            ids = [token for i in batch.order for token in prompts[going[i]][chunks[i].start : chunks[i].end]]
            rows = runner.states(batch, ids, beyond=bool(switch) and len(prompts[pair[0]]) > switch)
            for i, place in enumerate(going):
                states[place].append(rows[batch.last[i] + 1 - chunks[i].length : batch.last[i] + 1])
                done[place] = chunks[i].end
    return torch.cat([part for parts in states for part in parts])


def _apart(prompts: list[list[int]], switch: int) -> list[list[int]]:
    """Places of prompts that may be neighbours."""
    beyond = [bool(switch) and len(prompt) > switch for prompt in prompts]
    return [[place for place, far in enumerate(beyond) if far == side] for side in (False, True)]


@torch.inference_mode()
def cached_shapes(base: Any) -> list[tuple[int, int, int]] | None:
    """Key-value heads and the sizes of their keys and values, by layer; None for a model that is not made of numbered attention layers.

    Leaves the base with another attention than it had.
    """
    _seen.clear()
    base.set_attn_implementation(PROBE)
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(base.parameters()).device)
    base(input_ids=ids, position_ids=ids, use_cache=False)
    layers = int(getattr(base.config.get_text_config(), "num_hidden_layers", 0))
    return [_seen[layer] for layer in range(layers)] if layers and sorted(_seen) == list(range(layers)) else None
