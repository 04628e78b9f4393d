"""Variable-length attention: torch's `varlen_attn` on a GPU, and a reference of the same meaning for any device.

The GPU path has NOT been run on a GPU yet: its kernel has no CPU version. `tests/engine/test_varlen.py` holds the reference equal to
attention one sequence at a time on the CPU; `make test-gpu` holds the kernel equal to the reference where there is one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["varlen_attention", "varlen_reference"]


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
