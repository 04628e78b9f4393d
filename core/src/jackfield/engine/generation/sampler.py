"""From rows of logits to the next tokens: every row by its own parameters, all rows of a step at once where that is the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from jackfield.engine.generation.best import greatest
from jackfield.engine.generation.grammars import cut
from jackfield.engine.generation.rows import Row, Sampled, uniform
from jackfield.outputs import TokenLogprob
from jackfield.params import SamplingParams

__all__ = ["NUM_CANDIDATES", "sample", "tell"]

# Candidates that top-p and min-p look at before the whole vocabulary is sorted: half a millisecond for 16 rows against 40.
NUM_CANDIDATES = 256
# JSON has no number for less, and no client expects one.
LEAST_LOGPROB = -9999.0


def sample(logits: torch.Tensor, rows: list[Row], masks: NDArray[np.int32] | None = None) -> list[Sampled]:
    """One token a row. logits: `[rows, vocabulary]`, float32; changed in place. masks: of the rows with a grammar, in their order, which
    tokens may come (`start_masks`)."""
    best, greedy = greatest(logits)
    finite = best.isfinite().tolist()  # a NaN is the greatest of all
    # By the model's own logits, before anything changes them.
    told = [logits[i].log_softmax(dim=-1) if finite[i] and row.params.logprobs is not None else None for i, row in enumerate(rows)]
    if masks is not None:  # the head is as wide as the vocabulary
        cut(logits, [i for i, row in enumerate(rows) if row.matcher is not None], masks)
    changed = [i for i, row in enumerate(rows) if finite[i] and row.changes]
    for i in changed:
        _change(logits[i], rows[i])
    empty: set[int] = set()
    if changed:
        best, greedy = greatest(logits)  # of all, which takes less than copying those
        greatest_of = best.tolist()
        empty = {i for i in changed if greatest_of[i] == -math.inf}
    chosen = greedy.tolist()
    drawn = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature > 0 and i not in empty]
    if drawn:
        for i, token_id in zip(drawn, _draw(logits[drawn], [rows[i] for i in drawn]), strict=True):
            chosen[i] = token_id
    return [
        Sampled(None, is_barred=i in empty)
        if i in empty or not finite[i]
        else Sampled(token_id, known if known is None else tell(known, token_id, row.params.logprobs or 0, row.params.logprob_token_ids))
        for i, (token_id, known, row) in enumerate(zip(chosen, told, rows, strict=True))
    ]


def tell(known: torch.Tensor, token_id: int, count: int, more: Sequence[int] = ()) -> TokenLogprob:
    """known: log-probabilities of the vocabulary. count: how many of the likeliest to tell beside the token's own; more: others, by id."""
    values, ids = known.topk(min(count, len(known)))
    top = [
        TokenLogprob(token_id=i, logprob=_told(v), rank=rank)
        for rank, (i, v) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1)
    ]
    shown = {entry.token_id for entry in top}
    return _entry(known, token_id, tuple(top) + tuple(_entry(known, one) for one in more if one not in shown))


def _entry(known: torch.Tensor, token_id: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    own = known[token_id]
    return TokenLogprob(token_id=token_id, logprob=_told(float(own)), rank=int((known > own).sum()) + 1, top=top)


def _told(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _change(logits: torch.Tensor, row: Row) -> None:
    """What a request asks for before the temperature, in place."""
    params = row.params
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(-math.inf)
        logits[allowed] = kept
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
    for word in params.bad_words:
        assert not isinstance(word, str)  # the core has turned texts into ids
        *before, last = word
        if not before or row.text_ids[-len(before) :] == before:
            logits[last] = -math.inf
    if len(row.text_ids) < params.min_tokens and row.end_ids:
        logits[sorted(row.end_ids)] = -math.inf
    if row.penalises:
        _penalise(logits, row)


def _penalise(logits: torch.Tensor, row: Row) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(row.prompt_set | row.counts.keys()))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        counts = torch.tensor(list(row.counts.values()), dtype=logits.dtype)
        logits[list(row.counts)] -= counts * params.frequency_penalty + params.presence_penalty


def _draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    """One token a row, by its temperature and bounds."""
    noise = torch.tensor([uniform(row.seed, len(row.text_ids)) for row in rows], dtype=torch.float64)
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64).clamp_(min=1e-300)
    # The greatest becomes 0 before the division: the smallest temperature then makes nothing but zeros and -inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double().div_(temperatures[:, None])
    weights = scaled.exp_()
    whole = [i for i, row in enumerate(rows) if not _is_bounded(row.params)]
    tokens = [0] * len(rows)
    for i, token_id in zip(whole, _pick(weights[whole], noise[whole]), strict=True):
        tokens[i] = token_id
    bounded = [i for i, row in enumerate(rows) if _is_bounded(row.params)]
    if bounded:
        for i, token_id in zip(bounded, _bounded(weights[bounded], noise[bounded], [rows[i].params for i in bounded]), strict=True):
            tokens[i] = token_id
    return tokens


def _is_bounded(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _pick(weights: torch.Tensor, noise: torch.Tensor) -> list[int]:
    """The place where the running sum of weights passes the noise's share of all of them."""
    if not len(weights):
        return []
    sums = weights.cumsum(dim=-1)
    places = torch.searchsorted(sums, (noise * sums[:, -1])[:, None], right=True)
    chosen: list[int] = places[:, 0].clamp_(max=weights.shape[-1] - 1).tolist()
    return chosen


def _bounded(weights: torch.Tensor, noise: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    total = weights.sum(dim=-1)
    size = weights.shape[-1]
    count = min(size, max(NUM_CANDIDATES, *(one.top_k for one in params)))
    kept, ids = _candidates(weights, total, params, count)
    short = [i for i, one in enumerate(params) if count < size and not one.top_k and bool(kept[i, -1] > 0)]
    tokens = ids.gather(1, torch.tensor(_pick(kept, noise))[:, None])[:, 0].tolist()
    if short:  # the last candidate is still inside: there are more
        some = [params[i] for i in short]
        kept, ids = _candidates(weights[short], total[short], some, size)
        for i, place, row in zip(short, _pick(kept, noise[short]), ids, strict=True):
            tokens[i] = int(row[place])
    return [int(token_id) for token_id in tokens]


def _candidates(weights: torch.Tensor, total: torch.Tensor, params: list[SamplingParams], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The heaviest tokens, heaviest first, with weight 0 for those that a row's bounds leave out, and their ids."""
    values, ids = weights.topk(count, dim=-1)
    least = torch.tensor([one.min_p for one in params], dtype=values.dtype)[:, None] * values[:, :1]
    ks = torch.tensor([one.top_k or weights.shape[-1] for one in params])[:, None]
    kept = values * ((torch.arange(count)[None] < ks) & (values >= least))
    # Of what min-p and top-k have left; without them, of the whole vocabulary.
    cut = torch.tensor([bool(one.top_k) or one.min_p > 0 for one in params])
    mass = torch.where(cut, kept.sum(dim=-1), total)[:, None]
    before = kept.cumsum(dim=-1) - kept
    return kept * (before < torch.tensor([one.top_p for one in params], dtype=values.dtype)[:, None] * mass), ids
