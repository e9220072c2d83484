"""The losses rankers are trained with elsewhere, from their papers' definitions, to compare with in the same loop.

All take the items of a batch in one row: ``scores [N]``, ``grades [N]`` (>= 0, higher is better) and
``groups [N]``, the query of each item as a number, items of a query together. Each gives the mean over the queries
that have an item of a grade above 0. Nothing is padded; the pairwise ones hold a number for each pair of items of
a query.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rankgrad import _check


class _GradedQueries:
    """Which items belong together, and what the losses need of each query."""

    def __init__(self, grades: Tensor, groups: Tensor) -> None:
        _, self.of, sizes = groups.unique_consecutive(return_inverse=True, return_counts=True)
        self.sizes, self.first = sizes, sizes.cumsum(0) - sizes
        self.grades = grades.float()
        self.counts = self.sum((grades > 0).float()) > 0

    def sum(self, values: Tensor, of: Tensor | None = None) -> Tensor:
        """Sums over the items of each query, or over what else ``of`` gives queries for."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.of if of is None else of, values)

    def mean(self, losses: Tensor) -> Tensor:
        """Mean over the queries that count."""
        return losses.where(self.counts, 0).sum() / self.counts.sum().clamp(min=1)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All (i, j) of one query, as two rows of item numbers."""
        partners = self.sizes[self.of]
        begin = (partners.cumsum(0) - partners).repeat_interleave(partners)
        left = torch.arange(len(self.of), device=self.of.device).repeat_interleave(partners)
        right = torch.arange(len(left), device=left.device) - begin + self.first[self.of[left]]
        return left, right

    def preferred(self) -> tuple[Tensor, Tensor]:
        """The pairs in which i has the higher grade."""
        left, right = self.pairs()
        kept = self.grades[left] > self.grades[right]
        return left[kept], right[kept]

    def ranks(self, values: Tensor) -> Tensor:
        """The rank of every item in its query by value, 1 is best."""
        order = values.argsort(dim=0, descending=True, stable=True)
        order = order[self.of[order].argsort(dim=0, stable=True)]
        places = torch.arange(len(order), device=order.device) - self.first[self.of] + 1
        return torch.empty_like(order).scatter_(0, order, places)

    def gains(self, k: int | None = None) -> Tensor:
        """2^grade - 1, divided by the query's ideal DCG@k."""
        gains = torch.exp2(self.grades) - 1
        ideal = self.sum(gains * _discount(self.ranks(gains), k))
        return gains / ideal.where(ideal > 0, 1)[self.of]


def _discount(ranks: Tensor, k: int | None = None) -> Tensor:
    discount = 1 / torch.log2(1 + ranks.float())
    return discount if k is None else discount.where(ranks <= k, 0)


def ranknet_loss(scores: Tensor, grades: Tensor, groups: Tensor, *, sigma: float = 1.0) -> Tensor:
    r"""RankNet (Burges et al., 2005): :math:`\log(1 + e^{-\sigma (s_i - s_j)})`, averaged over a query's pairs.

    The pairs are those of two items of which i has the higher grade.
    """
    sigma = _check.positive("sigma", sigma)
    queries = _GradedQueries(grades, groups)
    left, right = queries.preferred()
    cost = functional.softplus(-sigma * (scores[left] - scores[right]))
    of = queries.of[left]
    return queries.mean(queries.sum(cost, of) / queries.sum(torch.ones_like(cost), of).clamp(min=1))


def lambdarank_loss(
    scores: Tensor, grades: Tensor, groups: Tensor, *, sigma: float = 1.0, k: int | None = None
) -> Tensor:
    r"""LambdaRank (Burges et al., 2006), as the loss whose gradient its lambdas are (Wang et al., 2018).

    The cost of each of RankNet's pairs is multiplied by :math:`|\Delta NDCG_{ij}|`, what exchanging the two items
    would change in NDCG@k (gain 2^grade - 1), held constant, and summed over a query's pairs.
    """
    sigma = _check.positive("sigma", sigma)
    k = None if k is None else _check.count("k", k, at_least=1)
    queries = _GradedQueries(grades, groups)
    left, right = queries.preferred()
    gains, discount = queries.gains(k), _discount(queries.ranks(scores.detach()), k)
    change = ((gains[left] - gains[right]) * (discount[left] - discount[right])).abs()
    cost = functional.softplus(-sigma * (scores[left] - scores[right]))
    return queries.mean(queries.sum(change * cost, queries.of[left]))


def listnet_loss(scores: Tensor, grades: Tensor, groups: Tensor) -> Tensor:
    """ListNet (Cao et al., 2007), top-one: cross entropy of softmax(scores) against softmax(grades)."""
    queries = _GradedQueries(grades, groups)

    def log_softmax(values: Tensor) -> Tensor:
        largest = values.detach().new_full((len(queries.sizes),), -torch.inf)
        values = values - largest.scatter_reduce(0, queries.of, values.detach(), "amax")[queries.of]
        return values - queries.sum(values.exp()).log()[queries.of]

    return queries.mean(-queries.sum(log_softmax(queries.grades).exp() * log_softmax(scores)))


def approx_ndcg_loss(scores: Tensor, grades: Tensor, groups: Tensor, *, temperature: float = 0.1) -> Tensor:
    r"""ApproxNDCG (Qin et al., 2010): one minus NDCG at the ranks :math:`1 + \sum_j \sigma((s_j - s_i) / T)`."""
    temperature = _check.positive("temperature", temperature)
    queries = _GradedQueries(grades, groups)
    left, right = queries.pairs()
    above = torch.sigmoid((scores[right] - scores[left]) / temperature)
    ranks = scores.new_full(scores.shape, 0.5).index_add(0, left, above)  # 1, less its own sigmoid of 0
    return queries.mean(1 - queries.sum(queries.gains() * _discount(ranks)))
