"""From class logits and box regression to detections, for a whole batch of images at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankgrad.detection.region_loss import class_scores

#: Most (region, class) pairs of an image that compete in the suppression. A head that ranks without a
#: calibrated scale may put all of them above any threshold; the best of them are enough for 100 detections.
CANDIDATES = 1000

#: Boxes in one call of the suppression, whose work grows with the square.
_TOGETHER = 8192


def detections_of(
    heads: Any,
    class_logits: Tensor,
    box_regression: Tensor,
    proposals: list[Tensor],
    image_shapes: list[tuple[int, int]],
    scores: str,
    *,
    candidates: int = CANDIDATES,
) -> list[dict[str, Tensor]]:
    """Detections of each image: boxes, scores and labels, best first.

    torchvision's steps with its thresholds (``score_thresh``, boxes of less than 0.01 pixels, suppression per
    class at ``nms_thresh``, the best ``detections_per_img``), on scores of our choice, all images in one
    pass. Equal to torchvision's for ``"softmax"`` as long as no image has more than ``candidates`` pairs
    above the threshold.

    Args:
        heads: torchvision's RoI heads, for box coder and thresholds.
        class_logits: ``[regions, 1 + classes]``.
        box_regression: ``[regions, 4 (1 + classes)]``.
        proposals: Boxes of each image.
        image_shapes: (height, width) of each image.
        scores: ``"odds"``, ``"softmax"`` or ``"logits"``.
        candidates: Most pairs of an image.
    """
    from torchvision.ops import nms

    device, regions = class_logits.device, [len(boxes) for boxes in proposals]
    images, classes = len(proposals), class_logits.shape[1] - 1
    # (of no regions at all torchvision's decode keeps the flat shape)
    decoded = heads.box_coder.decode(box_regression.float(), proposals).reshape(-1, 1 + classes, 4)
    boxes = decoded[:, 1:]
    # Images in rows of equal length: missing regions score -1, below any threshold.
    padded = boxes.new_zeros(images, max(regions, default=0), classes, 4)
    values = boxes.new_full(padded.shape[:3], -1.0)
    number = torch.arange(max(regions, default=0)).unsqueeze(0) < torch.tensor(regions).unsqueeze(1)
    place = number.flatten().nonzero().flatten().to(device)
    padded.flatten(0, 1)[place] = boxes
    values.flatten(0, 1)[place] = class_scores(class_logits.float(), scores)
    size = torch.tensor([(w, h, w, h) for h, w in image_shapes], device=device, dtype=padded.dtype)
    padded = padded.clamp(min=0).minimum(size[:, None, None])
    small = ~((padded[..., 2:] - padded[..., :2]) >= 1e-2).all(-1)  # NaN is small too
    values = values.masked_fill(small | (values <= heads.score_thresh), -1.0).flatten(1)

    best, at = values.topk(min(candidates, values.shape[1]), dim=1)  # [images, candidates], best first
    image, column = (best >= 0).nonzero(as_tuple=True)
    if not len(image):
        return [_nothing(boxes) for _ in regions]
    best, at = best[image, column], at[image, column]
    label = at % classes + 1
    found = padded.flatten(1, 2)[image, at]
    # One suppression for all: images and classes are moved apart, in float64 so that no box is rounded.
    apart = (image * classes + label).double() * (float(max(max(s) for s in image_shapes)) + 1)
    moved, weight = found.double() + apart.unsqueeze(1), best.double()
    parts = torch.arange(len(image), device=device).split(_chunks(torch.bincount(image).tolist()))
    kept = torch.cat([rows[nms(moved[rows], weight[rows], heads.nms_thresh)] for rows in parts])
    kept = kept[image[kept].argsort(stable=True)]  # by image, best first
    counts = torch.bincount(image[kept], minlength=images).tolist()
    most = heads.detections_per_img
    out = []
    for rows in kept.split(counts):
        rows = rows[:most]
        out.append({"boxes": found[rows], "labels": label[rows], "scores": best[rows]})
    return out


def _chunks(counts: list[int]) -> list[int]:
    """How many boxes go into one call: those of whole images, up to :data:`_TOGETHER`."""
    sizes = [0]
    for count in counts:
        if sizes[-1] and sizes[-1] + count > _TOGETHER:
            sizes.append(0)
        sizes[-1] += count
    return sizes


def _nothing(boxes: Tensor) -> dict[str, Tensor]:
    none = boxes.new_zeros(0)
    return {"boxes": none.reshape(0, 4), "labels": none.long(), "scores": none}
