"""FastAP: average precision by soft histogram binning.

F. Cakir, K. He, X. Xia, B. Kulis, S. Sclaroff: Deep metric learning to rank, CVPR 2019. There a list is the
squared distances z of unit vectors to a query; here it is their cosines, z = 2 - 2 score, which is the same
histogram.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankgrad import _check
from rankgrad.surrogates._lists import SurrogateLists, read_lists, read_scores

#: Pulses (items times bins) held at a time; a longer list is binned a few bins at a time.
_PULSES_AT_ONCE = 2**24


def fastap_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    bins: int = 10,
    score_range: tuple[float, float] = (-1.0, 1.0),
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus FastAP, the average precision of a soft histogram of the scores.

    The range is cut into ``bins`` bins; every score is shared between the two nearest of their ``bins + 1``
    edges by the triangular pulse :math:`\delta_j(s) = \max(0, 1 - |s - s_j| / \Delta)`. With :math:`h^+_j` and
    :math:`h_j` the histograms of the relevant and of all items, and :math:`H^+_j, H_j` their sums over the
    edges from the best down to j, one list has the loss :math:`1 - \frac1p \sum_j h^+_j H^+_j / H_j`. O((n + p)
    L) for L bins.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        bins: L, at least 1.
        score_range: Lowest and highest score. Scores outside count as the end of the range, without gradient.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant).

    Example:
        >>> scores = torch.tensor([0.55, 0.5, -0.5], requires_grad=True)
        >>> loss = rankgrad.surrogates.fastap_loss(scores, torch.tensor([False, True, False]), bins=10)
        >>> loss  # 1 - (0.5 * 0.5 / 1.25 + 0.5 * 1 / 2)
        tensor(0.5500, grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 0.8000, -0.7000, -0.0000])

    Reference:
        Cakir et al., Deep metric learning to rank, CVPR 2019.
    """
    lists = read_lists(scores, relevance, mask, reduction)
    place = _places(lists, bins, score_range)
    kinds = torch.stack([lists.relevant, lists.exists]).to(place.dtype)
    histogram = _histogram(place, kinds, bins)
    upto = histogram.cumsum(-1)
    # An edge without any item at or above it has no precision, and no relevant item.
    precision = upto[0] / upto[1].where(upto[1] > 0, 1)
    total = (histogram[0] * precision).sum(-1)
    return lists.reduce(1 - total / kinds[0].sum(-1).clamp(min=1), reduction)


def fastap_rank(
    scores: Tensor,
    *,
    bins: int = 10,
    score_range: tuple[float, float] = (-1.0, 1.0),
    mask: Tensor | None = None,
) -> Tensor:
    r"""Soft ranks by histogram binning: :math:`\tilde r_i = \sum_j \delta_j(s_i) H_j`.

    :math:`H_j`, the soft number of items at or above the edge j, is what FastAP divides by in place of the
    rank; an item between two edges has their interpolation. Items of one bin count as above each other.

    Args:
        scores: ``[..., n]``, higher is better.
        bins: L, at least 1.
        score_range: As in :func:`fastap_loss`.
        mask: bool, broadcast to ``scores``; items that do not exist tie behind all others, without gradient.

    Returns:
        Soft ranks in the shape of ``scores``, about 1 for the best.

    Example:
        >>> rankgrad.surrogates.fastap_rank(torch.tensor([0.8, -0.4, 0.2]), bins=10)
        tensor([1.0000, 3.0000, 2.0000])

    Reference:
        Cakir et al., Deep metric learning to rank, CVPR 2019.
    """
    lists = read_scores(scores, mask)
    place = _places(lists, bins, score_range)
    upto = _histogram(place, lists.exists.to(place.dtype).unsqueeze(0), bins)[0].cumsum(-1)
    ranks: Tensor = _Interpolation.apply(place, upto)
    return lists.ranks(ranks)


def _places(lists: SurrogateLists, bins: int, score_range: tuple[float, float]) -> Tensor:
    """Where each score lies in units of bins: 0 at the top of the range, ``bins`` at its bottom."""
    bins = _check.count("bins", bins, at_least=1)
    if not (isinstance(score_range, tuple) and len(score_range) == 2):
        raise _check.fail("score_range", "a pair (lowest, highest)", score_range)
    low, high = (_check.finite("score_range", end) for end in score_range)
    if not low < high:
        raise _check.fail("score_range", "a pair (lowest, highest), lowest < highest", score_range)
    return ((high - lists.scores) * (bins / (high - low))).clamp(0, bins)


def _histogram(place: Tensor, weights: Tensor, bins: int) -> Tensor:
    histogram: Tensor = _Histogram.apply(place, weights, bins)
    return histogram


def _soft_counts(place: Tensor, weights: Tensor, bins: int) -> Tensor:
    """Weighted sum of the items' pulses at every edge, ``[kinds, lists, bins + 1]``.

    Dense over the edges as the paper has it: a scatter would save the factor L and give, on a GPU, contended and
    unrepeatable sums.

    Args:
        place: ``[lists, n]``, in bins.
        weights: ``[kinds, lists, n]``.
    """
    edges = torch.arange(bins + 1, dtype=place.dtype, device=place.device)
    at_once = max(1, _PULSES_AT_ONCE // max(place.numel(), 1))
    parts = []
    for start in range(0, bins + 1, at_once):
        block = edges[start : start + at_once].unsqueeze(-1)
        pulse = (1 - (place.unsqueeze(1) - block).abs()).clamp(min=0)
        parts.append(torch.stack([(pulse * kind.unsqueeze(1)).sum(-1) for kind in weights]))
    return torch.cat(parts, -1)


def _slope_at(place: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The table's value at the edge above each place, and its rise to the edge below."""
    above = place.floor().clamp(max=table.shape[-1] - 2).long()
    upper = table.gather(-1, above)
    return upper, table.gather(-1, above + 1) - upper


class _Histogram(torch.autograd.Function):
    """Items into bins. Its adjoint is :class:`_Interpolation`; neither stores anything of size n times bins."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, weights: Tensor, bins: int) -> Tensor:
        ctx.save_for_backward(place, weights)
        return _soft_counts(place, weights, bins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        place, weights = ctx.saved_tensors
        gradient = torch.zeros_like(place)
        for kind, table in zip(weights, upstream, strict=True):
            gradient += kind * _slope_at(place, table)[1]
        return gradient, None, None


class _Interpolation(torch.autograd.Function):
    """The value of a table ``[lists, bins + 1]`` at each place ``[lists, n]``."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, table: Tensor) -> Tensor:
        upper, rise = _slope_at(place, table)
        ctx.save_for_backward(place, rise)
        ctx.bins = table.shape[-1] - 1
        return upper + (place - place.floor().clamp(max=ctx.bins - 1)) * rise

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        place, rise = ctx.saved_tensors
        return upstream * rise, _soft_counts(place, upstream.unsqueeze(0), ctx.bins)[0]
