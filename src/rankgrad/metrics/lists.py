"""Metrics of score lists; :mod:`rankgrad.metrics` documents what they share."""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine import ops
from rankgrad.engine.layouts import Layout
from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.request import Request
from rankgrad.lists import Lists
from rankgrad.ranking import ranks_of

GAINS = ("linear", "exponential")


def _reduce(values: Tensor, counts: Tensor, reduction: str, lists: Lists, dtype: torch.dtype) -> Tensor:
    """Mean over the lists that count, or each list's value in the caller's shape; in the compute dtype."""
    _check.one_of("reduction", reduction, ("mean", "none"))
    values = values.where(counts, 0)
    if reduction == "none":
        return values.to(dtype).reshape(lists.shape)
    return (values.sum() / counts.sum().clamp(min=1)).to(dtype)


class _RankedLists:
    """The ranks of the relevant items of each list; places without a relevant item are left out of sums.

    Attributes, each in the engine's layout: ``above``, irrelevant items at or above; ``own``, the rank among the
    relevant items; ``rank``, the rank in the list; ``count``, relevant items of a list.
    """

    def __init__(
        self,
        scores: Tensor,
        relevance: Tensor,
        mask: Tensor | None,
        reduction: str,
        groups: Tensor | None,
        num_groups: int | None,
    ) -> None:
        scores = _check.floating("scores", scores).detach()
        relevance = _check.relevance(relevance, scores)
        mask = _check.mask(mask, scores)
        lists = Lists(scores, groups, num_groups, by_list=reduction == "none")
        asked = Request(lists.put(scores), lists.put(relevance), lists.put_optional(mask), lists.offsets)
        self.above, self.own, self._poison = ops.standings(*asked)
        self._in_use = self.own > 0
        self._lists, self._reduction, self._dtype = lists, reduction, asked.dtype
        self.count = lists.layout.total(self._in_use.long())
        self.rank = (self.own + self.above).clamp(min=1).double()

    def per_item(self, per_list: Tensor) -> Tensor:
        """A value of each list at all of its items."""
        return self._lists.layout.per_item(per_list)

    def total(self, values: Tensor) -> Tensor:
        """Sums over relevant items."""
        return self._lists.layout.total(values.double().where(self._in_use, 0))

    def mean_of(self, values: Tensor) -> Tensor:
        """Reduce the means over relevant items."""
        return self.reduced(self.total(values) / self.count.clamp(min=1))

    def reduced(self, per_list: Tensor) -> Tensor:
        """Reduce per-list values."""
        return _reduce(per_list + self._poison, self.count > 0, self._reduction, self._lists, self._dtype)


def average_precision(
    scores: Tensor,
    relevance: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""Average precision: the mean, over relevant items, of the precision at their rank.

    With :math:`r_i` the rank of the relevant item i and :math:`r^+_i` its rank among the p relevant ones, a list
    has the value :math:`\frac1p \sum_i r^+_i / r_i`.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists with a relevant item, or ``"none"``: ``[...]``, 0 for the others.
        groups: int64 ids ``[N]`` in any order: each id is a list.
        num_groups: How many ids there are.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([True, False, True])
        >>> rankgrad.metrics.average_precision(scores, relevance)  # (1/1 + 2/3) / 2
        tensor(0.8333)
    """
    at = _RankedLists(scores, relevance, mask, reduction, groups, num_groups)
    return at.mean_of(at.own / at.rank)


def mean_average_precision(
    scores: Tensor, relevance: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """mAP of ``[items, classes]`` scores: average precision of each column, mean over classes with a positive.

    Args:
        scores: ``[items, classes]``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        mask: bool, broadcast to ``scores``; False = this pair does not exist.
        reduction: ``"mean"``, or ``"none"``: the average precision of each class, ``[classes]``.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.3]])
        >>> relevance = torch.tensor([[True, False], [False, False], [False, True]])
        >>> rankgrad.metrics.mean_average_precision(scores, relevance, reduction="none")
        tensor([1.0000, 0.5000])
    """
    scores, relevance, mask = _check.class_lists(scores, relevance, mask)
    return average_precision(scores.T, relevance.T, mask=None if mask is None else mask.T, reduction=reduction)


def recall_at_k(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""R@K as image retrieval uses it: :math:`[\min_i r_i \le k]`, 1 if a relevant item is among the best ``k``.

    :math:`r_i` are the ranks of the relevant items. A list without a hit has 0.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        k: How many of the best items count.
        mask, reduction, groups, num_groups: As in :func:`average_precision`.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([False, True, True])
        >>> rankgrad.metrics.recall_at_k(scores, relevance, k=1)
        tensor(0.)
    """
    at, k = _RankedLists(scores, relevance, mask, reduction, groups, num_groups), _check.count("k", k, at_least=1)
    return at.reduced(at.total((at.own == 1) & (at.rank <= k)))


