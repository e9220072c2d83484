"""Exact ranks of whole lists: one stable sort and one scatter."""

import torch
from torch import Tensor

from rankgrad.engine.layouts import Ragged
from rankgrad.engine.precision import compute_dtype, rank_dtype


def exact_ranks(scores: Tensor, exists: Tensor | None, ties: str, offsets: Tensor | None = None) -> Tensor:
    """Ranks within lists, 1 is best; items that do not exist tie with each other, last.

    Args:
        scores: ``[lists, n]``; or ``[calls, N]`` with the offsets of ragged lists.
        exists: bool in the same shape, or None if all do.
        ties: As in :func:`scipy.stats.rankdata`: ``"ordinal"``, ``"min"``, ``"max"``, ``"average"``.
        offsets: None, or ``[calls, lists + 1]``.
    """
    values = scores.to(compute_dtype(scores.dtype)) + 0.0  # -0.0 becomes 0.0: a tie on every device
    if exists is not None:
        values = values.masked_fill(~exists, -torch.inf)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    part = None
    if offsets is not None or exists is not None:
        # Missing items lie among the -inf scores of existing ones: move them behind, list by list.
        part = torch.zeros_like(order) if exists is None else (~exists).long()
        ragged = None if offsets is None else Ragged(offsets, scores.shape[-1])
        if ragged is not None:
            part = part + 2 * ragged.list_of
        part, again = torch.sort(part.gather(-1, order), dim=-1, stable=True)
        order, values = order.gather(-1, again), values.gather(-1, again)
    n = order.shape[-1]
    place = torch.arange(1, n + 1, dtype=rank_dtype(scores), device=scores.device).expand(order.shape)
    if ties != "ordinal" and n > 0:
        place = _share(place, _differs(values, part), ties)
    if offsets is not None:
        assert ragged is not None
        place = place - ragged.per_item(offsets[:, :-1])
    return torch.empty_like(place).scatter_(-1, order, place.contiguous())


def _differs(values: Tensor, part: Tensor | None) -> Tensor:
    """Whether each sorted item differs from the one before it, or is in another part; ``[lists, n - 1]``."""
    differs = values[..., 1:] != values[..., :-1]
    return differs if part is None else differs | (part[..., 1:] != part[..., :-1])


def _share(place: Tensor, differs: Tensor, ties: str) -> Tensor:
    """Give tied neighbours the lowest, highest or mean place of their group."""
    edge = differs.new_ones(*differs.shape[:-1], 1)
    n = place.shape[-1]
    first = place.where(torch.cat([edge, differs], -1), 0).cummax(-1).values
    if ties == "min":
        return first
    last = place.where(torch.cat([differs, edge], -1), n).flip(-1).cummin(-1).values.flip(-1)
    return last if ties == "max" else (first + last) / 2
