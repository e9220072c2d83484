"""Average precision of detections against loops from the devkit's definition and against pycocotools."""

import contextlib
import io
import math

import pytest
import torch

from rankgrad.lab.detection import evaluate as evaluation
from rankgrad.lab.detection.evaluate import THRESHOLDS, evaluate
from rankgrad.lab.detection.scenes import Objects

import oracles_detection as oracle

CLASSES = 4


def random_boxes(n, generator, integers=False):
    corner = torch.rand(n, 2, generator=generator) * 60
    boxes = torch.cat([corner, corner + 5 + 30 * torch.rand(n, 2, generator=generator)], dim=1)
    return boxes.round() if integers else boxes


def random_case(seed, images=25, difficult=0.2, integers=False, more=0):
    """Objects, and detections of which many are jittered objects, some doubled, some of another class.

    In each image there are so many ``more`` that are no object.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    objects, detections = [], []
    for _ in range(images):
        n = draw(6)
        boxes = random_boxes(n, generator, integers)
        labels = torch.randint(1, CLASSES, (n,), generator=generator)  # the last class has no object
        objects.append(Objects(boxes, labels, torch.rand(n, generator=generator) < difficult))
        copies = torch.randint(0, n, (2 * n,), generator=generator) if n else torch.zeros(0, dtype=torch.int64)
        near = boxes[copies] + 4 * torch.randn(len(copies), 4, generator=generator)
        if integers:
            near = near.round()
        near[:, 2:] = torch.maximum(near[:, 2:], near[:, :2] + 1)
        far = random_boxes(draw(5) + more, generator, integers)
        found = torch.cat([near, far])
        guessed = torch.cat([labels[copies], torch.randint(1, CLASSES + 1, (len(far),), generator=generator)])
        scores = torch.rand(len(found), generator=generator)
        scores = (8 * scores).round() / 8 if seed % 2 else scores  # ties
        order = scores.argsort(descending=True, stable=True)
        detections.append({"boxes": found[order], "labels": guessed[order], "scores": scores[order]})
    return detections, objects


def of_class(detections, objects, label):
    found = [
        (p, box, score)
        for p, one in enumerate(detections)
        for box, kind, score in zip(*(one[k].tolist() for k in ("boxes", "labels", "scores")), strict=True)
        if kind == label
    ]
    there = {
        p: [
            (box, hard)
            for box, kind, hard in zip(o.boxes.tolist(), o.labels.tolist(), o.difficult.tolist(), strict=True)
            if kind == label
        ]
        for p, o in enumerate(objects)
    }
    return found, there, sum(not hard for kept in there.values() for _, hard in kept)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("integers", [False, True])
def test_against_loops(seed, integers):
    detections, objects = random_case(seed, integers=integers)
    stand = evaluate(detections, objects, CLASSES)
    for label in range(1, CLASSES + 1):
        found, there, positives = of_class(detections, objects, label)
        mine = (stand.area[label - 1], stand.eleven[label - 1], *stand.coco[:, label - 1])
        if not positives:
            assert all(math.isnan(value) for value in mine)
            continue
        points = oracle.curve(oracle.voc_outcomes(found, there), positives)
        expected = [oracle.area(points), oracle.eleven_points(points)]
        for threshold in THRESHOLDS:
            outcomes = oracle.coco_outcomes(found, there, threshold)
            expected.append(oracle.coco_points(oracle.curve(outcomes, positives)))
        torch.testing.assert_close(
            torch.stack(mine), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0
        )


@pytest.mark.parametrize(
    ("difficult", "protocol", "more"),
    [(0.0, "voc", 0), (0.3, "voc", 0), (0.3, "coco", 0), (0.0, "voc", 500), (0.3, "coco", 500)],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_against_pycocotools(seed, difficult, protocol, more):
    """Difficult objects excuse every detection of them, as COCO's crowds do; VOC's overlap as all others do.

    Of a class's detections in an image the best 100 count.
    """
    coco_module = pytest.importorskip("pycocotools.coco")
    from pycocotools.cocoeval import COCOeval

    class OneOverlap(COCOeval):
        def computeIoU(self, image, kind):  # noqa: N802
            crowds = [(box, box["iscrowd"]) for box in self._gts[image, kind]]
            for box, _ in crowds:
                box["iscrowd"] = 0
            found = super().computeIoU(image, kind)
            for box, crowd in crowds:
                box["iscrowd"] = crowd
            return found

    detections, objects = random_case(seed, difficult=difficult, more=more)
    truth = coco_module.COCO()
    boxes = [
        {"bbox": [x0, y0, x1 - x0, y1 - y0], "category_id": kind, "image_id": p, "iscrowd": int(hard)}
        for p, o in enumerate(objects)
        for (x0, y0, x1, y1), kind, hard in zip(
            o.boxes.double().tolist(), o.labels.tolist(), o.difficult.tolist(), strict=True
        )
    ]
    boxes = [{**box, "id": i, "area": 1} for i, box in enumerate(boxes, 1)]
    images = [{"id": p} for p in range(len(objects))]
    truth.dataset = {"images": images, "annotations": boxes, "categories": [{"id": c + 1} for c in range(CLASSES)]}
    found = [
        {"image_id": p, "category_id": kind, "bbox": [x0, y0, x1 - x0, y1 - y0], "score": score}
        for p, one in enumerate(detections)
        for (x0, y0, x1, y1), kind, score in zip(
            one["boxes"].double().tolist(), one["labels"].tolist(), one["scores"].tolist(), strict=True
        )
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        run = (OneOverlap if protocol == "voc" else COCOeval)(truth, truth.loadRes(found), "bbox")
        run.evaluate()
        run.accumulate()
    stand = evaluate(detections, objects, CLASSES, protocol)
    precision = torch.from_numpy(run.eval["precision"][..., 0, -1])  # thresholds, recalls, classes; -1: no object
    theirs = precision.masked_fill(precision < 0, torch.nan).nanmean(1)
    assert (0.001 if more else 0.05) < float(theirs.nanmean()) < 0.95
    torch.testing.assert_close(stand.coco.double(), theirs, atol=1e-9, rtol=0, equal_nan=True)
    told = {"AP x": theirs.nanmean(), "AP75 x": theirs[5].nanmean(), "AP50 x": theirs[0].nanmean()}
    if protocol == "voc":
        del told["AP50 x"]
    summary = stand.summary("x")
    assert {name: summary[name] for name in told} == pytest.approx({k: 100 * float(v) for k, v in told.items()})


def test_perfect_and_empty():
    _, objects = random_case(3)
    perfect = [{"boxes": o.boxes, "labels": o.labels, "scores": torch.ones(len(o.labels))} for o in objects]
    stand = evaluate(perfect, objects, CLASSES)
    names = ("AP50 x", "AP50-11 x", "AP x", "AP75 x")
    assert stand.summary("x") == dict.fromkeys(names, 100.0)
    nothing = [{k: v[:0] for k, v in one.items()} for one in perfect]
    assert evaluate(nothing, objects, CLASSES).summary("x") == dict.fromkeys(names, 0.0)
    with pytest.raises(ValueError, match="detections: expected those of 25 images, received 3"):
        evaluate(perfect[:3], objects, CLASSES)


@pytest.mark.parametrize("protocol", ["voc", "coco"])
def test_crowded_images_do_not_widen_the_others(monkeypatch, protocol):
    """Objects are padded to the most of a class in an image, images with like many of them together."""
    detections, objects = random_case(3)
    boxes = random_boxes(500, torch.Generator().manual_seed(1))
    crowd = torch.ones(500, dtype=torch.int64)
    objects.insert(7, Objects(boxes, crowd, torch.zeros(500, dtype=torch.bool)))
    detections.insert(7, {"boxes": boxes[::9], "labels": crowd[::9], "scores": torch.linspace(1, 0, 56)})
    together = evaluate(detections, objects, CLASSES, protocol)
    sizes, inner = [], evaluation.iou

    def iou(*boxes):
        sizes.append(inner(*boxes).numel())
        return inner(*boxes)

    monkeypatch.setattr(evaluation, "iou", iou)
    monkeypatch.setattr(evaluation, "_AT_ONCE", 500)
    apart = evaluate(detections, objects, CLASSES, protocol)
    assert sorted(sizes)[-1] == 56 * 500 and sorted(sizes)[-2] <= 500
    for name in ("area", "eleven", "coco"):
        torch.testing.assert_close(getattr(apart, name), getattr(together, name), rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, apart.outcomes, together.outcomes)) and apart.threshold == together.threshold
