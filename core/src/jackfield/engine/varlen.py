"""Variable-length attention: torch's `varlen_attn` on a GPU, and a reference of the same meaning for any device.

The GPU paths have NOT been run on a GPU yet: the kernel has no CPU version. `tests/engine/test_varlen.py` holds the references equal to
attention one sequence at a time on the CPU; `make test-gpu` holds the kernel equal to the references where there is one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Paging", "paged_attention", "paged_reference", "varlen_attention", "varlen_reference"]


class Paging(NamedTuple):
    """Which queries and which pages belong to which of n sequences.

    cu_seqlens: int32 `[n + 1]`, where each one's queries begin and the last end. used: int32 `[n]`, tokens in the pages, the queries' own
    included. table: int32 `[n, pages]`, each one's pages in order, any page behind them. max_queries, max_used: of one sequence.
    """

    cu_seqlens: torch.Tensor
    used: torch.Tensor
    table: torch.Tensor
    max_queries: int
    max_used: int


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scale: float | None,
    causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of packed sequences.

    query, key, value: `[1, heads, T, dim]` (fewer key and value heads are shared, GQA). cu_seqlens: int32 `[n + 1]`, where each sequence
    begins and the last ends. window: a token sees those nearer than this only. Returns `[1, T, heads, dim]`. Half precision on CUDA takes
    the kernel, everything else the reference.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (only where there is a GPU)

        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        before = -1 if window is None else window - 1
        out = varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_length,
            max_length,
            scale=scale,
            window_size=(before, 0 if causal else before),
            enable_gqa=q.shape[1] != k.shape[1],
            num_splits=1,  # else the split depends on the longest neighbour, and so would the result
        )
        assert isinstance(out, torch.Tensor)  # a pair only where return_aux asks for one
        return out.unsqueeze(0)
    return varlen_reference(query, key, value, cu_seqlens, scale, causal, window)


def varlen_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None,
    causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """What `varlen_attention` computes, one sequence at a time."""
    out = torch.empty_like(query.transpose(1, 2))
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        mask = None
        if window is not None:
            places = torch.arange(end - start, device=query.device)
            distance = places[:, None] - places[None, :]
            mask = (distance.abs() < window) & (distance >= 0 if causal else True)
        part = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[:, start:end] = part.transpose(1, 2)
    return out


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paging: Paging, scale: float | None, window: int | None = None
) -> torch.Tensor:
    """Causal attention of sequences whose keys and values lie in pages.

    query: `[T, heads, dim]`, of each sequence its last tokens. keys, values: all pages, `[pages, page size, key-value heads, dim]`. window:
    a token sees those nearer than this only. Returns `[T, heads, dim]`. Half precision on CUDA takes the kernel, everything else the
    reference.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (only where there is a GPU)

        out = varlen_attn(
            query,
            keys,
            values,
            paging.cu_seqlens,
            None,
            paging.max_queries,
            paging.max_used,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=paging.used,
            block_table=paging.table,
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)
        return out
    return paged_reference(query, keys, values, paging, scale, window)


def paged_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paging: Paging, scale: float | None, window: int | None = None
) -> torch.Tensor:
    """What `paged_attention` computes, one sequence at a time."""
    parts: list[torch.Tensor] = []
    for number, (start, end) in enumerate(pairwise(paging.cu_seqlens.tolist())):
        used = int(paging.used[number])
        own_keys, own_values = (pages[paging.table[number]].flatten(0, 1)[:used].transpose(0, 1)[None] for pages in (keys, values))
        places = torch.arange(used, device=query.device)
        distance = places[used - (end - start) :, None] - places[None, :]
        mask = (distance >= 0) & (distance < (window or used))
        own = query[start:end].transpose(0, 1)[None]
        shared = own.shape[1] != own_keys.shape[1]
        out = scaled_dot_product_attention(own, own_keys, own_values, attn_mask=mask, scale=scale, enable_gqa=shared)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
