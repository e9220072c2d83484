"""Average precision of detections: Pascal VOC's (11 points and area) at IoU 0.5, and COCO's over 0.5 ... 0.95.

All detections of a class, best first. VOC: a detection belongs to the object of its class that it overlaps
most; the first one of an object with IoU >= 0.5 is right, every other one is wrong; one that belongs to a
difficult object is neither. COCO: a detection takes the object that it overlaps most among those not yet taken,
at each of ten thresholds; difficult objects are COCO's ignored ones. In COCO's own data these are crowds, which
a detection overlaps by its share inside of the crowd. Boxes are edges, areas are plain products (see ``voc.py``
for the devkit's + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankgrad.detection.boxes import iou
from rankgrad.lab.detection.matching import shares
from rankgrad.lab.detection.scenes import Objects

#: Overlaps of detections with objects that are computed at a time.
_AT_ONCE = 2**22
#: COCO's metrics count so many detections of a class in an image, the best ones.
_COCO_MOST = 100
THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))


@dataclass(frozen=True)
class DetectionMetrics:
    """Average precisions of each class, ``[classes]``, NaN for a class without an object that counts.

    Args:
        area: VOC, area under the curve, IoU 0.5.
        eleven: VOC 2007, mean of 11 points, IoU 0.5.
        coco: COCO, ``[10, classes]``, 101 points, IoU 0.5 ... 0.95.
        outcomes: For each image ``[D]``: 1 right, 0 wrong, -1 neither, of its detections by VOC's rule.
        threshold: The score from which on detections of all classes together have the best F1.
        protocol: Whose AP50 is reported: ``"voc"`` (area and 11 points) or ``"coco"`` (101 points).
    """

    area: Tensor
    eleven: Tensor
    coco: Tensor
    outcomes: tuple[Tensor, ...]
    threshold: float
    protocol: str = "voc"

    def by_class(self) -> dict[str, Tensor]:
        """The average precisions that are reported, ``[classes]`` each."""
        at75 = self.coco[THRESHOLDS.index(0.75)]
        if self.protocol == "coco":
            return {"AP": self.coco.mean(0), "AP50": self.coco[0], "AP75": at75}
        return {"AP50": self.area, "AP50-11": self.eleven, "AP": self.coco.mean(0), "AP75": at75}

    def summary(self, suffix: str) -> dict[str, float]:
        """Means over the classes in percent."""
        return {f"{name} {suffix}": 100 * float(values.nanmean()) for name, values in self.by_class().items()}


class _Table:
    """Objects in rows of equal length, one row for each (image, class) that has any."""

    def __init__(self, objects: Sequence[Objects], classes: int) -> None:
        counts = torch.tensor([len(o.labels) for o in objects])
        image = torch.arange(len(objects)).repeat_interleave(counts)
        label = torch.cat([o.labels for o in objects]) - 1
        boxes, hard = torch.cat([o.boxes for o in objects]).double(), torch.cat([o.difficult for o in objects])
        order = (image * classes + label).argsort(stable=True)
        keys, row = (image * classes + label)[order].unique_consecutive(return_inverse=True)
        many = torch.bincount(row, minlength=len(keys))
        column = torch.arange(len(row)) - (many.cumsum(0) - many)[row]
        width = int(many.max()) if len(many) else 1
        self.boxes = boxes.new_full((len(keys) + 1, width, 4), -1.0)  # the last row: no objects
        self.boxes[row, column] = boxes[order]
        self.exists = torch.zeros(len(keys) + 1, width, dtype=torch.bool)
        self.exists[row, column] = True
        self.difficult = torch.zeros_like(self.exists)
        self.difficult[row, column] = hard[order]
        self.row_of = torch.full((len(objects) * classes,), len(keys))
        self.row_of[keys] = torch.arange(len(keys))


def _groups(counts: Tensor, objects: Sequence[Objects]) -> list[Tensor]:
    """Numbers of images whose objects are judged together, those with like many of a class: rows are padded.

    Args:
        counts: ``[images]``, how many detections each has.
        objects: Of each.
    """
    most = torch.tensor([int(o.labels.bincount().max()) if len(o.labels) else 1 for o in objects])
    order = most.argsort(stable=True)
    groups, begin, many = [], 0, 0
    for at, (count, width) in enumerate(zip(counts[order].tolist(), most[order].tolist(), strict=True)):
        if at > begin and (many + count) * width > _AT_ONCE:
            groups.append(order[begin:at].sort().values)
            begin, many = at, 0
        many += count
    return [*groups, order[begin:].sort().values]


def _voc_hits(overlap: Tensor, rows: Tensor, table: _Table) -> tuple[Tensor, Tensor]:
    """Which detections (best first) are right at IoU 0.5, and which are neither right nor wrong."""
    most, best = overlap.max(1)
    close = most >= THRESHOLDS[0]
    neither = close & table.difficult[rows, best]
    owner = torch.where(close & ~neither, rows * table.boxes.shape[1] + best, -1)
    return _first_of_each(owner), neither


def _first_of_each(owner: Tensor) -> Tensor:
    """The first place of each value >= 0."""
    order = owner.argsort(stable=True)
    sorted_owner = owner[order]
    first = torch.ones_like(sorted_owner, dtype=torch.bool)
    first[1:] = sorted_owner[1:] != sorted_owner[:-1]
    out = torch.zeros_like(first)
    out[order] = first & (sorted_owner >= 0)
    return out


def _coco_hits(overlap: Tensor, rows: Tensor, table: _Table) -> tuple[Tensor, Tensor]:
    """``[10, D]`` each: right, and neither. All (image, class) rows take their k-th best detection together."""
    thresholds = torch.tensor(THRESHOLDS, dtype=overlap.dtype, device=overlap.device).unsqueeze(1)
    right = torch.zeros(len(THRESHOLDS), len(overlap), dtype=torch.bool, device=overlap.device)
    neither = torch.zeros_like(right)
    taken = torch.zeros(len(THRESHOLDS), *table.exists.shape, dtype=torch.bool, device=overlap.device)
    order = rows.argsort(stable=True)
    order = order[rows[order] < len(table.exists) - 1]  # where there is an object to take
    many = torch.bincount(rows[order], minlength=len(table.exists))
    turn = torch.arange(len(order), device=overlap.device) - (many.cumsum(0) - many)[rows[order]]
    for now in order[turn.argsort(stable=True)].split(torch.bincount(turn).tolist()):
        row = rows[now]
        hard = table.difficult[row]
        most, best = overlap[now].masked_fill(hard | taken[:, row], -1.0).max(2)  # [10, rows]
        hit = most >= thresholds
        right[:, now] = hit
        neither[:, now] = ~hit & (overlap[now].masked_fill(~hard, -1.0).max(1).values >= thresholds)
        level, at = hit.nonzero(as_tuple=True)
        taken[level, row[at], best[level, at]] = True
    return right, neither


def _turns(keys: Tensor) -> Tensor:
    """How many equal keys stand before each: ``[3, 5, 3, 3] -> [0, 0, 1, 2]``."""
    order = keys.argsort(stable=True)
    many = keys[order].unique_consecutive(return_counts=True)[1]
    turns = torch.empty_like(keys)
    turns[order] = torch.arange(len(keys), device=keys.device) - (many.cumsum(0) - many).repeat_interleave(many)
    return turns


def _precision_recall(hits: Tensor, positives: int) -> tuple[Tensor, Tensor]:
    """Precision and recall after each detection that counts; ``hits [2, D]``, best first: right, and neither."""
    right, neither = hits
    true = right[~neither].double().cumsum(0)
    return true / torch.arange(1, len(true) + 1, device=true.device), true / positives


def _envelope(precision: Tensor) -> Tensor:
    """The best precision at this recall or a higher one."""
    return precision.flip(0).cummax(0).values.flip(0)


def _at(precision: Tensor, recall: Tensor, points: Tensor) -> Tensor:
    """The best precision at a recall of at least each point; 0 where it is not reached."""
    padded = torch.cat([_envelope(precision), precision.new_zeros(1)])
    return padded[torch.searchsorted(recall, points.to(recall))]


def voc_area(precision: Tensor, recall: Tensor) -> Tensor:
    """Area under the envelope of the curve."""
    steps = recall.diff(prepend=recall.new_zeros(1))
    return (_envelope(precision) * steps).sum() if len(recall) else recall.new_zeros(())


def voc_eleven(precision: Tensor, recall: Tensor) -> Tensor:
    """Mean of the best precisions at recall 0, 0.1, ..., 1."""
    return _at(precision, recall, torch.arange(11, dtype=torch.float64) / 10).mean()


def coco_points(precision: Tensor, recall: Tensor) -> Tensor:
    """Mean of the best precisions at recall 0, 0.01, ..., 1."""
    # pycocotools' own numbers, of which some are a rounding above k / 100
    return _at(precision, recall, torch.from_numpy(np.linspace(0, 1, 101))).mean()


def evaluate(
    detections: Sequence[dict[str, Tensor]], objects: Sequence[Objects], classes: int, protocol: str = "voc"
) -> DetectionMetrics:
    """Average precision of each class.

    Args:
        detections: ``boxes [D, 4]``, ``labels [D]`` (from 1) and ``scores [D]`` of each image.
        objects: The objects of each image.
        classes: How many classes there are.
        protocol: ``"coco"``: difficult objects are crowds, and the numbers pycocotools'.
    """
    if len(detections) != len(objects):
        raise ValueError(f"detections: expected those of {len(objects)} images, received {len(detections)}")
    counts = torch.tensor([len(d["scores"]) for d in detections])
    image = torch.arange(len(detections)).repeat_interleave(counts)
    label = torch.cat([d["labels"].cpu() for d in detections]) - 1
    boxes = torch.cat([d["boxes"].cpu() for d in detections]).double()
    scores = torch.cat([d["scores"].cpu() for d in detections])
    order = scores.argsort(descending=True, stable=True)
    order = order[label[order].argsort(stable=True)]  # by class, best first
    image, label, boxes = image[order], label[order], boxes[order]
    # Which detections are right, and which neither right nor wrong.
    voc = torch.zeros(2, len(order), dtype=torch.bool)
    coco = torch.zeros(2, len(THRESHOLDS), len(order), dtype=torch.bool)
    for group in _groups(counts, objects):
        here = torch.isin(image, group).nonzero().flatten()
        table = _Table([objects[number] for number in group.tolist()], classes)
        rows = table.row_of[torch.searchsorted(group, image[here]) * classes + label[here]]
        overlap = iou(boxes[here].unsqueeze(1), table.boxes[rows]).masked_fill(~table.exists[rows], -1.0)
        voc[:, here] = torch.stack(_voc_hits(overlap, rows, table))
        if protocol == "coco":
            crowds = shares(boxes[here].unsqueeze(1), table.boxes[rows]).masked_fill(~table.exists[rows], -1.0)
            overlap = torch.where(table.difficult[rows], crowds, overlap)
        coco[..., here] = torch.stack(_coco_hits(overlap, rows, table))
    coco[1, :, _turns(image * classes + label) >= _COCO_MOST] = True  # neither right nor wrong
    positives = torch.bincount(torch.cat([o.labels[~o.difficult] for o in objects]) - 1, minlength=classes)
    ends = torch.bincount(label, minlength=classes).cumsum(0).tolist()
    parts = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    outcomes = torch.empty(len(order), dtype=torch.int8)
    outcomes[order] = voc[0].to(torch.int8) - voc[1].to(torch.int8)
    threshold = _best_threshold(scores, outcomes, int(positives.sum()))
    precisions = _average_precisions(voc, coco, parts, positives.tolist())
    return DetectionMetrics(*precisions, outcomes.split(counts.tolist()), threshold, protocol)


def _average_precisions(
    voc: Tensor, coco: Tensor, parts: list[slice], positives: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """VOC's by area and by 11 points, ``[classes]`` each, and COCO's, ``[10, classes]``.

    Args:
        voc: ``[2, D]``: which detections are right, and which neither right nor wrong.
        coco: ``[2, 10, D]``, likewise.
        parts: The detections of each class, best first.
        positives: How many objects of each class there are to find.
    """
    area, eleven = torch.full((2, len(parts)), torch.nan, dtype=torch.float64)
    levels = torch.full((len(THRESHOLDS), len(parts)), torch.nan, dtype=torch.float64)
    for number, (part, count) in enumerate(zip(parts, positives, strict=True)):
        if not count:
            continue
        curve = _precision_recall(voc[:, part], count)
        area[number], eleven[number] = voc_area(*curve), voc_eleven(*curve)
        for level in range(len(THRESHOLDS)):
            levels[level, number] = coco_points(*_precision_recall(coco[:, level, part], count))
    return area, eleven, levels


def _best_threshold(scores: Tensor, outcomes: Tensor, positives: int) -> float:
    """Where 2 right / (kept + positives) is largest; infinity if nothing is right."""
    counted = outcomes >= 0
    scores, order = scores[counted].sort(descending=True, stable=True)
    right = (outcomes[counted][order] == 1).double().cumsum(0)
    if not len(right) or not float(right[-1]):
        return float("inf")
    return float(scores[(right / (torch.arange(1, len(right) + 1) + positives)).argmax()])
