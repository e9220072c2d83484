"""Boxes of a whole batch against its objects, without a loop over images and without waiting for the device.

Objects are padded to rows of equal length; what torchvision does image by image with masks and ``where``
happens here for all images at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rankgrad.detection.boxes import areas, iou

#: Overlaps that are computed at a time: 256 MiB, and a few times that for what lies between.
_AT_ONCE = 2**26


@dataclass(frozen=True)
class Truth:
    """Objects of a batch: ``boxes [B, G, 4]``, ``labels [B, G]``, ``exists [B, G]``; G is at least 1."""

    boxes: Tensor
    labels: Tensor
    exists: Tensor

    @staticmethod
    def of(targets: list[dict[str, Tensor]]) -> Truth:
        """From torchvision's targets."""
        boxes, labels = [t["boxes"] for t in targets], [t["labels"] for t in targets]
        most = max(1, *(len(b) for b in boxes))
        exists = torch.arange(most).unsqueeze(0) < torch.tensor([len(b) for b in boxes]).unsqueeze(1)
        padded = pad_sequence(boxes, batch_first=True)
        if padded.shape[1] == 0:
            padded = padded.new_zeros(len(boxes), 1, 4)
            return Truth(padded, labels[0].new_zeros(len(boxes), 1), exists.to(padded.device))
        exists = exists.to(padded.device, non_blocking=True)
        return Truth(padded, pad_sequence(labels, batch_first=True), exists)


def shares(boxes: Tensor, others: Tensor) -> Tensor:
    """How much of boxes ``[..., 4]`` is inside of others, broadcast; 0 of a box without an area."""
    inside, area, _ = areas(boxes, others)
    return inside / area.clamp(min=1e-12)


def overlaps(truth: Truth, boxes: Tensor) -> Tensor:
    """:func:`iou`, ``[B, G, N]``, of objects with boxes ``[B or 1, N, 4]``; -1 where no object is."""
    return iou(truth.boxes.unsqueeze(2), boxes.unsqueeze(1)).masked_fill(~truth.exists.unsqueeze(2), -1.0)


def matches(truth: Truth, boxes: Tensor, *, high: float, low: float, keep_best: bool) -> tuple[Tensor, Tensor]:
    """The object of each box, and whether it is foreground, by torchvision's ``Matcher``.

    Args:
        truth: The objects, some of them at a time: an image may have many thousands.
        boxes: ``[B or 1, N, 4]``.
        high: A box that overlaps its best object at least so much is foreground.
        low: Less than that is background; between the two is neither.
        keep_best: The boxes that overlap an object most are foreground however little it is.

    Returns:
        ``[B, N]`` numbers of the best objects, and ``[B, N]`` int8: 1 foreground, 0 background, -1 neither.
    """
    images, many = truth.exists.shape
    value = boxes.new_full((images, boxes.shape[1]), -torch.inf)
    best, kept = torch.zeros_like(value, dtype=torch.int64), torch.zeros_like(value, dtype=torch.bool)
    at_once = max(1, _AT_ONCE // max(1, value.numel()))
    for begin in range(0, many, at_once):
        part = slice(begin, begin + at_once)
        overlap = overlaps(Truth(truth.boxes[:, part], truth.labels[:, part], truth.exists[:, part]), boxes)
        largest, at = overlap.max(1)
        best = torch.where(largest > value, at + begin, best)
        value = torch.maximum(value, largest)
        if keep_best:
            most = overlap.amax(2, keepdim=True)
            kept |= ((overlap == most) & (most >= 0)).any(1)
    kind = (value >= high).to(torch.int8) - ((value >= low) & (value < high)).to(torch.int8)
    return best, torch.where(kept, 1, kind) if keep_best else kind


def sample(kind: Tensor, *, size: int, positives: int) -> tuple[Tensor, Tensor]:
    """A random choice of foreground and background in each image, as torchvision's balanced sampler makes it.

    Args:
        kind: ``[B, N]``: 1 foreground, 0 background, -1 neither.
        size: How many in all; background fills up what foreground leaves.
        positives: How many of them foreground at most.

    Returns:
        ``[B, S]`` columns, those of the foreground first, and ``[B, S]`` whether there was one to choose.
    """
    key = torch.rand(kind.shape, device=kind.device)
    most = kind.shape[1]
    front, columns = key.masked_fill(kind != 1, -1.0).topk(min(positives, most), dim=1)
    back, others = key.masked_fill(kind != 0, -1.0).topk(min(size, most), dim=1)
    chosen = front >= 0
    room = torch.arange(back.shape[1], device=kind.device) < size - chosen.sum(1, keepdim=True)
    return torch.cat([columns, others], 1), torch.cat([chosen, (back >= 0) & room], 1)
