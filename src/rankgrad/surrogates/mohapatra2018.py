"""SVM-MAP's maximum by divide and conquer, without sorting the irrelevant items.

P. Mohapatra, M. Rolinek, C. V. Jawahar, V. Kolmogorov, M. P. Kumar: Efficient optimization for rank-based loss
functions, CVPR 2018.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankgrad.surrogates._lists import read_lists
from rankgrad.surrogates._svm_map import Problem, gains, hinge_losses

#: The pivot of a group is the median of this many of its items.
_SAMPLE = 9


def mohapatra2018_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    max_relevant: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""The structured hinge loss of SVM-MAP in O(n log p).

    The same number and the same gradient as :func:`yue2007_loss`, to the bit: see there for the formula.
    Irrelevant items with higher scores never stand further back, so the place of one bounds the places of all
    above and below it. As in quicksort a pivot divides the irrelevant items; a group whose place is certain is
    finished, and never sorted.

    All groups of all lists are divided together. How many are left decides when to stop: a host sync each of the
    O(log p) rounds.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        max_relevant: As in :func:`yue2007_loss`.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant or nothing irrelevant).

    Example:
        >>> scores = torch.tensor([0.4, 0.3, -0.1], requires_grad=True)
        >>> loss = rankgrad.surrogates.mohapatra2018_loss(scores, torch.tensor([False, True, False]))
        >>> loss
        tensor(0.6000, grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 1., -1.,  0.])

    Reference:
        Mohapatra et al., Efficient optimization for rank-based loss functions, CVPR 2018.
    """
    lists, slots = read_lists(scores, relevance, mask, reduction).slots(max_relevant)
    return lists.reduce(hinge_losses(lists, slots, divide_and_conquer), reduction)


class _Groups(NamedTuple):
    """Groups of irrelevant items with neighbouring scores, each ``[groups]``.

    Attributes:
        row: Their list.
        better: How many irrelevant items of the list are better than all of the group.
        size: How many items the group has.
        low, high: The places (1 to p + 1) that are still possible for them.
    """

    row: Tensor
    better: Tensor
    size: Tensor
    low: Tensor
    high: Tensor

    def is_open(self) -> Tensor:
        """Which groups have items whose place is not certain."""
        return (self.low < self.high) & (self.size > 0)

    def open(self) -> _Groups:
        """Those groups alone."""
        keep = self.is_open()
        return _Groups(*(field[keep] for field in self))

    def split(self, left: Tensor, place: Tensor) -> _Groups:
        """Each group in two: its ``left`` best items, at ``place`` or ahead of it, and those behind the pivot."""

        def both(one: Tensor, other: Tensor) -> Tensor:
            return torch.stack([one, other], -1).flatten()

        return _Groups(
            self.row.repeat_interleave(2),
            both(self.better, self.better + left + 1),
            both(left, self.size - left - 1),
            both(self.low, place),
            both(place, self.high),
        )


def divide_and_conquer(problem: Problem) -> Tensor:
    """The most violating ranking: the place of every irrelevant item."""
    rows, n = problem.scores.shape
    places = torch.ones(rows * n, dtype=torch.int64, device=problem.scores.device)
    row = torch.arange(rows, device=places.device)
    none = torch.zeros_like(row)
    # Items lie group by group, in the order of their list within a group: ties are broken by that order.
    in_play = problem.irrelevant & (problem.found > 0).unsqueeze(-1)
    groups = _Groups(row, none, in_play.sum(-1), none + 1, problem.found + 1).open()
    items = in_play.flatten().nonzero().squeeze(-1)
    score = problem.scores.flatten()[items]
    while len(items):
        items, score, groups = _divide(problem, items, score, groups, places)
    return places.view(rows, n)


