"""NDCG loss for graded relevance."""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.metrics.lists import GAINS, dcg_gain, worst_first
from rankgrad.ranking import rank_loss


def ndcg_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lam: float,
    gain: str = "linear",
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus NDCG: :math:`1 - \frac{1}{\mathrm{ideal}} \sum_i \mathrm{gain}_i / \log_2(1 + r_i)`.

    Made with :func:`rankgrad.rank_loss`. Among tied scores the less relevant items come first, so a model
    that scores everything alike looks as bad as it is.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape, grades >= 0; a negative one makes its list NaN.
        lam: Interpolation strength in the paper's units, finite and > 0.
        gain: ``"linear"``: the grade itself; ``"exponential"``: 2^grade - 1.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists with a grade > 0, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"``.

    Example:
        >>> scores = torch.tensor([0.9, 0.8, 0.3], requires_grad=True)
        >>> loss = rankgrad.ndcg_loss(scores, torch.tensor([0, 1, 2]), lam=1.0)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 0.3333, -0.3333,  0.0000])
    """
    scores = _check.floating("scores", scores)
    relevance = _check.relevance(relevance, scores, graded=True)
    mask = _check.mask(mask, scores)
    gains = dcg_gain(relevance, _check.one_of("gain", gain, GAINS), mask)
    discount = 1 / torch.log2(torch.arange(2, scores.shape[-1] + 2, device=scores.device).double())
    ideal = (gains.sort(-1, descending=True).values * discount).sum(-1)

    order = worst_first(gains)
    gains = gains.gather(-1, order)
    exists = torch.ones_like(order, dtype=torch.bool) if mask is None else mask.gather(-1, order)
    # A list without any gain has no NDCG: leave it out by leaving out its items.
    exists = exists & (ideal != 0).unsqueeze(-1)
    ideal = ideal.where(ideal != 0, 1)

    def one_minus_ndcg(ranks: Tensor) -> Tensor:
        return 1 - (gains / torch.log2(1 + ranks.double())).sum(-1) / ideal

    return rank_loss(one_minus_ndcg, scores.gather(-1, order), lam=lam, mask=exists, reduction=reduction)
