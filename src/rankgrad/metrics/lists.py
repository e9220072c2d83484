"""Metrics of score lists; what they share is said in :mod:`rankgrad.metrics`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine import ops, rank_ops
from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.request import Request

GAINS = ("linear", "exponential")


def _reduce(values: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Mean over the lists that count, or each list's value."""
    _check.one_of("reduction", reduction, ("mean", "none"))
    values = values.where(counts, 0)
    if reduction == "none":
        return values
    return values.sum() / counts.sum().clamp(min=1)


class _RankedLists:
    """Where the relevant items of each list stand; sums over places without one are left out."""

    def __init__(self, scores: Tensor, relevance: Tensor, mask: Tensor | None) -> None:
        scores = _check.floating("scores", scores).detach()
        relevance = _check.relevance(relevance, scores)
        mask = _check.mask(mask, scores)
        request = Request(
            ops.as_lists(scores), ops.as_lists(relevance), None if mask is None else ops.as_lists(mask)
        )
        above, own, poison = ops.standings(*request)
        self.above, self.own = above.reshape(scores.shape), own.reshape(scores.shape)
        self.in_use = self.own > 0
        self.count = self.in_use.sum(-1)
        self.rank = (self.own + self.above).clamp(min=1).double()
        self._poison = poison.reshape(self.count.shape)
        self._dtype = compute_dtype(scores.dtype)

    def mean_of(self, values: Tensor, reduction: str) -> Tensor:
        """Reduce the sums over relevant items of ``values / p``."""
        return self.reduce(values.double().where(self.in_use, 0).sum(-1) / self.count.clamp(min=1), reduction)

    def reduce(self, per_list: Tensor, reduction: str) -> Tensor:
        """Reduce per-list values."""
        return _reduce(per_list.double() + self._poison, self.count > 0, reduction).to(self._dtype)