def _divide(
    problem: Problem, items: Tensor, score: Tensor, groups: _Groups, places: Tensor
) -> tuple[Tensor, Tensor, _Groups]:
    """One round: find the place of one item of every group and split the group there.

    Writes the places of all items whose place is known now and returns the others, again group by group.
    """
    at = torch.arange(len(items), device=items.device)
    begin = groups.size.cumsum(0) - groups.size
    pivot = _pivots(score, begin, groups.size)
    group = torch.repeat_interleave(at[: len(begin)], groups.size, output_size=len(items))
    pivot_score, chosen = score[pivot], pivot[group]
    difference = score - pivot_score[group]
    ahead = (difference > 0) | ((difference == 0) & (at < chosen))
    passed = F.pad(ahead.cumsum(0), (1, 0))
    left = passed[begin + groups.size] - passed[begin]
    place = _best_places(problem, groups, groups.better + left + 1, pivot_score)
    parts = groups.split(left, place)

    # Both parts of a group move to where they belong, without the pivot; parts that are settled move to the bin
    # behind the last item.
    kept = parts.size.where(parts.is_open(), 0)
    begins = (kept.cumsum(0) - kept).view(-1, 2)
    remaining = int(kept.sum())
    offset = begins + torch.stack([-passed[begin], passed[begin] - begin], -1)
    offset = offset.flatten().where(parts.is_open(), torch.iinfo(torch.int64).max // 2)
    part = 2 * group + (~ahead).long()
    before = passed[:-1]
    target = offset[part] + torch.where(ahead, before, at - before - (at > chosen).long())
    target[pivot] = remaining
    target.clamp_(max=remaining)

    places[items] = parts.low[part]
    places[items[pivot]] = place
    moved = torch.empty(remaining + 1, dtype=items.dtype, device=items.device).index_put_((target,), items)
    scores = torch.empty(remaining + 1, dtype=score.dtype, device=score.device).index_put_((target,), score)
    return moved[:remaining], scores[:remaining], parts.open()


def _pivots(score: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    """An item near the middle of each group: the median of a few, evenly spaced in memory."""
    spread = torch.arange(_SAMPLE, device=begin.device) * 2 + 1
    sample = begin.unsqueeze(-1) + (spread * size.unsqueeze(-1)) // (2 * _SAMPLE)
    middle = score[sample].argsort(dim=-1, stable=True)[:, _SAMPLE // 2]
    return sample.gather(-1, middle.unsqueeze(-1)).squeeze(-1)


def _best_places(problem: Problem, groups: _Groups, j: Tensor, score: Tensor) -> Tensor:
    """The best place of the j-th irrelevant item (a group's pivot) between ``low`` and ``high``.

    Groups of one list have ranges that do not overlap, so every relevant item is compared with at most one pivot:
    one sweep over the relevant items serves all groups.
    """
    rows, slots = problem.relevant.scores.shape
    # The group in whose range [low, high) the i-th relevant item lies; no group: the number of groups.
    none = len(groups.row)
    flat = torch.zeros(rows, slots + 2, dtype=torch.int64, device=j.device)
    number = torch.arange(1, none + 1, device=j.device)
    flat[groups.row, groups.low] = number
    owner = flat.cummax(-1).values[:, 1 : slots + 1] - 1
    i = torch.arange(1, slots + 1, device=j.device).expand(rows, slots)
    last = F.pad(groups.high, (0, 1))[owner]
    owner = torch.where((owner >= 0) & (i < last), owner, none)

    row = torch.arange(rows, device=j.device).unsqueeze(-1)
    padded_j = F.pad(j, (0, 1), value=1)
    padded_score = F.pad(score, (0, 1))
    gain = gains(problem, row, i, problem.relevant.scores, padded_j[owner], padded_score[owner])
    gain = gain.masked_fill(owner == none, 0)
    # Place k loses the gains of low, ..., k - 1: the best is the first place with the least loss.
    lost = F.pad(gain.cumsum(-1), (1, 0))
    at_high = lost[groups.row, groups.high - 1]
    inside, owner = lost[:, :slots].flatten(), owner.flatten()
    least = torch.full((none + 1,), torch.iinfo(torch.int64).max, device=j.device)
    least = least.scatter_reduce(0, owner, inside, "amin")
    candidate = torch.where(inside == least[owner], i.flatten(), slots + 1)
    best = torch.full((none + 1,), slots + 1, dtype=torch.int64, device=j.device)
    best = best.scatter_reduce(0, owner, candidate, "amin")
    return torch.where(at_high < least[:none], groups.high, best[:none])
