"""The region classifier's loss with the signature mmdetection's heads call; mmdetection is not imported.

In a configuration of mmdetection 3::

    custom_imports = dict(imports=["my_losses"])            # a module with the two lines below
    model = dict(roi_head=dict(bbox_head=dict(loss_cls=dict(type="MMDetRankingLoss", memory=7))))

    from mmdet.registry import MODELS                       # my_losses.py
    MODELS.register_module(module=rankgrad.detection.MMDetRankingLoss)

mmdetection's heads put the background *last* (its label is the number of classes), and divide by
``avg_factor``, the number of sampled regions. The head scores by softmax, so ``rank="softmax"`` is the
default here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.detection.region_loss import RegionLoss


class MMDetRankingLoss(RegionLoss):
    """:class:`RegionLoss` for mmdetection's box heads.

    Args:
        loss_weight: Multiplies everything, as in mmdetection's losses.
        use_sigmoid: Must be False: the head has a background column, as for its cross entropy.
        rank: What is ranked; mmdetection's heads score by softmax.
        options: Of :class:`RegionLoss`.
    """

    def __init__(
        self, *, loss_weight: float = 1.0, use_sigmoid: bool = False, rank: str = "softmax", **options: Any
    ) -> None:
        super().__init__(rank=rank, **options)
        if use_sigmoid:
            raise _check.fail("use_sigmoid", "False (the head needs a background column)", use_sigmoid)
        self.loss_weight = _check.non_negative("loss_weight", loss_weight)
        self.use_sigmoid = False  # read by mmdetection's heads

    def forward(  # type: ignore[override]
        self,
        cls_score: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of the sampled regions of a batch.

        Args:
            cls_score: ``[regions, classes + 1]``, background last.
            label: ``[regions]`` int64; the number of classes is background.
            weight: ``[regions]``; regions of weight 0 do not exist. Other weights are refused: ranks have none.
            avg_factor: Taken for mmdetection's sake; lists are averaged as in :class:`rankgrad.ClassRankingLoss`
                and the cross entropy over the regions that exist, which is mmdetection's own ``avg_factor``.
            reduction_override: None or ``"mean"``.
            kwargs: Ignored, as mmdetection's losses do.
        """
        if reduction_override not in (None, "mean"):
            raise _check.fail("reduction_override", "None or 'mean'", reduction_override)
        mask = None
        if weight is not None:
            if weight.device.type == "cpu" and not bool(((weight == 0) | (weight == 1)).all()):
                raise _check.fail("weight", "0 or 1 for each region", weight)
            mask = weight > 0
        background = cls_score.shape[1] - 1
        first = torch.cat([cls_score[:, -1:], cls_score[:, :-1]], dim=1)
        return self.loss_weight * super().forward(first, (label + 1).where(label != background, 0), mask)