def average_precision(
    scores: Tensor, relevance: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Average precision: the mean, over relevant items, of the precision at their rank.

    Example:
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([True, False, True])
        >>> rankgrad.metrics.average_precision(scores, relevance)  # (1/1 + 2/3) / 2
        tensor(0.8333)
    """
    at = _RankedLists(scores, relevance, mask)
    return at.mean_of(at.own / at.rank, reduction)


def mean_average_precision(
    scores: Tensor, relevance: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """mAP of ``[items, classes]`` scores: average precision of each column, mean over classes with a positive.

    ``reduction="none"`` gives the average precision of each class.
    """
    scores = _check.floating("scores", scores, ndim=2)
    relevance = _check.relevance(relevance, scores)
    mask = _check.mask(mask, scores)
    return average_precision(scores.T, relevance.T, mask=None if mask is None else mask.T, reduction=reduction)


def recall_at_k(
    scores: Tensor, relevance: Tensor, *, k: int, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """R@K as image retrieval uses it: 1 if any relevant item is among the best ``k``, else 0."""
    at, k = _RankedLists(scores, relevance, mask), _check.count("k", k, at_least=1)
    return at.reduce((at.in_use & (at.rank <= k)).any(-1), reduction)


def refined_recall_at_k(
    scores: Tensor, relevance: Tensor, *, k: int, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """The paper's refined recall: the share of relevant items with fewer than ``k`` irrelevant ones above."""
    at, k = _RankedLists(scores, relevance, mask), _check.count("k", k, at_least=1)
    return at.mean_of(at.above < k, reduction)


def precision_at_k(
    scores: Tensor, relevance: Tensor, *, k: int, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """The share of relevant items among the best ``k`` (of ``k``, also where a list is shorter)."""
    at, k = _RankedLists(scores, relevance, mask), _check.count("k", k, at_least=1)
    return at.reduce((at.in_use & (at.rank <= k)).double().sum(-1) / k, reduction)


def map_at_r(scores: Tensor, relevance: Tensor, *, mask: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """mAP@R: average precision cut at rank R, R = the list's number of relevant items (Musgrave et al. 2020)."""
    at = _RankedLists(scores, relevance, mask)
    within = at.rank <= at.count.unsqueeze(-1)
    return at.mean_of((at.own / at.rank).where(within, 0), reduction)


def reciprocal_rank(
    scores: Tensor, relevance: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """One over the rank of the best relevant item; the mean is MRR."""
    at = _RankedLists(scores, relevance, mask)
    best = (1 / at.rank).where(at.own == 1, 0).sum(-1)
    return at.reduce(best, reduction)


def dcg_gain(relevance: Tensor, gain: str, mask: Tensor | None) -> Tensor:
    """The gain of every item in float64; 0 for items that do not exist, NaN for a grade that is negative."""
    grades = relevance.double()
    grades = grades.masked_fill(grades < 0, torch.nan)
    gains = grades if gain == "linear" else torch.exp2(grades) - 1
    return gains if mask is None else gains.where(mask, 0)


def worst_first(gains: Tensor) -> Tensor:
    """An order of the items that makes ordinal ties pessimistic: by gain, then by index."""
    return torch.argsort(gains, dim=-1, stable=True)


def ndcg(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int | None = None,
    gain: str = "linear",
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Normalised discounted cumulative gain of graded relevance.

    Args:
        k: Count only the best ``k`` places (in the ideal order too); None counts all.
        gain: ``"linear"``: the grade itself; ``"exponential"``: 2^grade - 1.
    """
    scores = _check.floating("scores", scores).detach()
    relevance = _check.relevance(relevance, scores, graded=True)
    mask = _check.mask(mask, scores)
    gains = dcg_gain(relevance, _check.one_of("gain", gain, GAINS), mask)
    n = scores.shape[-1]
    k = n if k is None else min(_check.count("k", k, at_least=1), n)
    discount = 1 / torch.log2(torch.arange(2, n + 2, device=scores.device).double())
    discount[k:] = 0
    ideal = (gains.sort(-1, descending=True).values * discount).sum(-1)

    order = worst_first(gains)
    exists = None if mask is None else mask.gather(-1, order)
    ranks = _ranks(scores.gather(-1, order), exists, "ordinal")
    places = ranks.nan_to_num(1).long() - 1
    value = (gains.gather(-1, order) * discount[places]).sum(-1) + 0 * ranks.sum(-1)
    return _reduce(value / ideal.where(ideal != 0, 1), ideal != 0, reduction).to(compute_dtype(scores.dtype))


def spearman(scores: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Spearman's rank correlation of scores and target values, ties by average ranks.

    Lists of fewer than two items, or in which all scores or all targets are equal, have the value 0.
    ``reduction="mean"`` averages over the lists of two items or more.
    """
    scores = _check.floating("scores", scores).detach()
    target = _check.tensor("target", target)
    if target.shape != scores.shape:
        raise _check.fail("target", f"the shape of scores {list(scores.shape)}", target)
    _check.same_device("target", target, "scores", scores)
    mask = _check.mask(mask, scores)
    exists = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    n = exists.sum(-1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        ranks = _ranks(values, mask, "average").double()
        return (ranks - ranks.where(exists, 0).sum(-1, keepdim=True) / n).where(exists, 0)

    a, b = centred(scores), centred(target if target.is_floating_point() else target.double())
    spread = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    value = (a * b).sum(-1) / spread.where(spread != 0, 1)
    return _reduce(value, exists.sum(-1) > 1, reduction).to(compute_dtype(scores.dtype))


def _ranks(scores: Tensor, exists: Tensor | None, ties: str) -> Tensor:
    shape = (math.prod(scores.shape[:-1]), scores.shape[-1])
    mask = None if exists is None else exists.reshape(shape)
    ranks: Tensor = rank_ops.ranks(scores.reshape(shape), mask, ties)
    return ranks.reshape(scores.shape)
