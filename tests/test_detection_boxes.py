"""Boxes: their IoU, and the GIoU loss of sampled regions' decoded boxes."""

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_iou, generalized_box_iou_loss

from rankgrad.detection.boxes import decoded, giou_loss, iou, sampled_giou_loss

from detectors import CLASSES
from oracles_detection import overlap as overlap_in_loops


def test_iou_in_loops():
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(40, 2, generator=generator) * 30
    boxes = torch.cat([corner, corner + 1 + 20 * torch.rand(40, 2, generator=generator)], 1).double()
    found = iou(boxes[:20], boxes[20:])
    wanted = [overlap_in_loops(a, b) for a, b in zip(boxes[:20].tolist(), boxes[20:].tolist(), strict=True)]
    assert found.tolist() == pytest.approx(wanted)
    torch.testing.assert_close(iou(boxes[:20].unsqueeze(1), boxes[20:]), box_iou(boxes[:20], boxes[20:]))


def regions_case():
    """Two images: regions near objects, labels, targets, and what a predictor says."""
    generator = torch.Generator().manual_seed(3)
    coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
    corner = torch.rand(12, 2, generator=generator) * 30
    objects = torch.cat([corner, corner + 8 + 20 * torch.rand(12, 2, generator=generator)], 1)
    regions = objects + 2 * torch.randn(12, 4, generator=generator)
    labels = torch.tensor([1, 0, 2, 3, 4, 0, 1, 1, 2, 0, 3, 4])
    parts = [(tensor[:7], tensor[7:]) for tensor in (regions, labels, objects)]
    targets = coder.encode(list(parts[2]), list(parts[0]))
    regression = torch.randn(12, 4 * (1 + CLASSES), generator=generator)
    return coder, regression, parts[0], parts[1], targets, objects, regions, labels


def test_giou_in_loops():
    """Against torchvision's loss of one pair at a time; value and gradient, the background left out."""
    coder, regression, regions, labels, targets, objects, flat, together = regions_case()
    gradients, values = [], []
    for loops in (False, True):
        said = regression.clone().requires_grad_()
        if loops:
            value = torch.zeros(())
            for row in (row for row in range(12) if together[row]):
                own = said[row, 4 * together[row] : 4 * together[row] + 4].unsqueeze(0)
                box = coder.decode_single(own, flat[row : row + 1])
                value = value + generalized_box_iou_loss(box, objects[row : row + 1]).sum() / 12
        else:
            value = sampled_giou_loss(coder, said, regions, labels, targets)
        (3 * value).backward()
        values.append(value.detach())
        gradients.append(said.grad)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert float(gradients[0][together == 0].abs().sum()) == 0


def test_giou_without_foreground():
    coder, regression, regions, _, targets, *_ = regions_case()
    said = regression.clone().requires_grad_()
    none = torch.zeros(12, dtype=torch.int64)
    infinite = torch.cat(targets).clone()
    infinite[:, 2:] = -torch.inf  # torchvision's targets in an image without an object
    value = giou_loss(*decoded(coder, said, regions, none, infinite), none)
    (gradient,) = torch.autograd.grad(value, said)
    assert float(value.detach()) == 0 and float(gradient.abs().sum()) == 0
    empty = torch.zeros(0, 4)
    assert float(giou_loss(empty, empty, torch.zeros(0, dtype=torch.int64))) == 0
