"""Forces on similarities that are on the wrong side of a threshold: what some losses add to the ranks.

Ranks do not depend on the level of the scores. A force does: it pulls relevant items that are below ``upper`` up,
and pushes irrelevant ones that are above ``lower`` down, however far away they are. The functions return the share
of a block of scores ``[queries of this block, candidates]`` in the value, float64, and its gradient.
"""

import torch
from torch import Tensor


def hinge(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    upper: float,
    lower: float,
    weight: float,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The mean of upper - S over relevant pairs below, plus that of S - lower over others above, times a weight.

    Args:
        counts: :func:`hinge_pairs` of all blocks and processes; None: of this block, which is all there is.
    """
    too_low, too_high = _wrong_sides(scores, relevance, mask, upper, lower)
    counts = _counts(too_low, too_high) if counts is None else counts
    pull, push = (weight / counts.clamp(min=1).double()).to(scores.dtype).unbind()
    gaps = torch.where(too_low, (upper - scores) * pull, ((scores - lower) * push).where(too_high, 0))
    return gaps.sum(dtype=torch.float64), torch.where(too_low, -pull, push.where(too_high, 0))


def hinge_pairs(scores: Tensor, relevance: Tensor, mask: Tensor | None, upper: float, lower: float) -> Tensor:
    """How many pairs of a block are pulled, and how many pushed: int64 ``[2]``."""
    return _counts(*_wrong_sides(scores, relevance, mask, upper, lower))


def _wrong_sides(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, upper: float, lower: float
) -> tuple[Tensor, Tensor]:
    too_low, too_high = relevance & (scores < upper), ~relevance & (scores > lower)
    return (too_low, too_high) if mask is None else (too_low & mask, too_high & mask)


def _counts(too_low: Tensor, too_high: Tensor) -> Tensor:
    return torch.stack([too_low.sum(), too_high.sum()])


def balanced(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    upper: float,
    lower: float,
    weight: float,
    lists: Tensor,
    queries: int,
) -> tuple[Tensor, Tensor]:
    """Every list alike, so that pull and push are about equally strong where all similarities are alike.

    The value is the sum of

    - upper: mean over the lists that count of the mean over relevant items of ``weight`` max(0, upper - S);
    - lower: mean over all queries of log(1 + n), n irrelevant items at or above. Each of them gets the gradient
      ``weight`` / (1 + n): n is interpolated by a window of 1 / ``weight``.

    Args:
        lists, queries: How many lists count, and how many there are, of all blocks.
    """
    too_low, too_high = relevance & (scores < upper), ~relevance & (scores >= lower)
    if mask is not None:
        too_low, too_high = too_low & mask, too_high & mask
    above = too_high.sum(1, keepdim=True).double()
    pull = weight / (relevance.sum(1, keepdim=True).clamp(min=1) * lists.clamp(min=1)).double()
    push = weight / queries / (1 + above)
    below = (upper - scores).where(too_low, 0).sum(1, keepdim=True, dtype=torch.float64)
    value = (below * pull).sum() + torch.log1p(above).sum() / queries
    pull, push = pull.to(scores.dtype), push.to(scores.dtype)
    return value, torch.where(too_low, -pull, push.where(too_high, 0))
