"""Attention in plain operations, for models that bend its scores (Gemma 2), which no fused kernel does."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attention_with_softcap"]


def attention_with_softcap(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """query `[n, heads, queries, size]`, keys and values `[n, heads or fewer, tokens, size]` to `[n, heads, queries, size]`.

    mask: to be added to the scores. softcap: scores become `softcap * tanh(scores / softcap)` before the mask (Gemma 2, section 2); None
    leaves them, and the fused kernel computes it.
    """
    if softcap is None:
        shared = query.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=shared)
    repeat = query.shape[1] // keys.shape[1]
    if repeat > 1:
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
