r"""Calibrate the scores of a head trained by ranking alone, so that a score threshold can be set.

A ranking loss is invariant to a constant added to all scores, and only its margin sets their scale. It trains the
order, within a class and (by the pooled list) across classes. So the only calibration that keeps what
was trained is one increasing map for all classes. Here it is the logistic one, fitted on the regions in the
loss's memory: :math:`P(\text{relevant}) = \sigma(a s + b)`, :math:`a > 0`. It is folded into the classifier's
weights, so the model stays a plain torchvision model that scores and thresholds as usual.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad import _check
from rankgrad.detection.drop_in import ranking_loss
from rankgrad.detection.region_loss import RegionLoss

Model = TypeVar("Model", bound=nn.Module)

_NEWTON_STEPS = 50  # at most


def fit_scale(scores: Tensor, relevance: Tensor) -> tuple[float, float]:
    """Slope and offset of the logistic map from scores to the probability of being relevant.

    The maximum of the likelihood by Newton's method, with a prior of one relevant and one irrelevant item (Platt's
    targets), so that separable scores have a finite slope.

    Args:
        scores: ``[n]``.
        relevance: ``[n]`` bool; some must be relevant and some not.
    """
    scores, relevance = scores.detach().double().flatten(), relevance.flatten() != 0
    positives, count = int(relevance.sum()), len(scores)
    if not 0 < positives < count:
        raise _check.fail("relevance", "relevant and irrelevant items", relevance)
    if float(scores.max()) == float(scores.min()):
        raise _check.fail("scores", "scores that differ", scores)
    high, low = (positives + 1) / (positives + 2), 1 / (count - positives + 2)
    target = torch.where(relevance, high, low).to(scores)
    centre, spread = scores.mean(), scores.std().clamp(min=1e-12)
    x = (scores - centre) / spread
    slope, offset = scores.new_tensor(1.0), torch.logit(target.mean())

    def cost(a: Tensor, b: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(a * x + b, target)

    now = cost(slope, offset)
    for _ in range(_NEWTON_STEPS):
        p = (slope * x + offset).sigmoid()
        error, weight = p - target, (p * (1 - p)).clamp(min=1e-12)
        gradient = torch.stack([(error * x).mean(), error.mean()])
        mixed = (weight * x).mean()
        hessian = torch.stack([(weight * x * x).mean(), mixed, mixed, weight.mean()]).reshape(2, 2)
        step = torch.linalg.solve(hessian + 1e-12 * torch.eye(2).to(hessian), gradient)
        while (moved := cost(slope - step[0], offset - step[1])) > now and float(step.abs().max()) > 1e-12:
            step = step / 2
        slope, offset, before, now = slope - step[0], offset - step[1], now, moved
        if float(before - now) < 1e-12:
            break
    if not float(slope) > 0:
        raise _check.fail("scores", "relevant items that score higher than the others on average", scores)
    return float(slope / spread), float(offset - slope * centre / spread)


@torch.no_grad()
def calibrate(model: Model) -> Model:
    """Fold the logistic map of the memory's regions into the classifier of a model, in place.

    Afterwards the background logit is 0 and the logit of a class is its log-odds: odds scores are the fitted
    probability, softmax scores of the plain model are in the same order wherever one class stands out. The
    order of scores is what the loss ranked, untouched, so no average precision changes but through the
    score threshold. The probability is that among the *sampled* regions of training, a quarter foreground at
    most.

    Args:
        model: After training with :func:`use_ranking_loss`, the memory still there. It must be scored by what the
            loss ranks, odds or logits (softmax scores have a scale: that of cross entropy), and the box predictor
            must be linear as torchvision's.

    Example:
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
        >>> from rankgrad.detection import calibrate, ranking_loss, use_ranking_loss
        >>> model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
        >>> model = use_ranking_loss(model, ranked="odds", cross_entropy=0, memory=1)
        >>> labels = torch.arange(60) % 3  # as training with images leaves them in the memory:
        >>> logits = torch.nn.functional.one_hot(labels, 3) + torch.randn(60, 3)
        >>> _ = ranking_loss(model)(logits.requires_grad_(), labels)
        >>> model = calibrate(model)
    """
    loss = ranking_loss(model)
    layer = getattr(model.roi_heads.box_predictor, "cls_score", None)  # type: ignore[union-attr]
    if not isinstance(loss, RegionLoss) or loss.ranked not in ("odds", "logits"):
        raise _check.fail("model", "a model whose RegionLoss ranks odds or logits", model)
    scored: str = model.roi_heads.region_scores  # type: ignore[union-attr, assignment]
    if scored != loss.ranked:
        raise _check.fail("model", f"a model scored by what its loss ranks, {loss.ranked!r}", scored)
    if not isinstance(layer, nn.Linear):
        raise _check.fail("model", "a box predictor with a linear cls_score", model)
    scores, relevance, mask = loss.ranking.memory.candidates()
    if not bool(mask.any()):
        raise _check.fail("model", "a memory with regions: train with memory > 0 first", model)
    slope, offset = fit_scale(scores[mask], relevance[mask])
    for values in (layer.weight, layer.bias):
        if loss.ranked == "odds":
            values[1:] -= values[:1].clone()
        values[1:] *= slope
        values[0] = 0
    layer.bias[1:] += offset
    remembered: Tensor = loss.ranking.memory.get_buffer("scores")
    remembered.mul_(slope).add_(offset)  # to the scale of the calibrated scores
    return model
