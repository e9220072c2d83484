"""The loss as mmdetection's heads call it."""

import inspect

import pytest
import torch

from rankgrad.detection import MMDetRankingLoss, RegionLoss


def test_the_signature_is_that_of_mmdetections_cross_entropy():
    """mmdet.models.losses.CrossEntropyLoss.forward, from its documentation (3.x)."""
    expected = ["self", "cls_score", "label", "weight", "avg_factor", "reduction_override", "kwargs"]
    parameters = inspect.signature(MMDetRankingLoss.forward).parameters
    assert list(parameters) == expected
    assert [parameters[name].default for name in expected[3:6]] == [None] * 3
    loss = MMDetRankingLoss(use_sigmoid=False, loss_weight=1.0)
    assert loss.use_sigmoid is False  # BBoxHead reads it
    assert not hasattr(loss, "custom_cls_channels")  # and takes its usual path for classes + 1 columns


def as_a_head_calls_it(loss, cls_score, labels, label_weights):
    """BBoxHead.loss of mmdetection 3, the part about classes."""
    avg_factor = max(torch.sum(label_weights > 0).float().item(), 1.0)
    return loss(cls_score, labels, label_weights, avg_factor=avg_factor, reduction_override=None)


def test_it_is_the_region_loss_with_the_background_last():
    generator = torch.Generator().manual_seed(0)
    cls_score = torch.randn(60, 6, generator=generator, requires_grad=True)
    labels = torch.randint(0, 6, (60,), generator=generator)  # 5 is background
    weights = (torch.rand(60, generator=generator) < 0.9).float()
    loss = MMDetRankingLoss(memory=0, loss_weight=2.0)
    value = as_a_head_calls_it(loss, cls_score, labels, weights)
    (gradient,) = torch.autograd.grad(value, cls_score)
    kept = weights > 0
    ours = cls_score.detach()[kept][:, [5, 0, 1, 2, 3, 4]].requires_grad_()
    expected = 2 * RegionLoss(rank="softmax", memory=0)(ours, (labels[kept] + 1) % 6)
    torch.testing.assert_close(value, expected)
    (wanted,) = torch.autograd.grad(expected, ours)
    torch.testing.assert_close(gradient[kept][:, [5, 0, 1, 2, 3, 4]], wanted)
    assert float(gradient[~kept].abs().sum()) == 0


def test_what_it_refuses():
    scores, labels = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction_override: expected None or 'mean'"):
        MMDetRankingLoss()(scores, labels, reduction_override="sum")
    with pytest.raises(ValueError, match="weight: expected 0 or 1"):
        MMDetRankingLoss()(scores, labels, torch.full((4,), 0.5))
    with pytest.raises(ValueError, match="use_sigmoid"):
        MMDetRankingLoss(use_sigmoid=True)
