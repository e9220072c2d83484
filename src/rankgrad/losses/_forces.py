"""Forces on similarities that are on the wrong side of a threshold: what some losses add to the ranks.

Ranks do not depend on the level of the scores. A force does: it pulls relevant items that are below ``upper`` up,
and pushes irrelevant ones that are at ``lower`` or above down, however far away they are.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class WrongSides(NamedTuple):
    """Which items of a block of scores the forces act on: relevant ones below, irrelevant ones at or above."""

    too_low: Tensor
    too_high: Tensor

    def counts(self) -> Tensor:
        """How many pairs, int64 ``[2]``."""
        return torch.stack([self.too_low.sum(), self.too_high.sum()])


def wrong_sides(scores: Tensor, relevance: Tensor, mask: Tensor | None, upper: float, lower: float) -> WrongSides:
    """The items that the forces act on, ``[queries, candidates]``."""
    too_low, too_high = relevance & (scores < upper), ~relevance & (scores >= lower)
    return WrongSides(too_low, too_high) if mask is None else WrongSides(too_low & mask, too_high & mask)


def hinge(
    scores: Tensor, wrong: WrongSides, upper: float, lower: float, weight: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Every pair on a wrong side alike: few that are left are moved as much together as many.

    The value is ``weight`` times the sum of the means of upper - S over relevant pairs below and of S - lower over
    others above.

    Args:
        scores: ``[queries of this block, candidates]``.
        counts: :meth:`WrongSides.counts` of all blocks and processes.

    Returns:
        The block's share of the value, float64, and its gradient with respect to the scores.
    """
    too_low, too_high = wrong
    pull, push = (weight / counts.clamp(min=1).double()).to(scores.dtype).unbind()
    gaps = torch.where(too_low, (upper - scores) * pull, ((scores - lower) * push).where(too_high, 0))
    return gaps.sum(dtype=torch.float64), torch.where(too_low, -pull, push.where(too_high, 0))


def balanced(
    scores: Tensor, relevance: Tensor, wrong: WrongSides, upper: float, weight: float, lists: Tensor, queries: int
) -> tuple[Tensor, Tensor]:
    """Every list alike: pull and push are about equally strong in a batch whose similarities are all alike.

    The value is the sum of

    - upper: mean over the lists that count of the mean over relevant items of ``weight`` max(0, upper - S);
    - lower: mean over all queries of log(1 + n), n irrelevant items at or above. Each of them gets the gradient
      ``weight`` / (1 + n): n is interpolated by a window of 1 / ``weight``.

    Args:
        scores, relevance: ``[queries of this block, candidates]``.
        lists, queries: How many lists count, and how many there are, of all blocks.

    Returns:
        The block's share of the value, float64, and its gradient with respect to the scores.
    """
    too_low, too_high = wrong
    above = too_high.sum(1, keepdim=True).double()
    pull = weight / (relevance.sum(1, keepdim=True).clamp(min=1) * lists.clamp(min=1)).double()
    push = weight / queries / (1 + above)
    below = (upper - scores).where(too_low, 0).sum(1, keepdim=True, dtype=torch.float64)
    value = (below * pull).sum() + torch.log1p(above).sum() / queries
    pull, push = pull.to(scores.dtype), push.to(scores.dtype)
    return value, torch.where(too_low, -pull, push.where(too_high, 0))
