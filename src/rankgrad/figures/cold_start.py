"""A classifier that starts from bad ranks: which losses get going."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankgrad import metrics
from rankgrad.figures import style
from rankgrad.figures.drawing import Drawing, Sources
from rankgrad.losses import ClassRankingLoss

INPUTS, CLASSES, FOREGROUND, ITEMS = 64, 20, 0.12, 4096
STEPS, RATE = 150, 0.02
_LOOK = 5

CAPTION = """A linear classifier from its first random weights, on made-up regions of which 12 % show one of 20
classes, 4,096 regions a step with a memory of 3 batches: the situation of a detector's classifier. Left: mAP on
new regions. Right: size of the gradient at the weights. All losses have the same learning rate. What to see:
the AP loss as published stands still. Its slope is smallest where ranks are worst, so that Algorithm 1 passes
hardly anybody at first. Its log form and the recall loss have the same ranks and the same optimum but keep a
slope there, and start faster than cross entropy does."""


@dataclass
class Course:
    """What one training saw: (step, mAP) and (step, norm of the gradient)."""

    precision: list[tuple[int, float]] = field(default_factory=list)
    gradient: list[tuple[int, float]] = field(default_factory=list)


def regions(generator: torch.Generator, centres: Tensor, items: int) -> tuple[Tensor, Tensor]:
    """Features ``[items, inputs]`` and labels ``[items]``, CLASSES = background."""
    labels = torch.randint(CLASSES, (items,), generator=generator)
    labels[torch.rand(items, generator=generator) >= FOREGROUND] = CLASSES
    shift = torch.cat([centres, torch.zeros(1, INPUTS)])[labels]
    return torch.randn(items, INPUTS, generator=generator) + shift, labels


def train(loss: Callable[[Tensor, Tensor], Tensor], *, steps: int = STEPS, items: int = ITEMS) -> Course:
    """Plain SGD; ``loss(logits [items, classes + 1], labels)``."""
    generator = torch.Generator().manual_seed(0)
    centres = 4 * F.normalize(torch.randn(CLASSES, INPUTS, generator=generator), dim=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = nn.Linear(INPUTS, CLASSES + 1)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=RATE, momentum=0.9)
    features, labels = regions(torch.Generator().manual_seed(1), centres, items)
    relevance = labels.unsqueeze(1) == torch.arange(CLASSES)
    course = Course()
    for step in range(steps + 1):
        if step % _LOOK == 0:
            with torch.no_grad():
                found = metrics.mean_average_precision(classifier(features)[:, :CLASSES], relevance)
            course.precision.append((step, 100 * float(found)))
        batch, wanted = regions(generator, centres, items)
        optimizer.zero_grad()
        loss(classifier(batch), wanted).backward()
        assert classifier.weight.grad is not None
        course.gradient.append((step, float(classifier.weight.grad.norm())))
        optimizer.step()
    return course


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """By the name in the figure."""

    def ranking(form: str) -> Callable[[Tensor, Tensor], Tensor]:
        module = ClassRankingLoss(form=form, memory=3)
        return lambda logits, labels: module(logits[:, :CLASSES], labels.unsqueeze(1) == torch.arange(CLASSES))

    return {
        "AP": ranking("ap"),
        "AP, log form": ranking("log_ap"),
        "recall, log": ranking("log"),
        "cross entropy": F.cross_entropy,
    }


def draw(sources: Sources) -> list[Drawing]:
    """Curves of mAP and of the gradient."""
    sources.tell("training four linear classifiers, some ten seconds")
    looks = dict(zip(losses(), (style.RED, style.BLUE, style.SKY, style.BLACK), strict=True))
    with style.applied():
        figure = style.sheet(7.6, 3.3)
        left, right = figure.subplots(1, 2)
        ends = {}
        for name, loss in losses().items():
            course = train(loss)
            dash = "--" if name == "cross entropy" else "-"
            left.plot(*zip(*course.precision, strict=True), color=looks[name], ls=dash)
            right.plot(*zip(*course.gradient, strict=True), color=looks[name], ls=dash, label=name)
            ends[name] = course.precision[-1][1]
        style.letter(left, "mAP on new regions, %")
        style.letter(right, "norm of the gradient")
        left.set_ylim(0, 100)
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.set_xlim(0, STEPS)
            axes.set_xticks(range(0, STEPS + 1, 50))
            axes.grid(True, axis="y")
        right.set_yscale("log")
        for (name, height), place in zip(ends.items(), style.apart(list(ends.values()), 6, 2, 98), strict=True):
            left.text(STEPS * 1.02, place, f"{name} {height:.0f}", color=looks[name], va="center", fontsize=8)
    return [Drawing("cold-start", figure, CAPTION)]
