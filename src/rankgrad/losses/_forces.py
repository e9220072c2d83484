"""Forces on similarities that are on the wrong side of a threshold: what some losses add to the ranks.

Ranks do not depend on the level of the scores. A force does: it pulls relevant items that are below ``upper`` up,
and pushes irrelevant ones that are at ``lower`` or above down, however far away they are. Every list has the same
weight, so that both are about equally strong in a batch whose similarities are all alike.
"""

import torch
from torch import Tensor


def balanced(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    upper: float,
    lower: float,
    weight: float,
    reach: float,
    lists: Tensor,
    queries: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """The forces on a block of scores: the block's share of the value, float64, and its gradient.

    The value is ``weight`` times the sum of

    - upper: mean over the lists that count of the mean over relevant items of max(0, upper - S) / ``reach``, those
      that the mask leaves out, as a query among its own candidates, counted as 0;
    - lower: mean over all queries of log(1 + n), n irrelevant items at or above. Each of them gets the gradient
      1 / (1 + n) / ``reach``, the window that n is interpolated by.

    Args:
        scores, relevance, mask: ``[queries of this block, candidates]``.
        lists, queries: How many lists count, and how many there are, of all blocks and processes.
    """
    too_low = relevance & (scores < upper)
    too_high = ~relevance & (scores >= lower)
    if mask is not None:
        too_low, too_high = too_low & mask, too_high & mask
    above = too_high.sum(1, keepdim=True).double()
    pull = weight / reach / (relevance.sum(1, keepdim=True).clamp(min=1) * lists.clamp(min=1)).double()
    push = weight / reach / queries / (1 + above)
    below = (upper - scores).where(too_low, 0).sum(1, keepdim=True, dtype=torch.float64)
    value = (below * pull).sum() + weight * torch.log1p(above).sum() / queries
    pull, push = pull.to(scores.dtype), push.to(scores.dtype)
    return value, torch.where(too_low, -pull, push.where(too_high, 0))
