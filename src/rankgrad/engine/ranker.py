"""Exact ranks of whole lists: one stable sort and one scatter."""

import torch
from torch import Tensor

from rankgrad.engine.precision import compute_dtype, rank_dtype


def exact_ranks(scores: Tensor, exists: Tensor | None, ties: str) -> Tensor:
    """Ranks over the last dimension, 1 is best; items that do not exist tie with each other, last.

    Args:
        scores: ``[lists, n]``.
        exists: bool ``[lists, n]``, or None if all do.
        ties: As in :func:`scipy.stats.rankdata`: ``"ordinal"``, ``"min"``, ``"max"``, ``"average"``.
    """
    values = scores.to(compute_dtype(scores.dtype)) + 0.0  # -0.0 becomes 0.0: a tie on every device
    if exists is not None:
        values = values.masked_fill(~exists, -torch.inf)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    here = None
    if exists is not None:
        # Missing items lie among the -inf scores of existing ones: move them behind.
        here = exists.gather(-1, order)
        existing = here.sum(-1, keepdim=True)
        place = torch.where(here, here.cumsum(-1), existing + (~here).cumsum(-1)) - 1
        order = torch.empty_like(order).scatter_(-1, place, order)
        here = torch.arange(order.shape[-1], device=order.device) < existing
    n = order.shape[-1]
    place = torch.arange(1, n + 1, dtype=rank_dtype(scores), device=scores.device).expand(order.shape)
    if ties != "ordinal" and n > 0:
        place = _share(place, _differs(values, here), ties)
    return torch.empty_like(place).scatter_(-1, order, place)


def _differs(values: Tensor, here: Tensor | None) -> Tensor:
    """Whether each sorted item differs from the one before it; ``[lists, n - 1]``."""
    differs = values[..., 1:] != values[..., :-1]
    return differs if here is None else differs | (here[..., 1:] != here[..., :-1])


def _share(place: Tensor, differs: Tensor, ties: str) -> Tensor:
    """Give tied neighbours the lowest, highest or mean place of their group."""
    edge = differs.new_ones(*differs.shape[:-1], 1)
    n = place.shape[-1]
    first = place.where(torch.cat([edge, differs], -1), 0).cummax(-1).values
    if ties == "min":
        return first
    last = place.where(torch.cat([differs, edge], -1), n).flip(-1).cummin(-1).values.flip(-1)
    return last if ties == "max" else (first + last) / 2
