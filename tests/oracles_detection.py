"""Average precision of detections in loops, from the devkit's VOCevaldet and from COCO's definition."""

import numpy as np


def overlap(a, b):
    """Intersection over union of two boxes (left, top, right, bottom)."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    if wide <= 0 or high <= 0:
        return 0.0
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return wide * high / (area - wide * high)


def _sorted(detections):
    """(image, box) of one class, best first; equal scores in the order of the images."""
    rows = [(-score, at, image, box) for at, (image, box, score) in enumerate(detections)]
    return [(image, box) for _, _, image, box in sorted(rows, key=lambda row: row[:2])]


def voc_outcomes(detections, objects, threshold=0.5):
    """1 right, 0 wrong, None neither, of each detection of one class, best first.

    Args:
        detections: (image, box, score).
        objects: image -> list of (box, difficult).
    """
    used = set()
    out = []
    for image, box in _sorted(detections):
        best, which = -1.0, None
        for number, (other, _) in enumerate(objects.get(image, [])):
            if overlap(box, other) > best:
                best, which = overlap(box, other), number
        if which is None or best < threshold:
            out.append(0)
        elif objects[image][which][1]:
            out.append(None)
        elif (image, which) in used:
            out.append(0)
        else:
            used.add((image, which))
            out.append(1)
    return out


def coco_outcomes(detections, objects, threshold):
    """The same by COCO's rule: the best object not yet taken; a difficult one only if no other fits."""
    used = set()
    out = []
    for image, box in _sorted(detections):
        best, which = threshold, None
        for number, (other, hard) in enumerate(objects.get(image, [])):
            if not hard and (image, number) not in used and overlap(box, other) >= best:
                best, which = overlap(box, other), number
        if which is not None:
            used.add((image, which))
            out.append(1)
        elif any(hard and overlap(box, other) >= threshold for other, hard in objects.get(image, [])):
            out.append(None)
        else:
            out.append(0)
    return out


def curve(outcomes, positives):
    """(recall, precision) after each detection that counts."""
    right, seen, out = 0, 0, []
    for outcome in outcomes:
        if outcome is None:
            continue
        seen += 1
        right += outcome
        out.append((right / positives, right / seen))
    return out


def best_at(points, recall):
    """The best precision where recall is at least so much."""
    return max((p for r, p in points if r >= recall), default=0.0)


def eleven_points(points):
    """VOC 2007."""
    return sum(best_at(points, k / 10) for k in range(11)) / 11


def area(points):
    """VOC 2010 and later: the area under the best precision at each recall or more."""
    total, before = 0.0, 0.0
    for recall in sorted({r for r, _ in points}):
        total += (recall - before) * best_at(points, recall)
        before = recall
    return total


def coco_points(points):
    """COCO: 101 points."""
    return sum(best_at(points, recall) for recall in np.linspace(0, 1, 101)) / 101
