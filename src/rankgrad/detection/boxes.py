"""IoU of boxes, and the GIoU loss of sampled regions' decoded boxes.

Boxes are edges (left, top, right, bottom). torchvision's regression targets of a sampled region decode to its
object's box, so that regions, labels and targets are all that is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Weight of the GIoU loss beside the classifier's loss, as in mmdetection's Faster R-CNN.
BOX_WEIGHT = 10.0


def areas(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Area of the intersection, and of each of the two, of boxes ``[..., 4]``, broadcast."""
    sides = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])
    sides = sides.clamp(min=0)
    each = [(b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1]) for b in (boxes, others)]
    return sides[..., 0] * sides[..., 1], each[0], each[1]


def iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of boxes ``[..., 4]`` with others, broadcast (``box_iou`` takes no batch)."""
    inside, first, second = areas(boxes, others)
    return inside / (first + second - inside).clamp(min=1e-12)  # two boxes without an area share nothing


def decoded(
    coder: Any, box_regression: Tensor, regions: Sequence[Tensor], labels: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The box that each region has for the class of its label, and the box of its object, ``[regions, 4]`` both.

    The rows of background regions have no meaning.

    Args:
        coder: torchvision's ``BoxCoder``.
        box_regression: ``[regions, 4 (1 + classes)]``, the output of a box predictor.
        regions: Boxes of each image.
        labels: ``[regions]`` int64, 0 is background.
        targets: ``[regions, 4]``: the objects, encoded by the same coder.
    """
    boxes = torch.cat(list(regions)).float()
    own = box_regression.float().unflatten(1, (-1, 4))[torch.arange(len(labels), device=labels.device), labels]
    return coder.decode_single(own, boxes), coder.decode_single(targets.float(), boxes)


def giou_loss(boxes: Tensor, objects: Tensor, labels: Tensor) -> Tensor:
    r"""The sum over foreground regions of :math:`1 - \mathrm{GIoU}`, over the number of regions.

    The same division as in torchvision's smooth L1 loss of boxes.

    Args:
        boxes: ``[regions, 4]``, decoded.
        objects: ``[regions, 4]``.
        labels: ``[regions]`` int64; 0, the background, does not count.
    """
    from torchvision.ops import generalized_box_iou_loss

    front = labels > 0
    # Background regions have no object. They get a GIoU of 1 and are masked below: 0 * NaN would be NaN.
    here = torch.where(front.unsqueeze(1), boxes, objects)
    each: Tensor = generalized_box_iou_loss(here, objects).where(front, 0)
    return each.sum() / max(len(labels), 1)


def sampled_giou_loss(
    coder: Any,
    box_regression: Tensor,
    regions: Sequence[Tensor],
    labels: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> Tensor:
    """:func:`giou_loss` of sampled regions.

    Args:
        coder, box_regression: As in :func:`decoded`.
        regions, labels, targets: Of each image, as ``RoIHeads.select_training_samples`` returns them.
    """
    together = torch.cat(list(labels))
    return giou_loss(*decoded(coder, box_regression, regions, together, torch.cat(list(targets))), together)
