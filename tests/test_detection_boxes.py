"""Losses that know how well boxes fit: IoU of decoded boxes, AP over thresholds, order of foreground, GIoU."""

import numpy as np
import pytest
import torch
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_iou, generalized_box_iou_loss

import rankgrad
from rankgrad.detection import RegionLoss, ranking_loss, use_ranking_loss
from rankgrad.detection.boxes import decoded, giou_loss, iou, overlap_of, own_scores
from rankgrad.detection.region_loss import padded

import oracles
from detectors import CLASSES, detector, losses_of
from oracles_detection import overlap as overlap_in_loops

LEVELS = [round(0.5 + 0.05 * k, 2) for k in range(10)]


def case(regions=30, seed=0, dtype=torch.float64):
    """Logits, labels and overlaps; class 3 has one region, class 4 none; no overlap reaches 0.95."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(regions, 1 + CLASSES, generator=generator, dtype=dtype)
    labels = torch.randint(0, 3, (regions,), generator=generator)
    labels[4] = 3
    overlap = 0.35 + 0.58 * torch.rand(regions, generator=generator, dtype=dtype)
    overlap[:3] = torch.tensor([0.55, 0.7, 0.5], dtype=dtype)  # thresholds are reached by what equals them
    labels[:3] = torch.tensor([1, 2, 1])
    overlap[4] = 0.92
    return logits.requires_grad_(), labels, overlap


def at_level(labels, overlap, level):
    """``[classes, regions]`` relevance at a threshold, in loops."""
    relevance = np.zeros((CLASSES, len(labels)), dtype=bool)
    for region, (label, value) in enumerate(zip(labels.tolist(), overlap.tolist(), strict=True)):
        if label and value >= level:
            relevance[label - 1, region] = True
    return relevance


@pytest.mark.parametrize("form", ["log_ap", "ap"])
@pytest.mark.parametrize("masked", [False, True])
def test_ap_over_thresholds_in_loops(form, masked):
    """Value and gradient: the mean over thresholds that something reaches of (2 mAP + pooled AP) / 3."""
    logits, labels, overlap = case()
    mask = torch.arange(len(labels)) % 5 != 3 if masked else None
    loss = RegionLoss(form=form, thresholds=True, cross_entropy=0, ranking_weight=1, memory=0)
    value = loss(logits, labels, mask, overlap)
    (gradient,) = torch.autograd.grad(2 * value, logits)

    odds = (logits[:, 1:] - logits[:, :1]).detach().numpy().T  # [classes, regions]
    exists = np.ones_like(odds, dtype=bool) if mask is None else np.tile(mask.numpy(), (CLASSES, 1))
    total, slopes, count = 0.0, np.zeros_like(odds), 0
    for level in LEVELS:
        relevance = at_level(labels, overlap, level)
        if not (relevance & exists).any():
            continue
        count += 1
        for weight, shape in ((2 / 3, odds.shape), (1 / 3, (1, odds.size))):  # a list a class, and all in one
            scores, relevant, there = (rows.reshape(shape) for rows in (odds, relevance, exists))
            total += weight * oracles.mean_loss(scores, relevant, form, margin=0.15, mask=there)
            part = oracles.mean_loss_gradient(scores, relevant, form, 0.5, margin=0.15, mask=there)
            slopes += weight * np.reshape(part, odds.shape)
    assert count == 9  # nothing reaches 0.95
    assert float(value.detach()) == pytest.approx(total / count, rel=1e-12)
    torch.testing.assert_close(gradient[:, 1:], 2 * torch.from_numpy(slopes.T) / count, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient[:, 0], -gradient[:, 1:].sum(1))


@pytest.mark.parametrize("masked", [False, True])
def test_weighted_thresholds_in_loops(masked):
    """Each list weighs as many of its regions as reach its threshold, of those that reach 0.5; ten thresholds."""
    logits, labels, overlap = case()
    mask = torch.arange(len(labels)) % 5 != 3 if masked else None
    loss = RegionLoss(thresholds="weighted", cross_entropy=0, ranking_weight=1, memory=0, window=2.0, lam=None)
    value = loss(logits, labels, mask, overlap)
    (gradient,) = torch.autograd.grad(2 * value, logits)

    odds = (logits[:, 1:] - logits[:, :1]).detach().numpy().T
    exists = np.ones_like(odds, dtype=bool) if mask is None else np.tile(mask.numpy(), (CLASSES, 1))
    total, slopes = 0.0, np.zeros(odds.shape)
    for weight, shape in ((2 / 3, odds.shape), (1 / 3, (1, odds.size))):
        scores, there = odds.reshape(shape), exists.reshape(shape)
        first = (at_level(labels, overlap, 0.5).reshape(shape) & there).sum(1)
        lists = int((first > 0).sum())
        for level in LEVELS:
            relevance = at_level(labels, overlap, level).reshape(shape)
            for row in range(shape[0]):
                reached = int((relevance[row] & there[row]).sum())
                if not reached:
                    continue
                share = weight * reached / first[row] / len(LEVELS) / lists
                one = scores[row : row + 1], relevance[row : row + 1], "log_ap"
                alone = there[row : row + 1]
                total += share * oracles.mean_loss(*one, margin=0.15, mask=alone)
                part = oracles.window_gradient(*one, 2.0, margin=0.15, mask=alone)
                slopes.reshape(shape)[row] += share * part[0]
    assert float(value.detach()) == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient[:, 1:], 2 * torch.from_numpy(slopes.T), rtol=1e-9, atol=1e-12)


def test_thresholds_with_memory_are_those_of_all_regions():
    """The remembered regions are candidates with the thresholds they reached."""
    first, second = case(20, seed=1), case(25, seed=2)
    loss = RegionLoss(thresholds=True, cross_entropy=0, ranking_weight=1, memory=2)
    loss(first[0], first[1], None, first[2])
    value = loss(second[0], second[1], None, second[2])
    together = [torch.cat([a.detach(), b.detach()]) for a, b in zip(second, first, strict=True)]
    alone = RegionLoss(thresholds=True, cross_entropy=0, ranking_weight=1, memory=0)
    torch.testing.assert_close(value.detach(), alone(together[0], together[1], None, together[2]))


def test_a_memory_of_other_lists_is_refused():
    """When it is loaded, not at the next step; an empty one has no kind."""
    made = {thresholds: RegionLoss(thresholds=thresholds, memory=2) for thresholds in (False, True, "weighted")}
    for loss in made.values():
        loss.load_state_dict(RegionLoss(memory=2).state_dict())
        logits = torch.randn(30, 21, requires_grad=True)  # 20 classes
        loss(logits, torch.arange(30) % 21, None, torch.rand(30))
    for one, other, message in (
        (False, True, "without thresholds, received one with them"),
        ("weighted", False, "with thresholds, received one without them"),
    ):
        with pytest.raises(ValueError, match=rf"^ranking\.memory\.scores: expected a memory {message}$"):
            made[one].load_state_dict(made[other].state_dict())
    made[True].load_state_dict(made["weighted"].state_dict())  # the same lists, averaged differently


@pytest.mark.parametrize("thresholds", [True, "weighted"])
def test_where_no_box_fits(thresholds):
    logits, labels, overlap = case()
    loss = RegionLoss(thresholds=thresholds, cross_entropy=0, memory=2)
    for _ in range(2):
        value = loss(logits, labels, None, torch.zeros_like(overlap))
        (gradient,) = torch.autograd.grad(value, logits)
        assert float(value.detach()) == 0 and float(gradient.abs().sum()) == 0


def test_order_of_the_foreground_in_loops():
    """Spearman's distance in each class with two foreground regions or more, times their number over that of all
    regions; and its gradient by Algorithm 1."""
    logits, labels, overlap = case()
    mask = torch.arange(len(labels)) % 7 != 2
    value = RegionLoss(order_weight=0.3, memory=0)(logits, labels, mask, overlap)
    without = RegionLoss(memory=0)(logits, labels, mask)
    (gradient,) = torch.autograd.grad(value - without, logits)

    odds = (logits[:, 1:] - logits[:, :1]).detach().numpy()
    rows = {c: [i for i in range(len(labels)) if labels[i] == c and mask[i]] for c in range(1, CLASSES + 1)}
    assert [len(rows[c]) >= 2 for c in rows] == [True, True, False, False]
    total, slopes, regions = 0.0, np.zeros_like(odds), int(mask.sum())
    for c in (1, 2):
        scores, n = odds[rows[c], c - 1], len(rows[c])
        wanted = np.asarray(oracles.ranks(overlap[rows[c]].numpy()))
        distance = np.asarray(oracles.ranks(scores)) - wanted
        total += n / regions * 6 * float((distance**2).sum()) / (n * (n * n - 1))
        found = oracles.windowed_rank_gradient(scores, 12 * distance / (n * (n * n - 1)), 1.0, 1)
        slopes[rows[c], c - 1] = n / regions * np.asarray(found)
    assert float((value - without).detach()) == pytest.approx(0.3 * total, rel=1e-9)
    torch.testing.assert_close(gradient[:, 1:], 0.3 * torch.from_numpy(slopes), rtol=1e-6, atol=1e-9)


def test_the_order_of_a_new_head_has_no_huge_gradient():
    """Its scores hardly differ: a reach taken from their spread would make the gradient grow with 1 / spread."""
    logits, labels, overlap = case(200)
    small = (0.01 * logits.detach()).requires_grad_()
    found = []
    for scores in (small, logits):
        without = RegionLoss(memory=0)(scores, labels)
        value = RegionLoss(order_weight=1, memory=0)(scores, labels, None, overlap) - without
        found.append(float(torch.autograd.grad(value, scores)[0].abs().sum()))
    assert 0 < found[0] < 10 * found[1]  # by the spread: 100 times


def test_the_right_order_costs_nothing():
    logits, labels, overlap = case()
    best = logits.detach().clone()
    best[:, 1:] = best[:, :1] + overlap.unsqueeze(1)
    value = RegionLoss(order_weight=1, memory=0)(best, labels, None, overlap)
    torch.testing.assert_close(value, RegionLoss(memory=0)(best, labels))
    worst = RegionLoss(order_weight=1, memory=0)(best, labels, None, 1 - overlap)
    ordered = sum(many for c in range(1, CLASSES + 1) if (many := int((labels == c).sum())) > 1)
    assert float(worst - value) == pytest.approx(2 * ordered / len(labels))


@pytest.mark.parametrize("foreground", [2, 5, 50])
def test_the_order_does_not_outweigh_cross_entropy(foreground):
    """At its weight of 0.2 no region has more than 2.4 times the gradient that cross entropy can have there."""
    logits, _, overlap = case(200)
    labels = torch.zeros(200, dtype=torch.int64)
    labels[:foreground] = 1
    new = (0.01 * logits.detach()).requires_grad_()
    value = RegionLoss(order_weight=0.2, memory=0)(new, labels, None, overlap) - RegionLoss(memory=0)(new, labels)
    (gradient,) = torch.autograd.grad(value, new)
    assert 0 < float(gradient[:, 1].abs().max()) <= 2.4 / 200


@pytest.mark.parametrize("options", [{"thresholds": True}, {"thresholds": "weighted"}, {"order_weight": 0.2}])
def test_padding_and_half_precision(options):
    """What is added changes nothing; labels without an overlap are an error that names it."""
    logits, labels, overlap = case(dtype=torch.float32)
    plain = RegionLoss(memory=2, **options)
    filled = RegionLoss(memory=2, **options)
    for _ in range(3):
        more = torch.cat([overlap, torch.ones(10)])
        wanted = plain(logits, labels, None, overlap)
        torch.testing.assert_close(wanted, filled(*padded(logits, labels, 40), more))
    assert RegionLoss(memory=0, **options)(logits.bfloat16(), labels, None, overlap.half()).dtype == torch.float32
    with pytest.raises((TypeError, ValueError), match="overlap: expected"):
        plain(logits, labels)
    with pytest.raises(ValueError, match="overlap: expected"):
        plain(logits, labels, None, overlap[:3])
    with pytest.raises(ValueError, match="order_weight: expected"):
        RegionLoss(order_weight=-1)
    with pytest.raises(ValueError, match="thresholds: expected one of"):
        RegionLoss(thresholds="mean")


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


def test_overlap_of_sampled_regions_in_loops():
    coder, regression, regions, labels, targets, objects, flat, together = regions_case()
    found = overlap_of(coder, regression, regions, labels, targets)
    for row, label in enumerate(together.tolist()):
        own = regression[row, 4 * label : 4 * label + 4].unsqueeze(0)
        box = coder.decode_single(own, flat[row : row + 1])[0]
        wanted = overlap_in_loops(box.tolist(), objects[row].tolist()) if label else 0.0
        assert float(found[row]) == pytest.approx(wanted, abs=1e-5)
    assert 0 < float(found.max()) < 1


@pytest.mark.parametrize("weighted", [False, True])
def test_giou_in_loops(weighted):
    """Against torchvision's loss of one pair at a time; value and gradient, the background left out."""
    coder, regression, regions, _, targets, objects, flat, together = regions_case()
    scores = own_scores(torch.randn(12, 1 + CLASSES), together, "softmax")
    assert scores[together == 0].tolist() == [0.0] * 3 and bool((scores[together > 0] > 0).all())
    weights = scores if weighted else None
    gradients, values = [], []
    for loops in (False, True):
        said = regression.clone().requires_grad_()
        if loops:
            front = [row for row in range(12) if together[row]]
            mean = sum(float(scores[row]) for row in front) / len(front)
            value = torch.zeros(())
            for row in front:
                own = said[row, 4 * together[row] : 4 * together[row] + 4].unsqueeze(0)
                box = coder.decode_single(own, flat[row : row + 1])
                share = float(scores[row]) / mean if weighted else 1.0
                value = value + share * generalized_box_iou_loss(box, objects[row : row + 1]).sum() / 12
        else:
            value = giou_loss(*decoded(coder, said, regions, together, torch.cat(targets)), together, weights)
        value.backward()
        values.append(value.detach())
        gradients.append(said.grad)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert float(gradients[0][together == 0].abs().sum()) == 0


