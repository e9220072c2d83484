"""Proposals, matching and sampling of a whole batch against torchvision's loops over images."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import box_iou, nms

from rankgrad.lab.detection import matching, model
from rankgrad.lab.detection.config import Model, View
from rankgrad.lab.detection.matching import Truth, matches, sample
from rankgrad.lab.detection.proposals import BatchedHeads, BatchedProposals, _suppressed_one_by_one, suppressed

SIZES = [(96, 128), (90, 100), (64, 128)]


def random_boxes(*shape, seed=0, spread=60, size=40):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(*shape, 2, generator=generator) * spread
    return torch.cat([corner, corner + 2 + size * torch.rand(*shape, 2, generator=generator)], dim=-1)


def targets():
    boxes = random_boxes(4, seed=3)
    return [
        {"boxes": boxes[:3], "labels": torch.tensor([1, 2, 2])},
        {"boxes": boxes[:0], "labels": torch.zeros(0, dtype=torch.int64)},
        {"boxes": boxes[3:], "labels": torch.tensor([1])},
    ]


def network(**options):
    small = Model(backbone="tiny", weights="none", pyramid=16, hidden=32, **{"proposals": 50, **options})
    made, _ = model.build(small, View(short=96, long=128), regions=16, classes=["a", "b"], seed=0)
    torch.nn.init.normal_(made.rpn.head.cls_logits.weight, std=1.0)
    torch.nn.init.normal_(made.rpn.head.bbox_pred.weight, std=0.5)
    return made


@pytest.mark.parametrize("threshold", [0.3, 0.7])
@pytest.mark.parametrize("every", [1, 8])
@pytest.mark.parametrize("suppress", [suppressed, _suppressed_one_by_one])
def test_suppression_is_greedy(threshold, every, suppress):
    boxes = random_boxes(5, 60, spread=30)
    alive = torch.rand(5, 60, generator=torch.Generator().manual_seed(1)) < 0.9
    alive[3] = False
    options = {"every": every} if suppress is suppressed else {}
    stays = suppress(boxes, alive, threshold, **options)
    for group in range(5):
        rows = alive[group].nonzero().flatten()
        expected = rows[nms(boxes[group][rows], torch.arange(len(rows), 0, -1).float(), threshold)]
        assert stays[group].nonzero().flatten().tolist() == sorted(expected.tolist())
    assert 0 < int(stays.sum()) < int(alive.sum())


class Products(TorchDispatchMode):
    """Notes which dtypes products of matrices have."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "bmm" in str(function):
            self.dtypes.add(out.dtype)
        return out


def test_a_long_chain_of_suppressions():
    """Each box overlaps only its neighbours: every second one stays, and the truth travels down the chain."""
    left = torch.arange(100) * 4.0
    boxes = torch.stack([left, torch.zeros(100), left + 10, torch.full((100,), 10.0)], dim=1).unsqueeze(0)
    for half in (None, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None), Products() as products:
            stays = suppressed(boxes, torch.ones(1, 100, dtype=torch.bool), 0.3)
        assert stays[0].tolist() == [number % 2 == 0 for number in range(100)]
        # autocast must not choose: on a GPU tensors of two dtypes cannot be compared
        assert products.dtypes == {torch.float32}


@pytest.mark.parametrize("training", [True, False])
def test_proposals_are_torchvisions(training):
    net = network()
    net.rpn.train(training)
    images = torch.randn(3, 3, 96, 128)
    with torch.no_grad():
        features = net.backbone(images)
        ours, losses = net.rpn(ImageList(images, SIZES), features, targets() if training else None)
        net.rpn.__class__ = RegionProposalNetwork
        theirs, _ = net.rpn(ImageList(images, SIZES), features, targets() if training else None)
    assert bool(losses) == training
    for a, b in zip(ours, theirs, strict=True):
        assert 5 < len(a) <= 50
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("keep_best", [True, False])
@pytest.mark.parametrize("at_once", [2**26, 2 * 3 * 80, 1])
def test_matching_is_torchvisions(monkeypatch, keep_best, at_once):
    """All objects at once, two of each image at a time, one at a time: an image may have thousands of them."""
    monkeypatch.setattr(matching, "_AT_ONCE", at_once)
    inner = matching.overlaps

    def overlaps(truth, boxes):
        found = inner(truth, boxes)
        assert found.numel() <= max(at_once, 3 * 80)
        return found

    monkeypatch.setattr(matching, "overlaps", overlaps)
    boxes = random_boxes(80, seed=7)
    truth = Truth.of(targets())
    best, kind = matches(truth, boxes.unsqueeze(0), high=0.6, low=0.3, keep_best=keep_best)
    matcher = Matcher(0.6, 0.3, allow_low_quality_matches=keep_best)
    for number, target in enumerate(targets()):
        if not len(target["boxes"]):
            assert int(kind[number].abs().sum()) == 0
            continue
        found = matcher(box_iou(target["boxes"], boxes))
        assert torch.equal(kind[number].long(), torch.where(found >= 0, 1, torch.where(found == -1, 0, -1)))
        assert torch.equal(best[number][found >= 0], found[found >= 0])


