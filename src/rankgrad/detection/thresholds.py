"""The ranking loss as COCO's AP has it: relevant at each of ten IoU thresholds is what overlaps enough."""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad.losses import ClassRankingLoss

#: How many thresholds there are.
LEVELS = 10


def reached(overlap: Tensor) -> Tensor:
    """``[n] -> [n, 10]``: which of the thresholds 0.5, 0.55, ..., 0.95 an IoU reaches."""
    # made on the device: a copy from the host could not be recorded
    levels = torch.arange(50, 100, 5, device=overlap.device, dtype=overlap.dtype) / 100
    return overlap.unsqueeze(1) >= levels


class ThresholdRankingLoss(ClassRankingLoss):
    """The mean over thresholds of :class:`rankgrad.ClassRankingLoss`; one without a relevant item does not count.

    Each threshold is a loss with lists, and a lambda, of its own. All of them are one call of the engine for the
    lists of classes, and one for the pooled lists. Scores and relevance are ``[items, 10 classes]``, a block of
    columns for each threshold; so the memory knows which thresholds its items reached.
    """

    def _weighted(self, scores: Tensor, relevance: Tensor, mask: Tensor | None) -> Tensor:
        def levels(columns: Tensor) -> Tensor:
            return columns.reshape(len(columns), LEVELS, columns.shape[1] // LEVELS).movedim(1, 0)

        exists = torch.ones_like(relevance) if mask is None else mask
        parts = levels(scores), levels(relevance), levels(exists)
        each: Tensor = torch.func.vmap(super()._weighted)(*parts)
        counts = (parts[1] & parts[2]).flatten(1).any(1)
        return each.where(counts, 0).sum() / counts.sum().clamp(min=1)
