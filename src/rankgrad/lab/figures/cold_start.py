r"""A classifier trained from random weights: which losses make progress, and why an AP loss hardly does.

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
from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.lab.report.curves import apart

STEPS = 150
#: Which losses are drawn, of :data:`FORMS`.
LOOKS = {
    "AP": style.RED,
    "log AP": style.BLUE,
    "recall log": style.SKY,
    "cross entropy": style.BLACK,
    "cross entropy + AP": style.RED,
    "cross entropy + log AP": style.BLUE,
}

CAPTION = """A linear classifier from its first random weights, on made-up regions of which 12 % show one of 20
classes, 4,096 regions a step with a memory of 3 batches: the situation of a detector's classifier. Left: mAP on
new regions. Right: size of the gradient at the class logits, over that of cross entropy (CE) at the same logits.
All losses have the same learning rate; dashed: with cross entropy. What to see: the AP loss as published makes
no progress. Its slope is smallest where ranks are worst, so that Algorithm 1 passes hardly any item at first. Its
log form and the recall loss have the same ranks and the same optimum but keep a slope there; beside cross entropy
AP starts too."""

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

#: Share of the regions that are no background.
_FOREGROUND = 0.12

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

    def __init__(self, inputs: int, classes: int, distance: float) -> None:
        self.generator = torch.Generator().manual_seed(0)
        centres = torch.randn(1 + classes, inputs, generator=self.generator)
        self.centres = distance * F.normalize(centres, dim=1)
        self.centres[0] = 0

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs ``[count, inputs]`` and labels ``[count]``."""
        classes, inputs = len(self.centres) - 1, self.centres.shape[1]
        labels = torch.randint(1, 1 + classes, (count,), generator=self.generator)
        labels = labels.where(torch.rand(count, generator=self.generator) < _FOREGROUND, 0)
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
    distance: float = 4.0,
    memory: int = 3,
) -> dict[str, Curve]:
    """Train a linear classifier from random weights with each loss, on the same items.

    Args:
        names: Keys of :data:`FORMS`.
        steps: Steps of gradient descent.
        every: Measure once in so many steps, and after the last.
        items: In a batch.
        inputs: Numbers of an item.
        classes: Without the background.
        distance: Of the centres of the classes from the background's, in standard deviations of an item.
        memory: Batches in the score memory.

    Returns:
        A curve for each name.
    """
    curves = {}
    for name in names:
        source = _RandomRegions(inputs, classes, distance)
        test_inputs, test_labels = source.draw(4 * items)
        torch.manual_seed(0)
        classifier = nn.Linear(inputs, 1 + classes)
        optimizer = torch.optim.SGD(classifier.parameters(), 0.02, momentum=0.9)
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


def draw(inputs: FigureInputs) -> list[Drawing]:
    """Curves of mAP and of the gradient."""
    inputs.tell(f"training {len(LOOKS)} linear classifiers, some twenty seconds")
    curves = cold_start(tuple(LOOKS), steps=STEPS)
    with style.applied():
        figure = style.sheet(7.6, 3.5)
        left, right = figure.subplots(1, 2)
        for name, curve in curves.items():
            dash = "--" if name.startswith("cross entropy") else "-"
            ratio = [a / b for a, b in zip(curve.gradient, curve.cross_entropy_gradient, strict=True)]
            left.plot(curve.steps, curve.mean_average_precision, color=LOOKS[name], ls=dash)
            right.plot(curve.steps, ratio, color=LOOKS[name], ls=dash)
        style.letter(left, "mAP on new regions, %")
        style.letter(right, "gradient / cross entropy's")
        left.set_ylim(0, 100)
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.set_xlim(0, STEPS)
            axes.set_xticks(range(0, STEPS + 1, 50))
            axes.grid(True, axis="y")
        right.set_yscale("log")
        ends = {name: curve.mean_average_precision[-1] for name, curve in curves.items()}
        for (name, height), place in zip(ends.items(), apart(list(ends.values()), 8, 2, 98), strict=True):
            label = f"{name.replace('cross entropy', 'CE')} {height:.0f}"
            left.text(STEPS * 1.02, place, label, color=LOOKS[name], va="center", fontsize=8)
    return [Drawing("cold-start", figure, CAPTION)]