def refined_recall_at_k(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""The paper's refined recall: the share of relevant items with fewer than ``k`` irrelevant ones above.

    With :math:`c_i` the irrelevant items at or above the relevant item i, a list with p relevant items has the
    value :math:`\frac1p \sum_i [c_i < k]`. One minus it, weighted and summed over all
    k, is :func:`rankgrad.recall_loss`.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        k: An item with this many irrelevant ones above it no longer counts.
        mask, reduction, groups, num_groups: As in :func:`average_precision`.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([False, True, True])
        >>> rankgrad.metrics.refined_recall_at_k(scores, relevance, k=2)
        tensor(1.)
    """
    at, k = _RankedLists(scores, relevance, mask, reduction, groups, num_groups), _check.count("k", k, at_least=1)
    return at.mean_of(at.above < k)


def precision_at_k(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""P@K: :math:`\frac{1}{k} \sum_i [r_i \le k]`, with :math:`r_i` the ranks of the relevant items.

    The share of relevant items among the best ``k``; it is divided by ``k`` also where a list is shorter.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        k: How many of the best items count.
        mask, reduction, groups, num_groups: As in :func:`average_precision`.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([False, True, True])
        >>> rankgrad.metrics.precision_at_k(scores, relevance, k=2)
        tensor(0.5000)
    """
    at, k = _RankedLists(scores, relevance, mask, reduction, groups, num_groups), _check.count("k", k, at_least=1)
    return at.reduced(at.total(at.rank <= k) / k)


def map_at_r(
    scores: Tensor,
    relevance: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""mAP@R: :math:`\frac{1}{R} \sum_{i:\, r_i \le R} \frac{r^+_i}{r_i}` (Musgrave et al. 2020).

    Average precision cut at rank R, the list's number of relevant items. :math:`r_i` is the rank of a relevant
    item in the list, :math:`r^+_i` its rank among the relevant items.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        mask, reduction, groups, num_groups: As in :func:`average_precision`.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([False, True, True])
        >>> rankgrad.metrics.map_at_r(scores, relevance)  # R = 2: 1/2 at rank 2; rank 3 is beyond R
        tensor(0.2500)
    """
    at = _RankedLists(scores, relevance, mask, reduction, groups, num_groups)
    return at.mean_of((at.own / at.rank).where(at.rank <= at.per_item(at.count), 0))


def reciprocal_rank(
    scores: Tensor,
    relevance: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""One over the rank of the best relevant item, :math:`1 / \min_i r_i`; the mean over lists is MRR.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape; bool, or 0 and 1.
        mask, reduction, groups, num_groups: As in :func:`average_precision`.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([False, True, True])
        >>> rankgrad.metrics.reciprocal_rank(scores, relevance)
        tensor(0.5000)
    """
    at = _RankedLists(scores, relevance, mask, reduction, groups, num_groups)
    return at.reduced(at.total((1 / at.rank).where(at.own == 1, 0)))


def dcg_gain(relevance: Tensor, gain: str, mask: Tensor | None) -> Tensor:
    """The gain of every item in float64; 0 for items that do not exist, NaN for a grade that is negative."""
    grades = relevance.double()
    grades = grades.masked_fill(grades < 0, torch.nan)
    gains = grades if gain == "linear" else torch.exp2(grades) - 1
    return gains if mask is None else gains.where(mask, 0)


def ideal_dcg(layout: Layout, gains: Tensor, k: int | None) -> Tensor:
    """The DCG of the best order of each list; all in the engine's layout."""
    order = layout.sorted_by([-gains])
    return layout.total(gains.gather(-1, order) * discount(layout.places(order), k))


def discount(ranks: Tensor, k: int | None) -> Tensor:
    """1 / log2(1 + rank), 0 beyond rank ``k``."""
    ranks = ranks.double()
    value = 1 / torch.log2(1 + ranks)
    return value if k is None else value.where(ranks <= k, 0)


def ndcg(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int | None = None,
    gain: str = "linear",
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""Normalised discounted cumulative gain of graded relevance.

    :math:`\sum_i \mathrm{gain}_i / \log_2(1 + r_i)` over a list, divided by its value in the best order.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``; higher is better.
        relevance: The same shape, grades >= 0, as in :func:`rankgrad.ndcg_loss`.
        k: Count only the best ``k`` places (in the ideal order too); None counts all.
        gain: ``"linear"``: the grade itself; ``"exponential"``: 2^grade - 1.
        mask, groups, num_groups: As in :func:`average_precision`.
        reduction: ``"mean"`` over the lists with a grade > 0, or ``"none"``.

    Example:
        >>> rankgrad.metrics.ndcg(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1, 2, 0]))
        tensor(0.8597)
    """
    scores = _check.floating("scores", scores).detach()
    relevance = _check.relevance(relevance, scores)
    mask = _check.mask(mask, scores)
    _check.numbers_of("relevance", relevance, mask, lowest=0)
    k = None if k is None else _check.count("k", k, at_least=1)
    lists = Lists(scores, groups, num_groups, by_list=reduction == "none")
    layout, exists = lists.layout, lists.put_optional(mask)
    gains = dcg_gain(lists.put(relevance), _check.one_of("gain", gain, GAINS), exists)
    ideal = ideal_dcg(layout, gains, k)
    order = layout.sorted_by([gains])  # among ties the smaller gain first: ordinal ranks are then pessimistic
    exists = None if exists is None else exists.gather(-1, order)
    ranks = ranks_of(lists, lists.put(scores).gather(-1, order), exists, "ordinal")
    value = layout.total(gains.gather(-1, order) * discount(ranks, k)) + 0 * layout.total(ranks)
    value = value / ideal.where(ideal != 0, 1)
    return _reduce(value, ideal != 0, reduction, lists, compute_dtype(scores.dtype))


def spearman(
    scores: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    """Spearman's rank correlation: the Pearson correlation of the ranks of scores and targets.

    Ties get average ranks. Lists of fewer than two items, or in which all scores or all targets are equal, have
    the value 0.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``.
        target: The same shape: the values whose order the scores should have.
        mask, groups, num_groups: As in :func:`average_precision`.
        reduction: ``"mean"`` over the lists of two items or more, or ``"none"``.

    Example:
        >>> rankgrad.metrics.spearman(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([3.0, 1.0, 0.5]))
        tensor(-1.)
    """
    scores = _check.floating("scores", scores).detach()
    target = _check.like_scores("target", target, scores)
    mask = _check.mask(mask, scores)
    _check.numbers_of("target", target, mask, infinite=True)
    lists = Lists(scores, groups, num_groups, by_list=reduction == "none")
    layout, mask = lists.layout, lists.put_optional(mask)
    exists = torch.ones_like(lists.put(scores), dtype=torch.bool) if mask is None else mask
    n = layout.total(exists.long())

    def centred(values: Tensor) -> Tensor:
        ranks = ranks_of(lists, lists.put(values), mask, "average").double()
        mean = layout.total(ranks.where(exists, 0)) / n.clamp(min=1)
        return (ranks - layout.per_item(mean)).where(exists, 0)

    a, b = centred(scores), centred(target if target.is_floating_point() else target.double())
    spread = (layout.total(a.square()) * layout.total(b.square())).sqrt()
    value = layout.total(a * b) / spread.where(spread != 0, 1)
    return _reduce(value, n > 1, reduction, lists, compute_dtype(scores.dtype))
