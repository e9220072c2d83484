"""What each method's gradient does to one list of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from rankgrad.lab.figures import sorters, style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.losses import average_precision_loss, recall_loss
from rankgrad.surrogates import (
    chen2019_loss,
    fastap_loss,
    permutahedron_loss,
    smoothap_loss,
    sodeep_loss,
    yue2007_loss,
)

#: A list of cosines as in training: one relevant item near the top, two in the middle, one at the bottom.
RELEVANT = (0.78, 0.47, 0.335, -0.22)
IRRELEVANT = (0.86, 0.69, 0.60, 0.54, 0.505, 0.44, 0.40, 0.365, 0.29, 0.23, 0.17, 0.10, 0.03, -0.07, -0.14, -0.30)
LAM, BINS, TEMPERATURE, DELTA, EPSILON = 1.5, 10, 0.01, 0.1, 0.05

#: A push below this share of its row's largest is drawn as none.
_NOTHING = 0.01

CAPTION = """One list of 20 scores, one step of gradient descent, ten losses. Each arrow stands at its item's
score: up means that the item is pushed up the ranking, down that it is pushed down. Lengths are relative to the
largest push of the row; a dot is an item with no gradient, or one below 1 % of that. Blue items are relevant,
orange ones not. What to see: our losses push down exactly the irrelevant items within the reach of each relevant
item (its blue band). The form of the loss decides how far that is for the
relevant item at the bottom (left). A narrow sigmoid gives a gradient to neighbours only; a wide one and FastAP
give most to the item that is nearly first. The error-driven rule and the structured hinge weigh every wrong
pair, however far apart. The trained sorter also pushes some irrelevant items up."""


@dataclass(frozen=True)
class GradientRow:
    """A method: its name and setting, what to see, its loss, and its reach at each score."""

    name: str
    setting: str
    words: str
    loss: Callable[[Tensor, Tensor], Tensor]
    ruler: Callable[[Axes, Tensor, Tensor], None] | None = None


def the_list() -> tuple[Tensor, Tensor]:
    """Scores, best first, and relevance, ``[20]``."""
    scores, order = torch.tensor([*RELEVANT, *IRRELEVANT]).sort(descending=True)
    return scores, order < len(RELEVANT)


def push(loss: Callable[[Tensor, Tensor], Tensor], scores: Tensor, relevance: Tensor) -> Tensor:
    """Where gradient descent moves each score, the largest move 1."""
    leaf = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, relevance), leaf)
    largest = gradient.abs().max()
    return -gradient / largest.where(largest > 0, 1)


def rows() -> list[GradientRow]:
    """From our losses to the furthest from them."""

    def reach(slope: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Axes, Tensor, Tensor], None]:
        return lambda axes, scores, relevance: _bars(axes, scores, relevance, slope)

    ours = f"$\\lambda$ = {LAM:g}"
    return [
        GradientRow(
            "rankgrad: AP",
            ours,
            "near misses first,\nthe last item a little",
            partial(average_precision_loss, lam=LAM),
            reach(lambda own, rank: own / rank**2),
        ),
        GradientRow(
            "rankgrad: AP, log form",
            ours,
            "the last item reaches\nfurther",
            partial(average_precision_loss, lam=LAM, log=True),
            reach(lambda own, rank: 1 / rank),
        ),
        GradientRow(
            "rankgrad: recall, log",
            ours,
            "further still",
            partial(recall_loss, lam=LAM, weight="log"),
            reach(lambda own, rank: 1 / (1 + rank - own)),
        ),
        GradientRow(
            "Smooth-AP",
            f"$\\tau$ = {TEMPERATURE:g}",
            "neighbours only",
            partial(smoothap_loss, temperature=TEMPERATURE),
        ),
        GradientRow(
            "Smooth-AP, wide",
            f"$\\tau$ = {10 * TEMPERATURE:g}",
            "most for the item\nthat is nearly first",
            partial(smoothap_loss, temperature=10 * TEMPERATURE),
        ),
        GradientRow(
            "FastAP",
            f"{BINS} bins (lines)",
            "where the edges lie\ndecides",
            partial(fastap_loss, bins=BINS),
            _edges,
        ),
        GradientRow(
            "permutahedron",
            f"$\\epsilon$ = {EPSILON:g}",
            "a pool of neighbours,\nnothing outside",
            partial(permutahedron_loss, epsilon=EPSILON),
        ),
        GradientRow(
            "Chen et al. 2019",
            f"$\\delta$ = {DELTA:g}",
            "every wrong pair,\nhowever far apart",
            partial(chen2019_loss, delta=DELTA),
        ),
        GradientRow("SVM-MAP", "Yue 2007, Mohapatra 2018", "most for the item\nat the bottom", yue2007_loss),
        GradientRow(
            "SoDeep",
            "LSTM for 20 items",
            "some irrelevant items\nare pushed up",
            partial(sodeep_loss, sorter=sorters.sorter()),
        ),
    ]


def _bars(axes: Axes, scores: Tensor, relevance: Tensor, slope: Callable[[Tensor, Tensor], Tensor]) -> None:
    """From each relevant score to where Algorithm 1 moves it before it ranks again."""
    rank = 1.0 + relevance.nonzero().flatten()
    own = torch.arange(1.0, len(rank) + 1)
    step = LAM * len(scores) * slope(own, rank) / len(rank)
    for start, length in zip(scores[relevance].tolist(), step.tolist(), strict=True):
        axes.add_patch(Rectangle((start, -0.13), length, 0.26, color=style.RELEVANT, alpha=0.18, lw=0, zorder=1))


def _edges(axes: Axes, scores: Tensor, relevance: Tensor) -> None:
    for edge in range(BINS + 1):
        axes.axvline(2 * edge / BINS - 1, 0.1, 0.9, color=style.FAINT, lw=0.8, zorder=0)


def draw(inputs: FigureInputs) -> list[Drawing]:
    """One row a method."""
    scores, relevance = the_list()
    table = rows()
    with style.applied():
        figure = style.sheet(9.4, 0.74 * len(table) + 0.9)
        grid = figure.subplots(len(table), 1, sharex=True)
        for axes, row in zip(grid, table, strict=True):
            _row(axes, row, scores, relevance)
        grid[-1].spines["bottom"].set_visible(True)
        grid[-1].tick_params(bottom=True, labelbottom=True)
        grid[-1].set_xlabel("score")
        _legend(figure)
    return [Drawing("gradients", figure, CAPTION)]


def _row(axes: Axes, row: GradientRow, scores: Tensor, relevance: Tensor) -> None:
    axes.axhline(0, color="#BBBBBB", lw=0.7, zorder=1)
    if row.ruler is not None:
        row.ruler(axes, scores, relevance)
    moves = push(row.loss, scores, relevance).tolist()
    for score, move, relevant in zip(scores.tolist(), moves, relevance.tolist(), strict=True):
        colour = style.RELEVANT if relevant else style.IRRELEVANT
        if abs(move) < _NOTHING:
            axes.plot(score, 0, "o", color=colour, ms=3.4, mec="white", mew=0.5, zorder=3)
            continue
        axes.vlines(score, 0, move, color=colour, lw=2.4, zorder=3)
        head = 2.6 + 3.0 * abs(move) ** 0.5  # a small push has a small head
        axes.plot(score, move, "^" if move > 0 else "v", color=colour, ms=head, mew=0, zorder=4)
    axes.set_ylim(-1.2, 1.2)
    axes.set_xlim(-0.36, 0.95)
    axes.set_yticks([])
    axes.tick_params(bottom=False, labelbottom=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    left: Any = {"transform": axes.transAxes, "ha": "right", "va": "center"}
    axes.text(-0.02, 0.63, row.name, weight="bold", **left)
    axes.text(-0.02, 0.30, row.setting, fontsize=8, color=style.GREY, **left)
    axes.text(1.02, 0.5, row.words, transform=axes.transAxes, va="center", fontsize=8, linespacing=1.3)


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=style.RELEVANT, marker="^", lw=2.4, label="relevant"),
        Line2D([], [], color=style.IRRELEVANT, marker="v", lw=2.4, label="irrelevant"),
        Line2D([], [], color=style.GREY, marker="o", lw=0, ms=4, label="none, or under 1 %"),
        Rectangle((0, 0), 1, 1, color=style.RELEVANT, alpha=0.18, lw=0, label="reach of our losses"),
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=4)
