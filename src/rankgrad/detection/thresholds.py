"""The ranking loss averaged over COCO's ten IoU thresholds: at each one, boxes that reach it are relevant."""

from __future__ import annotations

from functools import partial
from typing import Any

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


def at_first(columns: Tensor) -> Tensor:
    """Of ``[..., 10 classes]`` the columns of the first threshold, 0.5."""
    return columns[..., : columns.shape[-1] // LEVELS]


def is_by_threshold(scores: Tensor) -> bool:
    """Whether remembered scores ``[..., columns]`` have a block of columns for each threshold: ten equal ones."""
    if scores.shape[-1] % LEVELS:
        return False
    return bool((scores.unflatten(-1, (LEVELS, -1)) == at_first(scores).unsqueeze(-2)).all())


class ThresholdRankingLoss(ClassRankingLoss):
    """The mean of :class:`rankgrad.ClassRankingLoss` over the IoU thresholds that at least one box reaches.

    Each threshold is a loss with lists, and a lambda, of its own. All of them are one call of the engine for the
    lists of classes, and one for the pooled lists. Scores and relevance are ``[items, 10 classes]``, a block of
    columns for each threshold; so the memory holds which thresholds its items reached.

    Args:
        weighted: Weigh each list by the share of items with an IoU of 0.5 that also reach its threshold, as COCO's
            AP does by counting objects that no box reaches. Otherwise a threshold that a single box reaches has
            the same weight as one that all boxes reach.
        options: Of :class:`rankgrad.ClassRankingLoss`.
    """

    def __init__(self, *, weighted: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.weighted = weighted

    def _weighted(self, scores: Tensor, relevance: Tensor, mask: Tensor | None) -> Tensor:
        def levels(columns: Tensor) -> Tensor:
            return columns.reshape(len(columns), LEVELS, columns.shape[1] // LEVELS).movedim(1, 0)

        exists = torch.ones_like(relevance) if mask is None else mask
        parts = levels(scores), levels(relevance), levels(exists)
        if self.weighted:
            return self._by_share(*parts)
        each: Tensor = torch.func.vmap(super()._weighted)(*parts)
        counts = (parts[1] & parts[2]).flatten(1).any(1)
        return each.where(counts, 0).sum() / counts.sum().clamp(min=1)

    def _by_share(self, scores: Tensor, relevance: Tensor, exists: Tensor) -> Tensor:
        """Of ``[10, items, classes]``."""
        total = scores.new_zeros(())
        for share, arrange in self._parts():
            rows = [torch.func.vmap(arrange)(one) for one in (scores, relevance, exists)]
            losses = torch.func.vmap(partial(self._of_lists, reduction="none"))(*rows)
            many = (rows[1] & rows[2]).sum(-1).to(losses.dtype)  # [10, lists], or [10] of the pooled ones
            first, lists = many[0].clamp(min=1), (many[0] > 0).sum().clamp(min=1)
            total = torch.add(total, (losses * (many / first)).sum() / (LEVELS * lists), alpha=share)
        return total
