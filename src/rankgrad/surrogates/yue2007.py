"""SVM-MAP: the structured hinge on average precision, maximum by greedy search.

Y. Yue, T. Finley, F. Radlinski, T. Joachims: A support vector method for optimizing average precision, SIGIR 2007.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rankgrad.surrogates._lists import read_lists
from rankgrad.surrogates._pairwise import block_of
from rankgrad.surrogates._svm_map import Problem, gains, hinge_losses


def yue2007_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    max_relevant: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""The structured hinge loss of SVM-MAP.

    .. math:: \max_y \bigl[ 1 - \mathrm{AP}(y) + F(y) \bigr] - F(y^*), \qquad
        F(y) = \frac{1}{p m} \sum_{i, j} y_{ij} (s_i - s_j),

    over rankings y, with :math:`y_{ij} = 1` where the relevant item i is ahead of the irrelevant item j and -1
    elsewhere, and :math:`y^*` any perfect ranking; p relevant, m irrelevant items. The gradient is that of the
    ranking that attains the maximum. It is found as in the paper: for each irrelevant item, best first, the
    best of all places between the relevant items. O(n p) after sorting, the paper's O(n^2);
    :func:`mohapatra2018_loss` is the same number, faster.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        max_relevant: No list has more relevant items than this. Saves a host sync.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant or nothing irrelevant).

    Example:
        >>> scores = torch.tensor([0.4, 0.3, -0.1], requires_grad=True)
        >>> loss = rankgrad.surrogates.yue2007_loss(scores, torch.tensor([False, True, False]))
        >>> loss  # behind both: 1 - 1/3 - (0.3 - 0.4) - (0.3 + 0.1) = 0.3667; behind the first: 1/2 + 0.1
        tensor(0.6000, grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 1., -1.,  0.])

    Reference:
        Yue et al., A support vector method for optimizing average precision, SIGIR 2007.
    """
    lists, slots = read_lists(scores, relevance, mask, reduction).slots(max_relevant)
    return lists.reduce(hinge_losses(lists, slots, greedy), reduction)


def greedy(problem: Problem) -> Tensor:
    """The most violating ranking: the best place of every irrelevant item, among all of them."""
    rows, n = problem.scores.shape
    slots = problem.relevant.scores.shape[-1]
    order = problem.scores.where(problem.irrelevant, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    sorted_scores = problem.scores.gather(-1, order)
    row = torch.arange(rows, device=order.device).view(-1, 1, 1)
    i = torch.arange(1, slots + 1, device=order.device).view(1, 1, -1)
    own, in_use = problem.relevant.scores.unsqueeze(1), problem.relevant.in_use.unsqueeze(1)
    first = torch.empty_like(order)
    step = block_of(order.device, rows * max(slots, 1))
    for start in range(0, n, step):
        here = sorted_scores[:, start : start + step].unsqueeze(-1)
        j = torch.arange(start + 1, start + 1 + here.shape[1], device=order.device).view(1, -1, 1)
        gain = gains(problem, row, i, own, j, here).where(in_use, 0)
        # Staying ahead of i = k, k + 1, ...; the place behind them all gains 0. argmax takes the first of equals.
        worth = F.pad(gain.flip(-1).cumsum(-1).flip(-1), (0, 1))
        first[:, start : start + step] = worth.argmax(-1) + 1
    return torch.empty_like(first).scatter_(-1, order, first)
