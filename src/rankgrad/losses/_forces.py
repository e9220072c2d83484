"""Forces on similarities that are on the wrong side of a threshold: what some losses add to the ranks.

Ranks do not depend on the level of the scores. A force does: it pulls relevant items that are below ``upper`` up,
and pushes irrelevant ones that are above ``lower`` down, however far away they are. The functions return the share
of a block of scores in the value, and its gradient.
"""

import torch
from torch import Tensor

#: How forces are weighted: ``"hinge"``, all pairs on the wrong side alike; ``"balanced"``, every list alike.
KINDS = ("hinge", "balanced")


def wrong_sides(
    kind: str, upper: float, lower: float, scores: Tensor, relevance: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which relevant items are below ``upper``, and which irrelevant ones above ``lower`` (balanced: or at it)."""
    too_low = relevance & (scores < upper)
    too_high = ~relevance & (scores > lower if kind == "hinge" else scores >= lower)
    return (too_low, too_high) if mask is None else (too_low & mask, too_high & mask)


def count_pairs(too_low: Tensor, too_high: Tensor) -> Tensor:
    """Pairs on the wrong sides, int64 ``[2]``."""
    return torch.stack([too_low.sum(), too_high.sum()])


def hinge(
    scores: Tensor, too_low: Tensor, too_high: Tensor, upper: float, lower: float, weight: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean of upper - S over relevant pairs below, plus that of S - lower over others above, times a weight.

    Args:
        scores, too_low, too_high: ``[queries, candidates]``.
        counts: Pairs on the wrong sides, ``[2]``, of all blocks and processes; see :func:`count_pairs`.

    Returns:
        The value, float64, and its gradient with respect to the scores.
    """
    pull, push = (weight / counts.clamp(min=1).double()).to(scores.dtype).unbind()
    gaps = torch.where(too_low, (upper - scores) * pull, ((scores - lower) * push).where(too_high, 0))
    return gaps.sum(dtype=torch.float64), torch.where(too_low, -pull, push.where(too_high, 0))


def balanced(
    scores: Tensor,
    relevance: Tensor,
    too_low: Tensor,
    too_high: Tensor,
    upper: float,
    weight: float,
    lists: Tensor,
    queries: int,
) -> tuple[Tensor, Tensor]:
    """Both thresholds with every list alike.

    Upper: mean over the lists that count of the mean over relevant items of max(0, upper - S), times a weight.
    Lower: mean over all queries of log(1 + n), n irrelevant items at or above; each of them gets weight / (1 + n).

    Args:
        scores, relevance, too_low, too_high: ``[queries of this block, candidates]``.
        lists: How many lists count.
        queries: How many queries there are.

    Returns:
        The value, float64, and its gradient with respect to the scores.
    """
    above = too_high.sum(1, keepdim=True).double()
    pull = weight / (relevance.sum(1, keepdim=True).clamp(min=1) * lists.clamp(min=1)).double()
    push = weight / queries / (1 + above)
    below = (upper - scores).where(too_low, 0).sum(1, keepdim=True, dtype=torch.float64)
    value = (below * pull).sum() + torch.log1p(above).sum() / queries
    pull, push = pull.to(scores.dtype), push.to(scores.dtype)
    return value, torch.where(too_low, -pull, push.where(too_high, 0))
