"""NDCG loss for graded relevance."""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.precision import compute_dtype
from rankgrad.lists import Lists
from rankgrad.losses._list_loss import ListLoss
from rankgrad.metrics.lists import GAINS, dcg_gain, discount, ideal_dcg
from rankgrad.ranking import loss_of_ranks, lowered, spread_over
from rankgrad.reach import Margin, margin_of, reach_of


def ndcg_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int | None = None,
    gain: str = "linear",
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
    spread: Tensor | None = None,
) -> Tensor:
    r"""One minus NDCG: :math:`1 - \frac{1}{\mathrm{ideal}} \sum_i \mathrm{gain}_i / \log_2(1 + r_i)`.

    For rankers with graded relevance. Made with :func:`rankgrad.rank_loss`. Among tied scores the less relevant
    items come first, so a model that scores everything alike gets the worst value.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape, grades >= 0; others are an error on the CPU, on a GPU and
            compiled they make their list NaN.
        k: Count only the best ``k`` places, in the ideal order too; None counts all. An item beyond them has the
            slope it has without ``k``: with none, it could not learn to enter.
        gain: ``"linear"``: the grade itself; ``"exponential"``: 2^grade - 1.
        lam: Interpolation strength in the paper's units, finite and > 0.
        window: Instead of ``lam``, as in :func:`rankgrad.rank_loss`; with neither it is taken from the scores.
        margin: Scores are lowered by it times their grade over the largest grade of the list before ranking; a
            number, or ``"auto"`` for a share of the spread of the scores.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists with a grade > 0, ``"sum"``, or ``"none"``.
        groups, num_groups, spread: As in :func:`recall_loss`.

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
    relevance = _check.relevance(relevance, scores)
    mask = _check.mask(mask, scores)
    _check.spread(spread, scores)
    _check.numbers_of("relevance", relevance, mask, lowest=0)
    k = None if k is None else _check.count("k", k, at_least=1)
    dtype = compute_dtype(scores.dtype)
    reach, alpha = reach_of(lam, window, dtype), margin_of(margin, dtype)
    lists = Lists(scores, groups, num_groups, by_list=reduction == "none")
    layout, y, exists = lists.layout, lists.put(scores), lists.put_optional(mask)
    grades = lists.put(relevance)
    gains = dcg_gain(grades, _check.one_of("gain", gain, GAINS), exists)
    ideal = ideal_dcg(layout, gains, k)
    if spread is None and (alpha.is_share or reach.kind == "share"):
        spread = spread_over(y, exists)
    grades = grades.double() if exists is None else grades.double().where(exists, 0)
    top = layout.largest(grades)
    y = lowered(y, grades / layout.per_item(top.where(top > 0, 1)), alpha, spread)

    order = layout.sorted_by([gains])  # among ties the less relevant first
    gains, y = gains.gather(-1, order), y.gather(-1, order)
    exists = torch.ones_like(order, dtype=torch.bool) if exists is None else exists.gather(-1, order)
    # A list without any gain has no NDCG: leave it out by leaving out its items. NaN stays, to be noticed.
    exists = exists & (layout.per_item(ideal != 0) | y.isnan())
    ideal = ideal.where(ideal != 0, 1)

    def one_minus_ndcg(ranks: Tensor) -> Tensor:
        whole = discount(ranks, None)
        cut = whole if k is None else whole + (discount(ranks.detach(), k) - whole.detach())
        return 1 - layout.total(gains * cut) / ideal

    return loss_of_ranks(one_minus_ndcg, lists, y, exists, reach, "ordinal", reduction, spread)


class NDCGLoss(ListLoss):
    r"""NDCG loss of score lists: :math:`1 - \frac{1}{\mathrm{ideal}} \sum_i \mathrm{gain}_i / \log_2(1 + r_i)`.

    For rankers with graded relevance. See :func:`ndcg_loss`.

    Args:
        k, gain, lam, window, margin: As in :func:`ndcg_loss`.

    Example:
        >>> loss = rankgrad.NDCGLoss(k=10)
        >>> scores = torch.randn(4, 20, requires_grad=True)
        >>> loss(scores, torch.randint(0, 3, (4, 20))).backward()
    """

    def __init__(
        self,
        *,
        k: int | None = None,
        gain: str = "linear",
        lam: float | None = None,
        window: float | None = None,
        margin: Margin = "auto",
    ) -> None:
        super().__init__(lam, window, margin)
        self.k = None if k is None else _check.count("k", k, at_least=1)
        self.gain = _check.one_of("gain", gain, GAINS)

    def function(self, scores: Tensor, target: Tensor, **given: object) -> Tensor:
        return ndcg_loss(scores, target, k=self.k, gain=self.gain, **given)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"k={self.k}, gain={self.gain!r}, {super().extra_repr()}"
