"""The streaming algorithm in plain torch, list by list: sort the relevant scores, search the others among them.

What the CPU engine falls back to without Numba, and for float64 and float8 scores.
"""

import torch
from torch import Tensor

from rankgrad.engine.precision import compute_dtype, count_dtype


def _list(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Indices and shifted scores of a list's irrelevant and relevant items, and whether a score is NaN."""
    exists = torch.ones_like(relevance) if mask is None else mask
    others, own = (exists & ~relevance).nonzero().squeeze(1), (exists & relevance).nonzero().squeeze(1)
    dtype = compute_dtype(scores.dtype)
    half = torch.full((), margin / 2, dtype=dtype, device=scores.device)
    low, high = scores[own].to(dtype) - half, scores[others].to(dtype) + half
    return others, high, own, low, bool(low.isnan().any() or high.isnan().any())


def _place(values: Tensor, levels: Tensor) -> Tensor:
    """How many of the levels (sorted, best first) are strictly above each value."""
    return len(levels) - torch.searchsorted(levels.flip(0), values, right=True)


def _above(places: Tensor, slots: int) -> Tensor:
    """Irrelevant items at or above each slot, from the places of the irrelevant items."""
    return torch.bincount(places, minlength=slots + 1).cumsum(0)[:slots]


def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one; see :func:`rankgrad.engine.reference.relevant_ranks`."""
    calls, lists, n = scores.shape
    above = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    position = torch.full_like(above, n)
    count = torch.zeros(calls, lists, dtype=torch.int64, device=scores.device)
    poison = torch.zeros_like(count, dtype=torch.float64)
    for call in range(calls):
        for at in range(lists):
            exists = None if mask is None else mask[call, at]
            _, others, own, levels, nan = _list(scores[call, at], relevance[call, at], exists, margin)
            if nan:
                poison[call, at] = torch.nan
                continue
            levels, order = levels.sort(descending=True, stable=True)
            p = len(levels)
            count[call, at] = p
            position[call, at, :p] = own[order]
            above[call, at, :p] = _above(_place(others, levels), p)
    return above, position, count, poison


def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two; see :func:`rankgrad.engine.reference.rank_changes`."""
    calls, lists, n = scores.shape
    changes = torch.zeros(scores.shape, dtype=count_dtype(n), device=scores.device)
    for call in range(calls):
        for at in range(lists):
            exists = None if mask is None else mask[call, at]
            index, others, own, levels, _ = _list(scores[call, at], relevance[call, at], exists, margin)
            p = len(levels)
            by_index = position[call, at, :p].argsort()  # slots of the relevant items, in order of index
            moved = levels + steps[call, at, by_index].to(levels.dtype)
            ranks = []
            for values in (levels, moved):
                best_first, order = values.sort(descending=True, stable=True)
                places = _place(others, best_first)
                rank = torch.empty_like(order)
                rank[order] = torch.arange(1, p + 1, device=order.device) + _above(places, p)
                ranks.append((places, rank))
            (places, rank), (new_places, new_rank) = ranks
            changes[call, at, index] = (new_places - places).to(changes.dtype)
            changes[call, at, own] = (new_rank - rank).to(changes.dtype)
    return changes
