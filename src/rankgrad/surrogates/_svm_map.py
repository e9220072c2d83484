r"""The structured hinge of SVM-MAP, shared by the two ways to find its maximum.

A ranking y of a list with p relevant and m irrelevant items has the joint feature, applied to scores,

    F(y) = 1/(p m) * sum over relevant i, irrelevant j of (s_i - s_j if i is ahead of j else s_j - s_i)

and the loss 1 - AP(y). The hinge is max over y of [1 - AP(y) + F(y)] - F(perfect ranking) >= 0. In a maximum,
relevant items are ordered among themselves by score and irrelevant items likewise (Yue et al., section 4.1);
what is left is how the two orders interleave: which relevant item each irrelevant item stands ahead of.

With i-th relevant and j-th irrelevant item, both best first, letting j pass i gains, times p,

    gain(i, j) = i / ((i + j) (i + j - 1)) - 2 (s_i - s_j) / m

whatever the others do, and the j-th irrelevant item belongs ahead of the relevant items k, k + 1, ... for the k
that maximises the sum of gain(i, j) over i >= k; k = p + 1 is behind them all. The gain falls with j, so k
grows with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.surrogates._lists import SurrogateLists, bind_gradient, needs_gradient
from rankgrad.surrogates._pairwise import Slots, relevant_slots


class Problem(NamedTuple):
    """Lists as the inference takes them.

    Attributes:
        scores: ``[lists, n]``, float64.
        relevant: The relevant items, best first, ``[lists, slots]``.
        found: Relevant items of each list (p), ``[lists]``.
        irrelevant: bool ``[lists, n]``.
        rest: Irrelevant items of each list (m), ``[lists]``.
        scale: Power of two that makes gains fixed-point numbers, ``[lists]``.
    """

    scores: Tensor
    relevant: Slots
    found: Tensor
    irrelevant: Tensor
    rest: Tensor
    scale: Tensor


#: Returns for every irrelevant item the k above, from 1 to p + 1, as int64 ``[lists, n]``; anything at other
#: items.
Inference = Callable[[Problem], Tensor]


def gains(problem: Problem, row: Tensor, i: Tensor, own: Tensor, j: Tensor, score: Tensor) -> Tensor:
    """gain(i, j) as int64 fixed-point numbers; all arguments broadcast.

    Integers, because their sums are exact in any order: the greedy search and the divide and conquer compare the
    same numbers and agree on every tie. Each rounding here is monotone, so gains fall with j to the last bit,
    which the divide and conquer relies on. ``scale`` leaves room for the sum over a list.

    Args:
        row: Which list.
        i, own: Number (from 1) and score of the relevant item.
        j, score: Number (from 1) and score of the irrelevant item.
    """
    i, j = i.double(), j.double()
    precision = i / ((i + j) * (i + j - 1))
    margin = (own - score) * (2 / problem.rest.double().clamp(min=1))[row]
    return ((precision - margin) * problem.scale[row]).long()


def hinge_losses(lists: SurrogateLists, slots: int, inference: Inference) -> Tensor:
    """The structured hinge of each list, ``[lists]``, with its gradient bound."""
    scores = lists.scores.detach().double()
    relevant = relevant_slots(lists, slots)
    relevant = relevant._replace(scores=relevant.scores.double())
    irrelevant = lists.exists & ~lists.relevant
    # A list with more relevant items than the hint has room for is NaN in the end, but must not reach beyond it.
    count, rest = lists.relevant.sum(-1).clamp(max=slots), irrelevant.sum(-1)
    problem = Problem(scores, relevant, count, irrelevant, rest, _fixed_point(lists, scores, count, rest))
    first = inference(problem)

    # How many irrelevant items are ahead of each relevant one, and how many relevant ones behind each irrelevant.
    rows = len(scores)
    at = (first - 1).where(irrelevant, slots + 1)
    landed = torch.zeros(rows, slots + 2, dtype=torch.int64, device=scores.device)
    ahead = landed.scatter_add_(-1, at, torch.ones_like(at)).cumsum(-1)[:, :slots].where(relevant.in_use, 0)
    behind = (count.unsqueeze(-1) + 1 - first).where(irrelevant, 0)

    own = torch.arange(1, slots + 1, dtype=torch.float64, device=scores.device)
    missed = (ahead / (own + ahead)).sum(-1) / count.clamp(min=1)
    weight = 2 / (count * rest).double().clamp(min=1)
    moved = behind.double().scatter_add(-1, relevant.position, -ahead.double())
    losses = missed + weight * (moved * scores).sum(-1)
    # The perfect ranking is one of those compared: a maximum below 0 is rounding.
    losses = losses.clamp(min=0).to(lists.scores.dtype)
    if not needs_gradient(lists.scores):
        return losses
    return bind_gradient(lists.scores, losses, (weight.unsqueeze(-1) * moved).to(losses.dtype))


def _fixed_point(lists: SurrogateLists, scores: Tensor, count: Tensor, rest: Tensor) -> Tensor:
    """The largest power of two with which a list's gains, summed over all its relevant items, fit 62 bits."""
    if scores.shape[-1] == 0:
        return scores.new_ones(len(scores))
    high = scores.where(lists.exists, -torch.inf).amax(-1)
    low = scores.where(lists.exists, torch.inf).amin(-1)
    spread = (high - low).where(lists.exists.any(-1), 0)
    # sum over i of i / ((i + j)(i + j - 1)) is at most 1 + log p; the scores add p times 2 spread / m
    bound = 2 + count.clamp(min=1).log() + 2 * spread * count / rest.clamp(min=1)
    return torch.exp2(torch.floor(61 - torch.log2(bound)).clamp(min=-900))
