"""The region classifier's loss where something is missing, and its invariances."""

import pytest
import torch
from torch.nn import functional as F

import rankgrad
from rankgrad.detection import RegionLoss

CLASSES = 5


def case(regions=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(regions, 1 + CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (regions,), generator=generator)  # classes 4 and 5 are absent
    return logits.requires_grad_(), labels


def value_and_gradient(loss, logits, labels, *rest):
    logits = logits.detach().requires_grad_()
    value = loss(logits, labels, *rest)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def test_background_only():
    loss = RegionLoss(memory=2)
    logits, labels = case()
    value, gradient = value_and_gradient(loss, logits, torch.zeros_like(labels))
    expected, wanted = value_and_gradient(F.cross_entropy, logits, torch.zeros_like(labels))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, wanted)
    alone = RegionLoss(memory=0, cross_entropy=0)
    value, gradient = value_and_gradient(alone, logits, torch.zeros_like(labels))
    assert float(value) == 0 and float(gradient.abs().sum()) == 0


@pytest.mark.parametrize("cross_entropy", [0.0, 1.0])
def test_no_regions(cross_entropy):
    logits = torch.zeros(0, 1 + CLASSES, requires_grad=True)
    loss = RegionLoss(memory=2, cross_entropy=cross_entropy)
    value = loss(logits, torch.zeros(0, dtype=torch.int64))
    value.backward()
    assert float(value.detach()) == 0
    value = loss(*case())  # and the memory is not spoilt
    assert bool(value.isfinite())


@pytest.mark.parametrize("cross_entropy", [0.0, 1.0])
def test_regions_of_which_none_exists(cross_entropy):
    logits, labels = case()
    loss = RegionLoss(memory=2, cross_entropy=cross_entropy)
    value, gradient = value_and_gradient(loss, logits, labels, torch.zeros(len(labels), dtype=torch.bool))
    assert float(value) == 0 and float(gradient.abs().sum()) == 0


def test_absent_classes_do_not_count():
    logits, labels = case()
    loss = RegionLoss(form="ap", ranking_weight=1, memory=0, cross_entropy=0, pooled_weight=0)
    value, gradient = value_and_gradient(loss, logits, labels)
    odds = (logits[:, 1:] - logits[:, :1])[:, :3]
    relevance = labels[:, None] == torch.tensor([1, 2, 3])
    expected = rankgrad.mean_average_precision_loss(odds, relevance, lam=0.5, margin=0.15)
    torch.testing.assert_close(value, expected.detach())
    assert float(gradient[:, 4:].abs().sum()) == 0


def test_the_papers_form_ignores_the_background_column():
    logits, labels = case()
    loss = RegionLoss(form="ap", ranked="logits", ranking_weight=1, cross_entropy=0, memory=0)
    value, gradient = value_and_gradient(loss, logits, labels)
    assert float(gradient[:, 0].abs().sum()) == 0
    relevance = F.one_hot(labels, 1 + CLASSES)[:, 1:].bool()
    same = rankgrad.ClassRankingLoss(form="ap", lam=0.5, margin=0.15)(logits[:, 1:], relevance)
    torch.testing.assert_close(value, same.detach())


@pytest.mark.parametrize("rank", ["odds", "softmax"])
def test_a_region_may_be_shifted(rank):
    """The same number added to all logits of a region changes neither probabilities nor odds."""
    logits, labels = case()
    shifted = logits + torch.randn(len(logits), 1, dtype=torch.float64)
    loss = RegionLoss(ranked=rank, memory=0)
    for a, b in zip(
        value_and_gradient(loss, logits, labels), value_and_gradient(loss, shifted, labels), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["ap", "log_ap", "log", "loglog"])
def test_masked_is_removed(form):
    logits, labels = case()
    mask = torch.rand(len(labels)) < 0.7
    loss = RegionLoss(form=form, memory=0)
    value, gradient = value_and_gradient(loss, logits, labels, mask)
    expected, wanted = value_and_gradient(loss, logits[mask], labels[mask])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[mask], wanted)
    assert float(gradient[~mask].abs().sum()) == 0


def test_memory_only_in_training():
    loss = RegionLoss(memory=2)
    loss.eval()(*case())
    assert not loss.ranking.memory.rows
    first = loss.train()(*case())
    again = loss(*case())
    assert loss.ranking.memory.rows == 80
    assert not torch.equal(first, again)
    loss.reset()
    assert torch.equal(loss(*case()), first)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="ranking_weight: expected a finite number > 0"):
        RegionLoss(ranking_weight=0)
    with pytest.raises(ValueError, match="ranked: expected one of"):
        RegionLoss(ranked="probability")
    with pytest.raises(ValueError, match="form"):
        RegionLoss(form="recall")
    with pytest.raises(ValueError, match="class_logits"):
        RegionLoss()(torch.rand(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="labels"):
        RegionLoss()(torch.rand(3, 4), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("options", [{}, {"lam": None}, {"lam": None, "window": 1.0, "cross_entropy": 0}])
def test_nothing_waits_for_the_device(options):
    """Meta tensors have no values: whatever asks for one, and so could not be recorded on a GPU, fails."""
    loss = RegionLoss(memory=2, **options).to("meta")
    for _ in range(3):
        logits = torch.randn(40, 1 + CLASSES, device="meta", requires_grad=True)
        labels, mask = torch.ones(40, dtype=torch.int64, device="meta"), torch.ones(40, device="meta").bool()
        (gradient,) = torch.autograd.grad(loss(logits, labels, mask), logits)
        assert gradient.shape == logits.shape


def test_half_precision_is_ranked_as_float32():
    logits, labels = case()
    half = logits.detach().bfloat16()
    value = RegionLoss(memory=0)(half, labels)
    assert value.dtype == torch.float32 and torch.equal(value, RegionLoss(memory=0)(half.float(), labels))


@pytest.mark.parametrize("cross_entropy", [0.0, 1.0])
@pytest.mark.parametrize("label", [-1, 1 + CLASSES])
def test_a_label_of_no_class_is_named_and_not_remembered(cross_entropy, label):
    """Without cross entropy it was taken for background."""
    logits, labels = case()
    labels[3] = label
    loss = RegionLoss(memory=2, cross_entropy=cross_entropy)
    with pytest.raises(
        ValueError, match=rf"^labels: expected 0 to {CLASSES} \(num_classes - 1\), received {label} "
    ):
        loss(logits, labels)
    assert loss.ranking.memory.rows == 0
    assert loss(logits, labels, torch.arange(len(labels)) != 3).isfinite()  # of a region that does not exist


@pytest.mark.parametrize("mask", [torch.ones(40), torch.ones(3, dtype=torch.bool)])
def test_a_mask_that_does_not_fit_is_named(mask):
    with pytest.raises((TypeError, ValueError), match=r"^mask: expected a "):
        RegionLoss(memory=0)(*case(), mask)
