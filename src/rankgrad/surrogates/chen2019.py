"""AP-loss: average precision with an error-driven update.

K. Chen, J. Li, W. Lin, J. See, J. Wang, L. Duan, Z. Chen, C. He, J. Zou: Towards accurate one-stage object
detection with AP-loss, CVPR 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.surrogates._lists import read_lists
from rankgrad.surrogates._pairwise import pairwise_losses


def chen2019_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    delta: float = 1.0,
    interpolated: bool = False,
    max_relevant: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus average precision with a piecewise linear step, and the error-driven update as its gradient.

    With :math:`H(x) = \min(\max(x / 2\delta + \frac12, 0), 1)` in place of the step function, a relevant item i
    and an irrelevant one j have the primary term

    .. math:: L_{ij} = H(s_j - s_i) / \bigl(1 + \sum_{k \ne i} H(s_k - s_i)\bigr),

    and a list the loss :math:`\frac1p \sum_{ij} L_{ij}`. Backward is *not* its derivative: the wanted terms are
    0, so :math:`L_{ij}` is the error, and the perceptron rule sends it as it is: :math:`-\frac1p \sum_j L_{ij}`
    to the relevant item i, :math:`+\frac1p \sum_i L_{ij}` to the irrelevant item j. O(n p) time, bounded memory.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        delta: Half the width of the step in score units, > 0. The paper's detector uses 1 on logits.
        interpolated: The paper's Algorithm 1: an item's precision is raised to the best one at any lower score,
            and its terms shrink accordingly. False: equation (5) as it stands.
        max_relevant: No list has more relevant items than this. Saves a host sync.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant).

    Example:
        >>> scores = torch.tensor([3.0, 0.0, -3.0], requires_grad=True)
        >>> loss = rankgrad.surrogates.chen2019_loss(scores, torch.tensor([False, True, False]))
        >>> loss
        tensor(0.5000, grad_fn=...)
        >>> loss.backward()  # the step is flat here, yet the error moves both items of the wrong pair
        >>> scores.grad
        tensor([ 0.5000, -0.5000,  0.0000])

    Reference:
        Chen et al., Towards accurate one-stage object detection with AP-loss, CVPR 2019.
    """
    lists = read_lists(scores, relevance, mask, reduction)
    delta = _check.positive("delta", delta)
    lists, slots = lists.slots(max_relevant)
    best = lists.scores.new_zeros(len(lists.scores), 1)

    def errors(difference: Tensor, other: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal best
        step = (difference / (2 * delta) + 0.5).clamp(0, 1).where(other, 0)
        terms = step.masked_fill(relevant, 0) / (1 + step.sum(-1, keepdim=True))
        loss = terms.sum(-1)
        if interpolated:
            # Empty slots lie behind the worst item and must not set its precision.
            precision = (1 - loss).where(other.any(-1), 0)
            # Slots are best item first: maxima run from the last slot of the last block to the first.
            raised = torch.cat([precision, best], -1).flip(-1).cummax(-1).values.flip(-1)
            best = raised[:, :1]
            shrunk = torch.minimum(loss, 1 - raised[:, :-1])
            terms = terms * (shrunk / loss.where(loss > 0, 1)).unsqueeze(-1)
            loss = shrunk
        return loss, terms

    return lists.reduce(pairwise_losses(lists, slots, errors), reduction)