@pytest.mark.parametrize(("size", "positives"), [(16, 4), (64, 32), (500, 100)])
def test_sampling_is_balanced_as_torchvisions(size, positives):
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(-1, 2, (3, 120), generator=generator)
    kind[1] = 0
    kind[2, 10:] = -1
    columns, chosen = sample(kind, size=size, positives=positives)
    theirs = BalancedPositiveNegativeSampler(size, positives / size)(list(kind))
    for row in range(3):
        kept = columns[row][chosen[row]]
        assert kept.unique().numel() == len(kept)
        kinds = kind[row][kept]
        assert int((kinds == 1).sum()) == int(theirs[0][row].sum())
        assert int((kinds == 0).sum()) == int(theirs[1][row].sum())
        assert not bool((kinds == -1).any())
    counts = torch.zeros(120)
    for _ in range(300):
        columns, chosen = sample(kind[:1], size=16, positives=4)
        counts[columns[0][chosen[0]]] += 1
    front = counts[kind[0] == 1]
    assert float(front.min()) > 0 and float(front.max()) < 4 * float(front.mean())  # every one has its chance


def test_losses_of_the_proposals_are_torchvisions():
    """With all anchors sampled nothing is random, and both are the same."""
    net = network()
    many = 3 * (24 * 32 + 12 * 16 + 6 * 8 + 3 * 4 + 2 * 2)
    net.rpn.fg_bg_sampler = BalancedPositiveNegativeSampler(2 * many, 0.5)
    net.rpn.train()
    images = torch.randn(3, 3, 96, 128)
    features = {name: value.detach() for name, value in net.backbone(images).items()}
    gradients = []
    for kind in (BatchedProposals, RegionProposalNetwork):
        net.rpn.__class__ = kind
        net.zero_grad()
        _, losses = net.rpn(ImageList(images, SIZES), features, targets())
        sum(losses.values()).backward()
        gradients.append([losses, {name: p.grad.clone() for name, p in net.rpn.named_parameters()}])
    for a, b in zip(*gradients, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_regions_are_torchvisions():
    """With all proposals sampled, the same regions, labels and regression targets, in another order."""
    net = network()
    heads = net.roi_heads.train()
    heads.fg_bg_sampler = BalancedPositiveNegativeSampler(200, 0.5)
    near = targets()[0]["boxes"] + torch.tensor([2.0, 1.0, 2.0, 1.0])
    proposals = [torch.cat([near, random_boxes(30, seed=11)]), random_boxes(25, seed=12), random_boxes(1, seed=13)]
    heads.__class__ = BatchedHeads
    ours = heads.select_training_samples(list(proposals), targets())
    heads.__class__ = RoIHeads
    theirs = heads.select_training_samples(list(proposals), targets())
    seen = 0
    for a, b in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        order, wanted = (x[0][:, 0].argsort() for x in (a, b))
        (regions, best, labels, regression), theirs_too = (
            [x[at] for x in y] for y, at in ((a, order), (b, wanted))
        )
        torch.testing.assert_close(regions, theirs_too[0])
        assert torch.equal(labels, theirs_too[2])
        front = labels > 0  # of the others neither the object nor the regression is used
        assert torch.equal(best[front], theirs_too[1][front])
        torch.testing.assert_close(regression[front], theirs_too[3][front])
        seen += int(front.sum())
    assert seen > 6


def test_losses_of_a_detector_are_torchvisions():
    """With everything sampled nothing is random: losses and gradients are those of torchvision's parts in turn."""
    net = network().train()
    for part in (net.rpn, net.roi_heads):
        part.fg_bg_sampler = BalancedPositiveNegativeSampler(10_000, 0.5)
    images, sizes = torch.randn(3, 3, 96, 128), list(SIZES)
    found = []
    for ours in (True, False):
        net.zero_grad()
        if ours:
            losses = net(images, sizes, targets())
        else:
            net.rpn.__class__, net.roi_heads.__class__ = RegionProposalNetwork, RoIHeads
            features = net.backbone(images)
            proposals, losses = net.rpn(ImageList(images, sizes), features, targets())
            losses.update(net.roi_heads(features, proposals, sizes, targets())[1])
        sum(losses.values()).backward()
        assert len(losses) == 4
        gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        found.append({**{name: value.detach() for name, value in losses.items()}, **gradients})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-5)


def test_few_regions():
    net = network()
    heads = net.roi_heads.train()
    proposals = [random_boxes(40, seed=1), random_boxes(3, seed=2), random_boxes(0, seed=2)]
    regions, _, labels, regression = heads.select_training_samples(proposals, targets())
    assert [len(part) for part in regions] == [16, 3, 1]
    assert [len(part) for part in labels] == [len(part) for part in regression] == [16, 3, 1]
    assert int((labels[0] > 0).sum()) <= 4
    assert labels[1].tolist() == [0, 0, 0]
