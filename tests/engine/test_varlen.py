"""Attention of packed sequences: the reference against plain arithmetic, and the GPU's kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.engine.varlen import varlen_attention, varlen_reference

DIM = 16
HEADS = [(2, 2), (4, 2), (4, 1)]
thorough = settings(max_examples=50, deadline=None)
windows = st.none() | st.integers(1, 80)
lengths_of_batches = st.lists(st.integers(1, 70), min_size=1, max_size=6)

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_states(total: int, heads: tuple[int, int], seed: int, dim: int = DIM) -> States:
    """Query, key and value, `[1, heads, T, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, count, total, dim, generator=generator) for count in (heads[0], heads[1], heads[1]))
    return query, key, value


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def by_hand(states: States, scale: float | None, causal: bool, window: int | None) -> torch.Tensor:
    """softmax(q k^T scale) v of one sequence in float64, head by head: `[n, heads, dim]`."""
    query, key, value = (tensor[0].double() for tensor in states)
    shared = query.shape[0] // key.shape[0]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    heads: list[torch.Tensor] = []
    for number in range(query.shape[0]):
        scores = query[number] @ key[number // shared].T * factor
        if causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
        if window is not None:
            places = torch.arange(len(scores))
            scores = scores.masked_fill((places[:, None] - places[None, :]).abs() >= window, float("-inf"))
        heads.append(scores.softmax(-1) @ value[number // shared])
    return torch.stack(heads, dim=1).float()


@thorough
@given(lengths_of_batches, st.sampled_from(HEADS), st.sampled_from([None, 0.3, 1.0]), st.booleans(), windows, st.integers(0, 2**16))
def test_reference_is_attention_alone(
    lengths: list[int], heads: tuple[int, int], scale: float | None, causal: bool, window: int | None, seed: int
) -> None:
    query, key, value = random_states(sum(lengths), heads, seed)
    ends = boundaries(lengths)
    out = varlen_reference(query, key, value, ends, scale, causal, window)
    assert out.shape == (1, sum(lengths), heads[0], DIM)
    parts = [
        by_hand((query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]), scale, causal, window)
        for start, end in pairwise(ends.tolist())
    ]
    torch.testing.assert_close(out[0], torch.cat(parts), atol=1e-5, rtol=0)


@thorough
@given(lengths_of_batches, st.sampled_from(HEADS), st.booleans(), windows, st.sampled_from([torch.float32, torch.bfloat16]))
def test_without_a_gpu_the_reference_serves(
    lengths: list[int], heads: tuple[int, int], causal: bool, window: int | None, dtype: torch.dtype
) -> None:
    query, key, value = (tensor.to(dtype) for tensor in random_states(sum(lengths), heads, 1))
    ends = boundaries(lengths)
    out = varlen_attention(query, key, value, ends, max(lengths), 0.3, causal, window)
    assert out.dtype == dtype
    assert torch.equal(out, varlen_reference(query, key, value, ends, 0.3, causal, window))


def test_causal_tokens_see_no_later_ones() -> None:
    """The first token of each sequence attends to itself alone, the second to two."""
    query, key, value = random_states(5, (2, 2), 3)
    out = varlen_reference(query, key, value, boundaries([2, 3]), None, causal=True)
    torch.testing.assert_close(out[0, 0], value[0, :, 0])
    torch.testing.assert_close(out[0, 2], value[0, :, 2])
    assert not torch.allclose(out[0, 3], value[0, :, 3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch's variable-length kernel has no CPU version")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["heads", "grouped"])
@pytest.mark.parametrize("scale", [None, 0.25], ids=["default", "scaled"])
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("lengths", [[1], [7, 130, 1, 64, 512], [33] * 40], ids=["one", "mixed", "many"])
def test_kernel_is_the_reference(lengths: list[int], window: int | None, scale: float | None, heads: tuple[int, int], causal: bool) -> None:
    states = random_states(sum(lengths), heads, seed=len(lengths), dim=64)
    query, key, value = (tensor.to(device="cuda", dtype=torch.bfloat16) for tensor in states)
    ends = boundaries(lengths).cuda()
    ours = varlen_attention(query, key, value, ends, max(lengths), scale, causal, window)
    theirs = varlen_reference(query, key, value, ends, scale, causal, window)
    assert ours.shape == theirs.shape == (1, sum(lengths), heads[0], 64)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)
