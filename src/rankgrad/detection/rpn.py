"""torchvision's region proposal network with objectness ranked over all anchors of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankgrad.detection.exchange import Exchanged
from rankgrad.detection.objectness import objectness_loss


class RankingProposals(Exchanged):
    """A region proposal network with our loss; mixed into the class of a model's own."""

    def compute_loss(self, objectness: Tensor, deltas: Tensor, labels: list[Tensor], targets: list[Tensor]) -> Any:
        """As in torchvision, with the ranking loss of all anchors for the cross entropy of the sampled ones."""
        _, boxes = super().compute_loss(objectness, deltas, labels, targets)  # type: ignore[misc]
        return objectness_loss(objectness.reshape(len(labels), -1), torch.stack(labels)), boxes

    def filter_proposals(self, proposals: Tensor, objectness: Tensor, *rest: Any) -> Any:
        """As in torchvision, after shifting the best anchor of each image to 0.

        Ranking leaves the level of the scores open, and torchvision compares their sigmoids, which are all 1 in
        float32 from 17 on.
        """
        rows = objectness.reshape(len(proposals), -1)
        return super().filter_proposals(proposals, rows - rows.amax(1, keepdim=True), *rest)  # type: ignore[misc]
