"""Spearman loss against target values or given ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.precision import compute_dtype
from rankgrad.lists import Lists
from rankgrad.losses._list_loss import ListLoss
from rankgrad.ranking import loss_of_ranks, lowered, ranks_of, spread_over
from rankgrad.reach import Margin, margin_of, reach_of

#: The automatic window as a share of the spread. Every item has a wanted rank, so most of the items that one
#: passes stand where they should and are pushed inwards: with a window of the whole spread the scores shrink to a
#: point (benchmarks/spearman.py).
WINDOW_SHARE = 0.2


def spearman_loss(
    scores: Tensor,
    target: Tensor | None = None,
    *,
    target_ranks: Tensor | None = None,
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    ties: str = "average",
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
    spread: Tensor | None = None,
) -> Tensor:
    r"""One minus Spearman's coefficient: :math:`6 \sum_i (r_i - t_i)^2 / (n (n^2 - 1))`.

    Use it where the order of target values is to be learned, such as graded similarities of sentences. Made with
    :func:`rankgrad.rank_loss`. Between 0 (the same order) and 2 (the reverse). The formula is exact
    where neither scores nor targets tie.

    Args:
        scores: ``[..., n]``, higher is better.
        target: Target values, same shape, higher = better, as in :func:`rankgrad.metrics.spearman`; :math:`t` are
            their ranks, ties by average ranks.
        target_ranks: Instead of ``target``: the wanted ranks :math:`t`, 1 = best, counted among existing items.
        lam: Interpolation strength in the paper's units, finite and > 0.
        window: Instead of ``lam``, as in :func:`rankgrad.rank_loss`; with neither it is a fifth of the spread of
            the scores. A list of ten items or fewer often has no gradient then: give it a wider window.
        margin: Scores are lowered by it times the quantile of their target (1 for the best of the list, 0 for the
            last) before ranking; a number, or ``"auto"`` for a share of the spread of the scores. Train with one,
            as :class:`SpearmanLoss` does: without it the scores shrink in long trainings.
        ties: As in :func:`rankgrad.rank`.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists of two items or more, ``"sum"``, or ``"none"`` (0 for the others).
        groups, num_groups, spread: As in :func:`recall_loss`.

    Returns:
        A scalar, or ``[...]`` for ``"none"``.

    Example:
        >>> scores = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        >>> loss = rankgrad.spearman_loss(scores, torch.tensor([3.0, 1.0, 0.5]), lam=0.1)
        >>> loss
        tensor(2., grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([-6.6667,  0.0000,  6.6667])
    """
    scores = _check.floating("scores", scores)
    if (target is None) == (target_ranks is None):
        received = "neither" if target is None else "both"
        raise ValueError(f"target, target_ranks: expected one of them, received {received}")
    name, given = ("target_ranks", target_ranks) if target is None else ("target", target)
    given = _check.like_scores(name, given, scores)
    mask = _check.mask(mask, scores)
    _check.spread(spread, scores)
    _check.numbers_of(name, given, mask, infinite=True)
    dtype = compute_dtype(scores.dtype)
    reach, alpha = reach_of(lam, window, dtype, share=WINDOW_SHARE), margin_of(margin, dtype)
    lists = Lists(scores, groups, num_groups, by_list=reduction == "none")
    layout, y, exists = lists.layout, lists.put(scores), lists.put_optional(mask)
    wanted = lists.put(given if given.is_floating_point() else given.double())
    wanted = (ranks_of(lists, wanted, exists, "average") if target_ranks is None else wanted).double()
    if spread is None and (alpha.is_share or reach.kind == "share"):
        spread = spread_over(y, exists)
    exists = torch.ones_like(y, dtype=torch.bool) if exists is None else exists
    n = layout.total(exists.long()).double()
    quantile = (layout.per_item(n) - wanted).where(exists, 0) / layout.per_item((n - 1).clamp(min=1))
    y = lowered(y, quantile, alpha, spread)
    pairs = (n * (n * n - 1)).clamp(min=1)
    # A list of one item has no order: it does not count, as in the metric.
    exists = exists & layout.per_item(n > 1)

    def squared_distance(ranks: Tensor) -> Tensor:
        return 6 * layout.total((ranks.double() - wanted).where(exists, 0).square()) / pairs

    return loss_of_ranks(squared_distance, lists, y, exists, reach, ties, reduction, spread)


class SpearmanLoss(ListLoss):
    r"""Spearman loss of score lists against target values: :math:`6 \sum_i (r_i - t_i)^2 / (n (n^2 - 1))`.

    For rankers and similarity scores. See :func:`spearman_loss`.

    Args:
        lam, window, margin: As in :func:`spearman_loss`.

    Example:
        >>> loss = rankgrad.SpearmanLoss()
        >>> scores = torch.randn(4, 20, requires_grad=True)
        >>> loss(scores, torch.rand(4, 20)).backward()
    """

    def __init__(self, *, lam: float | None = None, window: float | None = None, margin: Margin = "auto") -> None:
        super().__init__(lam, window, margin)

    def function(self, scores: Tensor, target: Tensor, **given: object) -> Tensor:
        return spearman_loss(scores, target, **given)  # type: ignore[arg-type]
