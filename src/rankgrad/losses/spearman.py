"""Spearman loss against given ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.ranking import rank_loss


def spearman_loss(
    scores: Tensor,
    target_ranks: Tensor,
    *,
    lam: float,
    ties: str = "average",
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus Spearman's coefficient: :math:`6 \sum_i (r_i - t_i)^2 / (n (n^2 - 1))`.

    Made with :func:`rankgrad.rank_loss`. Between 0 (the same order) and 2 (the reverse). The formula is exact
    where neither scores nor targets tie. Mind the targets: ranks here (1 = best), while
    :func:`rankgrad.metrics.spearman` takes values (higher = better).

    Args:
        scores: ``[..., n]``, higher is better.
        target_ranks: The wanted ranks :math:`t`, same shape, 1 = best, counted among existing items.
        lam: Interpolation strength in the paper's units, finite and > 0.
        ties: As in :func:`rankgrad.rank`.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists of two items or more, ``"sum"``, or ``"none"`` (0 for the others).

    Returns:
        A scalar, or ``[...]`` for ``"none"``.

    Example:
        >>> scores = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        >>> loss = rankgrad.spearman_loss(scores, torch.tensor([1, 2, 3]), lam=0.1)
        >>> loss
        tensor(2., grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([-6.6667,  0.0000,  6.6667])
    """
    scores = _check.floating("scores", scores)
    target = _check.tensor("target_ranks", target_ranks)
    if target.shape != scores.shape:
        raise _check.fail("target_ranks", f"the shape of scores {list(scores.shape)}", target)
    _check.same_device("target_ranks", target, "scores", scores)
    mask = _check.mask(mask, scores)
    target = target.double()
    exists = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    n = exists.sum(-1).double()
    pairs = (n * (n * n - 1)).clamp(min=1)
    mask = exists & (n > 1).unsqueeze(-1)  # a list of one item has no order: it does not count, as in the metric

    def squared_distance(ranks: Tensor) -> Tensor:
        return 6 * (ranks.double() - target).where(mask, 0).square().sum(-1) / pairs

    return rank_loss(squared_distance, scores, lam=lam, ties=ties, mask=mask, reduction=reduction)
