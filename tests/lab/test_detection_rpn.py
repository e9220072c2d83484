"""Objectness that is ranked: all anchors of an image in one list."""

import numpy as np
import pytest
import torch
from test_detection_batched import SIZES, network, targets
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from rankgrad.detection.objectness import MARGIN, WINDOW, objectness_loss
from rankgrad.lab import recipes
from rankgrad.lab.detection.proposals import BatchedProposals
from rankgrad.lab.recipes import run
from rankgrad.lab.training.errors import UserError

import oracles
from runs import rows
from scenes import SMALL


def in_loops(objectness, kind):
    """Value and gradient: a list an image, those that are neither foreground nor background left out."""
    scores = objectness.detach().double().numpy()
    relevance, exists = (kind == 1).numpy(), (kind != -1).numpy()
    value = oracles.mean_loss(scores, relevance, "log_ap", margin=MARGIN, mask=exists)
    gradient = oracles.window_gradient(scores, relevance, "log_ap", WINDOW, margin=MARGIN, mask=exists)
    return value, torch.from_numpy(np.asarray(gradient))


def test_objectness_in_loops():
    generator = torch.Generator().manual_seed(0)
    objectness = 2 * torch.randn(3, 70, generator=generator, dtype=torch.float64)
    kind = torch.randint(-1, 2, (3, 70), generator=generator).to(torch.int8)
    kind[1].clamp_(max=0)  # without foreground an image does not count
    objectness.requires_grad_()
    value = objectness_loss(objectness, kind)
    (gradient,) = torch.autograd.grad(3 * value, objectness)
    expected, slopes = in_loops(objectness, kind)
    assert float(value.detach()) == pytest.approx(expected)
    torch.testing.assert_close(gradient, 3 * slopes)
    assert float(gradient[1].abs().sum()) == 0 and float(gradient[kind == -1].abs().sum()) == 0
    with pytest.raises(ValueError, match=r"^kind: expected the shape of objectness \[3, 70\]"):
        objectness_loss(objectness, kind[:2])


def test_an_image_is_not_compared_with_another():
    generator = torch.Generator().manual_seed(1)
    objectness, kind = torch.randn(2, 50, generator=generator), torch.randint(-1, 2, (2, 50), generator=generator)
    moved = objectness + torch.tensor([[5.0], [-3.0]])
    torch.testing.assert_close(objectness_loss(moved, kind), objectness_loss(objectness, kind))


def test_all_anchors_are_ranked():
    """Against torchvision's matching of every anchor, in loops; boxes as before, from the same random choice."""
    net = network()
    net.rpn.train()
    images = torch.randn(3, 3, 96, 128)
    features = {name: value.detach() for name, value in net.backbone(images).items()}
    found = {}
    for weight in (None, 0.5):
        net.rpn.ranking_weight = weight
        torch.manual_seed(0)
        _, found[weight] = net.rpn(ImageList(images, SIZES), features, targets())
    assert torch.equal(found[None]["loss_rpn_box_reg"], found[0.5]["loss_rpn_box_reg"])

    scores, _ = net.rpn.head(list(features.values()))
    together = torch.cat([level.permute(0, 2, 3, 1).flatten(1) for level in scores], 1)
    anchors = net.rpn.anchor_generator(ImageList(images, SIZES), list(features.values()))[0]
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    kind = torch.zeros_like(together, dtype=torch.int64)
    for row, target in zip(kind, targets(), strict=True):
        if len(target["boxes"]):
            matched = matcher(box_iou(target["boxes"], anchors))
            row.copy_(torch.where(matched >= 0, 1, torch.where(matched == Matcher.BETWEEN_THRESHOLDS, -1, 0)))
    assert int((kind == 1).sum()) > 3 and int((kind == -1).sum()) > 0
    expected, _ = in_loops(together, kind)
    value = found[0.5]["loss_objectness"]
    assert float(value.detach()) == pytest.approx(0.5 * expected, rel=1e-5)

    value.backward()
    torch.optim.SGD(net.rpn.head.parameters(), lr=0.1).step()
    _, after = net.rpn(ImageList(images, SIZES), features, targets())
    assert float(after["loss_objectness"].detach()) < float(value.detach())


def test_proposals_do_not_know_how_large_scores_are():
    """A ranking loss gives scores no origin. The sigmoid of large ones is 1, and would mix up the levels."""
    net = network()
    proposals = BatchedProposals.proposals
    levels, generator = [40, 20], torch.Generator().manual_seed(2)
    corner = torch.rand(2, 60, 2, generator=generator) * 60
    boxes = torch.cat([corner, corner + 5 + 30 * torch.rand(2, 60, 2, generator=generator)], 2)
    objectness = torch.randn(2, 60, generator=generator)
    net.rpn.eval()
    net.rpn._post_nms_top_n = {"training": 9, "testing": 9}
    plain = proposals(net.rpn, boxes, objectness, [(96, 128)] * 2, levels)
    moved = proposals(net.rpn, boxes, objectness + 40, [(96, 128)] * 2, levels)
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a, b) and len(a) == 9


def test_a_run_with_ranked_objectness(root, tmp_path):
    """Settings reach the network, and only the objectness differs in the first step."""
    losses = {}
    for name in ("cross_entropy", "ranking"):
        settings = [*SMALL, f"data.root={root}", f"rpn={name}", "epochs=1"]
        folder, _ = run.run("voc", settings, out=str(tmp_path / name))
        losses[name] = rows(folder)
    first, second = (losses[name][0] for name in losses)
    for part in ("loss_classifier", "loss_box_reg", "loss_rpn_box_reg"):
        assert first[part] == second[part], part
    ranked = [float(row["loss_objectness"]) for row in losses["ranking"]]
    assert ranked[0] > 1 > float(first["loss_objectness"])  # hundreds of anchors lie before an object at first
    settings = [*SMALL, f"data.root={root}", "rpn=ranking", "rpn_weight=0.5", "epochs=1"]
    half, _ = run.run("voc", settings, out=str(tmp_path / "half"))
    assert float(rows(half)[0]["loss_objectness"]) == pytest.approx(ranked[0] / 2)
    with pytest.raises(UserError, match=r"^rpn: rpn_weight: expected the loss ranking, received cross_entropy$"):
        recipes.load("voc", ["rpn_weight=2"])
