"""Scores of relevant and irrelevant pairs during training, without a margin (collapse) and with one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from rankgrad import metrics
from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.losses import RecallLoss
from rankgrad.pairs import retrieval_pairs

MARGIN = 0.1
STEPS = (0, 30, 100, 1000)
_BATCH = 100

CAPTION = """Cosine similarities of held-out pairs of digits while a small network is trained with the recall
loss, without a margin (top) and with a margin of {margin:g} (bottom); same network, same batches. Blue: pairs
of one digit, orange: pairs of different digits; each histogram is scaled to its own peak. What to see: without
a margin the loss is 0 as soon as the order is right by the slightest difference, and all similarities converge
to 1: after {steps:,} steps the irrelevant ones have a standard deviation of {spread:.4f}. The order
then depends on the last digits: rounded to bfloat16 AP falls from {exact:.2f} to {rounded:.2f}. With the margin
the scores get a scale, and AP is {better:.2f}, rounded or not."""


@dataclass(frozen=True)
class Moment:
    """Held-out pairs after some steps: scores, and average precision, also of scores rounded to bfloat16."""

    relevant: Tensor
    irrelevant: Tensor
    precision: float
    rounded: float


def train(margin: float, steps: tuple[int, ...] = STEPS, seed: int = 0) -> list[Moment]:
    """Train on every other digit and measure the rest after each of these steps."""
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(target)
    moments = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        loss = RecallLoss(lam=4.0, margin=margin, weight="log")
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for step in range(steps[-1] + 1):
            if step in steps:
                moments.append(_look(network(images[1::2]).detach(), labels[1::2]))
            rows = 2 * torch.randperm(len(labels[::2]))[:_BATCH]
            optimizer.zero_grad()
            loss(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    return moments


def _look(embeddings: Tensor, labels: Tensor) -> Moment:
    scores, relevance, mask = retrieval_pairs(embeddings, labels)
    assert mask is not None
    exact, rounded = (
        float(metrics.average_precision(values, relevance, mask=mask))
        for values in (scores, scores.bfloat16().float())
    )
    return Moment(scores[relevance & mask], scores[~relevance], exact, rounded)


def draw(inputs: FigureInputs) -> list[Drawing]:
    """Two rows of histograms."""
    inputs.tell("training two small networks on digits, some seconds")
    runs = {0.0: train(0.0), MARGIN: train(MARGIN)}
    with style.applied():
        figure = style.sheet(8.4, 3.9)
        grid = figure.subplots(2, len(STEPS), sharex=True, sharey=True)
        for line, (margin, moments) in zip(grid, runs.items(), strict=True):
            for axes, moment in zip(line, moments, strict=True):
                _histograms(axes, moment)
            line[0].set_ylabel(f"margin {margin:g}" if margin else "no margin", weight="bold")
        for axes, step in zip(grid[0], STEPS, strict=True):
            axes.set_title(f"after {step:,} steps" if step else "before training")
        for axes in grid[-1]:
            axes.set_xlabel("cosine similarity")
        grid[0, 0].text(-0.85, 0.66, "same digit", color=style.RELEVANT, weight="bold", fontsize=8)
        grid[0, 0].text(-0.85, 0.54, "different digits", color=style.IRRELEVANT, weight="bold", fontsize=8)
    collapsed, spread = runs[0.0][-1], runs[MARGIN][-1]
    caption = CAPTION.format(
        margin=MARGIN,
        steps=STEPS[-1],
        spread=float(collapsed.irrelevant.std()),
        exact=collapsed.precision,
        rounded=collapsed.rounded,
        better=spread.rounded,
    )
    return [Drawing("margin", figure, caption)]


def _histograms(axes: Axes, moment: Moment) -> None:
    edges = np.linspace(-1, 1, 81)
    for scores, colour in ((moment.irrelevant, style.IRRELEVANT), (moment.relevant, style.RELEVANT)):
        height = np.histogram(scores.clamp(-1, 1).numpy(), edges)[0]
        axes.stairs(height / height.max(), edges, fill=True, color=colour, alpha=0.45)
        axes.stairs(height / height.max(), edges, color=colour, lw=1.0)
    text = f"AP {moment.precision:.2f}\nin bfloat16 {moment.rounded:.2f}"
    axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=8, linespacing=1.3)
    axes.set_yticks([])
    axes.set_ylim(0, 1.35)
    axes.set_xlim(-1, 1.04)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1], ["-1", "", "0", "", "1"])
    axes.spines["left"].set_visible(False)
