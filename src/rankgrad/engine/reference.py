"""The plain sort-based engine: oracle, fallback and benchmark baseline. Any device, any dtype.

Both steps rank whole lists with :func:`pessimistic_ranks`: Algorithm 1 as it is written.
"""

import sys

import torch
from torch import Tensor

from rankgrad.engine import stepwise
from rankgrad.engine.precision import compute_dtype, count_dtype


def shifted(scores: Tensor, relevant: Tensor, margin: float) -> Tensor:
    """Scores after the margin: irrelevant items up by half of it, relevant items down."""
    half = torch.full((), margin / 2, dtype=compute_dtype(scores.dtype), device=scores.device)
    return scores.to(half.dtype) + torch.where(relevant, -half, half)


def pessimistic_ranks(values: Tensor, relevant: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """Rank in the whole list and among the relevant items; 1 is best.

    Ties: irrelevant items first, then by index. Items that do not exist come last.
    """
    # Lexicographic order by two stable sorts: the last key first.
    kind = relevant.to(torch.int8).masked_fill(~exists, 2)
    order = torch.argsort(kind, dim=-1, stable=True)
    values = values.masked_fill(~exists, -torch.inf)
    by_value = torch.argsort(values.gather(-1, order), dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_value)
    place = torch.arange(1, values.shape[-1] + 1, device=values.device).expand(order.shape)
    own = relevant.gather(-1, order).cumsum(-1)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return rank, torch.empty_like(own).scatter_(-1, order, own)


def _exists(scores: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool) if mask is None else mask


def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one: where the relevant items stand.

    Args:
        scores: ``[calls, lists, n]``.
        relevance: bool.
        mask: bool, or None if all items exist.
        margin: Score margin.

    Returns:
        ``above``: irrelevant items at or above each relevant item, best first, ``[calls, lists, n]``
        (0 in slots without one); ``position``: the index in the list of the item in each slot (``n``
        where there is none); ``count``: relevant items of each list, ``[calls, lists]``; ``poison``: to be
        added to each list's result, float64, NaN where a score is NaN and 0 elsewhere.
    """
    n = scores.shape[-1]
    exists = _exists(scores, mask)
    relevant = relevance & exists
    rank, own = pessimistic_ranks(shifted(scores, relevant, margin), relevant, exists)
    slot = torch.where(relevant, own - 1, n)
    above = rank.new_zeros(*rank.shape[:-1], n + 1).scatter_(-1, slot, rank - own)
    index = torch.arange(n, device=scores.device).expand(rank.shape)
    position = torch.full_like(above, n).scatter_(-1, slot, index)
    position[..., n] = n
    count = relevant.sum(-1)
    poison = torch.zeros_like(count, dtype=torch.float64)
    poison.masked_fill_((scores.isnan() & exists).any(-1), torch.nan)
    return above[..., :n].contiguous(), position[..., :n].contiguous(), count, poison


def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two: how far every item's rank moves when each relevant score moves by its step.

    Args:
        position: From :func:`relevant_ranks`.
        steps: Score step of the item in each slot, compute dtype, ``[calls, lists, n]``.

    Returns:
        Rank after minus rank before, ``[calls, lists, n]``, 0 for items that do not exist.
    """
    n = scores.shape[-1]
    exists = _exists(scores, mask)
    relevant = relevance & exists
    before = shifted(scores, relevant, margin)
    move = before.new_zeros(*before.shape[:-1], n + 1).scatter_(-1, position, steps)[..., :n]
    old, _ = pessimistic_ranks(before, relevant, exists)
    new, _ = pessimistic_ranks(before + move, relevant, exists)
    return (new - old).masked_fill_(~exists, 0).to(count_dtype(n))


def list_losses(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both steps and the loss between them; see :func:`rankgrad.engine.stepwise.list_losses`."""
    return stepwise.list_losses(
        sys.modules[__name__], scores, relevance, mask, weights, form, lam, margin, with_changes, lists
    )