def test_weights_of_giou_get_no_gradient():
    """A score that weighs a region must not fall because its box is bad: the classifier's loss says that."""
    coder, regression, regions, _, targets, *_, together = regions_case()
    weights = torch.rand(12).requires_grad_()
    said = regression.clone().requires_grad_()
    giou_loss(*decoded(coder, said, regions, together, torch.cat(targets)), together, weights).backward()
    assert weights.grad is None and float(said.grad.abs().sum()) > 0


def test_giou_without_foreground():
    coder, regression, regions, _, targets, *_ = regions_case()
    said = regression.clone().requires_grad_()
    none = torch.zeros(12, dtype=torch.int64)
    infinite = torch.cat(targets).clone()
    infinite[:, 2:] = -torch.inf  # torchvision's targets in an image without an object
    for weights in (None, torch.zeros(12)):
        value = giou_loss(*decoded(coder, said, regions, none, infinite), none, weights)
        (gradient,) = torch.autograd.grad(value, said)
        assert float(value.detach()) == 0 and float(gradient.abs().sum()) == 0
    empty = torch.zeros(0, 4)
    assert float(giou_loss(empty, empty, torch.zeros(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("replays", [False, True])
def test_the_drop_in_passes_the_iou_of_boxes(monkeypatch, replays):
    """Those of torchvision's sampled regions, padded where the loss is recorded; the other losses stay."""
    monkeypatch.setattr(rankgrad.graphs.Graphed, "replays", lambda self, *inputs: replays)
    monkeypatch.setattr(
        rankgrad.graphs.Graphed, "forward", lambda self, *given, **named: self.loss(*given, **named)
    )
    model = use_ranking_loss(detector(box_batch_size_per_image=100), memory=0, thresholds=True, order_weight=0.1)
    seen = {}

    def look(module, inputs, named):
        seen.update(zip(("logits", "labels", "mask"), inputs, strict=False), **named)

    ranking_loss(model).register_forward_pre_hook(look, with_kwargs=True)
    losses = losses_of(model)
    rows = len(seen["labels"])
    assert seen["overlap"].shape == (rows,) and (rows == 200) == replays
    front = seen["labels"] > 0
    assert not seen["overlap"].requires_grad and float(seen["overlap"][~front].abs().sum()) == 0
    # the objects are proposals too, and the untrained head hardly moves a box
    assert int(front.sum()) >= 2 and float(seen["overlap"].max()) > 0.8
    stock = losses_of(detector(box_batch_size_per_image=100))
    for name in stock:
        assert torch.equal(stock[name], losses[name]) == (name != "loss_classifier"), name
    sum(losses.values()).backward()
    assert bool(model.roi_heads.box_predictor.cls_score.weight.grad.isfinite().all())
    assert "_sampled" not in vars(model.roi_heads)


@pytest.mark.parametrize("options", [{"thresholds": True}, {"order_weight": 0.2}])
def test_no_regions(options):
    loss = RegionLoss(memory=2, **options)
    logits = torch.zeros(0, 1 + CLASSES, requires_grad=True)
    for _ in range(2):
        value = loss(logits, torch.zeros(0, dtype=torch.int64), None, torch.zeros(0))
        value.backward()
        assert float(value.detach()) == 0
    assert bool(loss(*case(dtype=torch.float32)[:2], None, case(dtype=torch.float32)[2]).isfinite())


@pytest.mark.parametrize(
    "options", [{"thresholds": True}, {"order_weight": 0.2}, {"thresholds": True, "lam": None}]
)
def test_nothing_waits_for_the_device(options):
    """Meta tensors have no values: whatever asks for one, and so could not be recorded on a GPU, fails."""
    loss = RegionLoss(memory=2, **options).to("meta")
    for _ in range(3):
        logits = torch.randn(40, 1 + CLASSES, device="meta", requires_grad=True)
        labels, mask = torch.ones(40, dtype=torch.int64, device="meta"), torch.ones(40, device="meta").bool()
        value = loss(logits, labels, mask, torch.rand(40, device="meta"))
        (gradient,) = torch.autograd.grad(value, logits)
        assert gradient.shape == logits.shape
