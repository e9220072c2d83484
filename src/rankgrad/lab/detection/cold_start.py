r"""Why an AP loss hardly improves random weights, shown by a linear classifier in seconds.

The slope of AP at a relevant item of rank :math:`r` is :math:`r^+ / (p r^2)`: smallest where ranks are worst.
Among tens of thousands of candidates and with random scores, Algorithm 1 then moves a relevant item by so
little that it passes almost no other item, and the gradient is a small part of cross entropy's. The log form's
slope :math:`1 / (p r)` and the recall weights' :math:`1 / (p (1 + c))` are larger by the factor :math:`r / r^+`,
and start by themselves; beside cross entropy AP starts too, because cross entropy brings the ranks to where AP has
a slope.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad import metrics
from rankgrad.detection.region_loss import RegionLoss, class_log_odds

Loss = Callable[[Tensor, Tensor], Tensor]


def _alone(form: str, weight: float = 1.0) -> Callable[[int], Loss]:
    return lambda memory: RegionLoss(
        form=form, ranked="logits", cross_entropy=0, ranking_weight=weight, memory=memory
    )


def _beside(form: str) -> Callable[[int], Loss]:
    return lambda memory: RegionLoss(form=form, ranked="odds", ranking_weight=1.0, memory=memory)


#: What is compared: name -> a function of the memory's size that makes the loss of (class logits, labels).
FORMS: dict[str, Callable[[int], Loss]] = {
    "cross entropy": lambda memory: F.cross_entropy,
    "AP": _alone("ap"),
    "AP x 30": _alone("ap", weight=30.0),
    "log AP": _alone("log_ap"),
    "recall log": _alone("log"),
    "cross entropy + AP": _beside("ap"),
    "cross entropy + log AP": _beside("log_ap"),
}

#: What scores a class at test time: a head trained without the background column has its logits only.
_BACKGROUND = ("cross entropy", "cross entropy + AP", "cross entropy + log AP")


@dataclass
class Curve:
    """What was measured while one loss trained.

    Args:
        steps: At which steps.
        mean_average_precision: Of unseen items, in percent, before each of these steps.
        gradient: Norm of the loss's gradient at the class logits.
        cross_entropy_gradient: Norm of the gradient that cross entropy would have at the same logits.
    """

    steps: list[int] = field(default_factory=list)
    mean_average_precision: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)
    cross_entropy_gradient: list[float] = field(default_factory=list)


class _RandomRegions:
    """Regions as a detector samples them: most are background, the others lie around the centre of their class."""

    def __init__(self, inputs: int, classes: int, foreground: float, distance: float, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(1 + classes, inputs, generator=self.generator)
        self.centres = distance * F.normalize(centres, dim=1)
        self.centres[0] = 0
        self.foreground = foreground

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs ``[count, inputs]`` and labels ``[count]``."""
        classes, inputs = len(self.centres) - 1, self.centres.shape[1]
        labels = torch.randint(1, 1 + classes, (count,), generator=self.generator)
        labels = labels.where(torch.rand(count, generator=self.generator) < self.foreground, 0)
        return self.centres[labels] + torch.randn(count, inputs, generator=self.generator), labels


def _mean_average_precision(logits: Tensor, labels: Tensor, scores: str) -> float:
    relevance = labels.unsqueeze(1) == torch.arange(1, logits.shape[1])
    return 100 * float(metrics.mean_average_precision(class_log_odds(logits, scores), relevance))


def cold_start(
    names: tuple[str, ...] = tuple(FORMS),
    *,
    steps: int = 150,
    every: int = 10,
    items: int = 4096,
    inputs: int = 64,
    classes: int = 20,
    foreground: float = 0.12,
    distance: float = 4.0,
    memory: int = 3,
    lr: float = 0.02,
    momentum: float = 0.9,
    seed: int = 0,
) -> dict[str, Curve]:
    """Train a linear classifier from random weights with each loss, on the same items.

    Args:
        names: Keys of :data:`FORMS`.
        steps: Steps of gradient descent.
        every: Measure once in so many steps, and after the last.
        items: In a batch.
        inputs: Numbers of an item.
        classes: Without the background.
        foreground: Share of the items that are no background.
        distance: Of the centres of the classes from the background's, in standard deviations of an item.
        memory: Batches in the score memory.
        lr: Learning rate.
        momentum: Of the descent.
        seed: Of items and weights.

    Returns:
        A curve for each name.
    """
    curves = {}
    for name in names:
        source = _RandomRegions(inputs, classes, foreground, distance, seed)
        test_inputs, test_labels = source.draw(4 * items)
        torch.manual_seed(seed)
        classifier = nn.Linear(inputs, 1 + classes)
        optimizer = torch.optim.SGD(classifier.parameters(), lr, momentum=momentum)
        loss, curve = FORMS[name](memory), Curve()
        scores = "odds" if name in _BACKGROUND else "logits"
        for step in range(steps + 1):
            batch, labels = source.draw(items)
            logits = classifier(batch)
            logits.retain_grad()
            optimizer.zero_grad()
            loss(logits, labels).backward()
            if step % every == 0 or step == steps:
                wrong = (logits.detach().softmax(1) - F.one_hot(labels, 1 + classes)) / items
                with torch.no_grad():
                    reached = _mean_average_precision(classifier(test_inputs), test_labels, scores)
                curve.steps.append(step)
                curve.mean_average_precision.append(reached)
                curve.gradient.append(float(logits.grad.norm()))
                curve.cross_entropy_gradient.append(float(wrong.norm()))
            if step < steps:
                optimizer.step()
        curves[name] = curve
    return curves
