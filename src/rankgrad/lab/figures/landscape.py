r"""A rank-based loss over a plane of scores, and what every method makes of it.

20 scores, a loss that is a fixed linear combination of their ranks, :math:`L(y) = g \cdot \mathrm{rank}(y) / n`,
and a fixed two-dimensional plane of the space of scores. The interpolation is drawn by its closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LightSource, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from rankgrad.engine.ranker import exact_ranks
from rankgrad.lab.figures import sorters, style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.surrogates import fastap_rank, permutahedron_rank, smoothap_rank, sodeep_rank

LAMBDAS = (0.2, 0.5, 1.0, 2.0)
BINS = (5, 10, 20, 40)
_POINTS = 141

CAPTION = """One loss, twelve landscapes. The height is a fixed linear combination of the ranks of 20 scores,
over a fixed random plane of scores; all panels share plane and scale. Top left: the loss itself, flat steps
without a slope anywhere. Second row: the interpolation this library differentiates. It is continuous, never lies
above the loss, agrees with it away from the steps when lambda is small, and lambda alone says how far its slopes
reach. The other panels replace the ranks themselves. Few soft bins (third row) are smooth at wrong heights,
many follow the loss with ripples of their own; the trained sorter misses all but the trend; sigmoids and the
permutahedron round the steps, over a width that does not depend on the loss."""

FLAT_CAPTION = """The twelve landscapes as maps over the plane (a, b): the colour is the height, on one scale for
all panels. What to see: the steps of the loss are edges here; the interpolation keeps them for small lambda."""


@dataclass(frozen=True)
class ScorePlane:
    """A plane of scores, ``origin + a * across + b * up``, and the weights of the ranks, each ``[n]``."""

    origin: Tensor
    across: Tensor
    up: Tensor
    weights: Tensor

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        """``[len(b), len(a), n]``: rows go with b (the vertical axis), columns with a (the horizontal one)."""
        return self.origin + a.view(1, -1, 1) * self.across + b.view(-1, 1, 1) * self.up


def random_plane() -> ScorePlane:
    """The plane of the figure: scores of cosine size."""
    generator = torch.Generator().manual_seed(5)
    origin, across, up, weights = torch.randn(4, sorters.LENGTH, generator=generator, dtype=torch.float64)
    return ScorePlane(0.5 * origin, 0.12 * across, 0.12 * up, 0.08 * weights)


def true_values(scores: Tensor, weights: Tensor) -> Tensor:
    """L(y) = g . rank(y) / n, ``[...]`` from ``[..., n]`` scores."""
    return (exact_ranks(scores, None, "ordinal") @ weights) / scores.shape[-1]


def interpolated_values(scores: Tensor, weights: Tensor, lam: float) -> Tensor:
    """The function whose gradient Algorithm 1 gives, for L: its closed form, lambda in the paper's units."""
    n = scores.shape[-1]
    ranks = exact_ranks(scores, None, "ordinal")
    moved = exact_ranks(scores + lam * weights, None, "ordinal")
    return (moved @ weights) / n - (scores * (ranks - moved)).sum(-1) / (n * lam)


def panels(plane: ScorePlane, scores: Tensor) -> dict[str, Tensor]:
    """Title -> values ``[len(b), len(a)]``, row by row of the figure."""
    n = scores.shape[-1]
    reach = float(scores.abs().max())
    network = sorters.sorter()

    def softly(rank: Callable[..., Tensor], **arguments: object) -> Tensor:
        with torch.no_grad():
            return (rank(scores.float(), **arguments).double() @ plane.weights) / n

    found = {
        "true": true_values(scores, plane.weights),
        "SoDeep, LSTM": softly(sodeep_rank, sorter=network),
        "Smooth-AP, $\\tau$ = 0.01": softly(smoothap_rank, temperature=0.01),
        "permutahedron, $\\epsilon$ = 0.03": softly(permutahedron_rank, epsilon=0.03),
    }
    for lam in LAMBDAS:
        found[f"rankgrad, $\\lambda$ = {lam:g}"] = interpolated_values(scores, plane.weights, lam)
    for bins in BINS:
        found[f"FastAP, {bins} bins"] = softly(fastap_rank, bins=bins, score_range=(-reach, reach))
    return found


def draw(inputs: FigureInputs) -> list[Drawing]:
    """Surfaces, and the same values as flat maps."""
    plane = random_plane()
    line = torch.linspace(-1, 1, _POINTS, dtype=torch.float64)
    values = {name: found.numpy() for name, found in panels(plane, plane.scores(line, line)).items()}
    lines = line.numpy()
    return [
        Drawing("landscape", _surfaces(values, lines), CAPTION),
        Drawing("landscape-flat", _maps(values, lines), FLAT_CAPTION),
    ]


def _surfaces(values: dict[str, np.ndarray], line: np.ndarray) -> Figure:
    norm, top = _norm(values), max(found.max() for found in values.values())
    light = LightSource(azdeg=315, altdeg=50)
    with style.applied():
        figure = style.sheet(9.6, 7.0)
        grid = figure.subplots(3, 4, subplot_kw={"projection": "3d"})
        x, y = np.meshgrid(line, line)
        for axes, (name, found) in zip(grid.flat, values.items(), strict=True):
            shades = light.shade_rgb(style.colours(found, norm)[..., :3], found, vert_exag=0.35, blend_mode="soft")
            axes.plot_surface(
                x, y, found, facecolors=shades, rcount=len(line), ccount=len(line), linewidth=0, antialiased=False,
                shade=False, rasterized=True,
            )  # fmt: skip
            axes.set_title(name, y=1.04)
            axes.set_zlim(norm.vmin, top)
            axes.set_box_aspect((1, 1, 0.8), zoom=1.18)
            axes.view_init(elev=32, azim=-128)
            axes.set_axis_off()
    return figure


def _norm(values: dict[str, np.ndarray]) -> Normalize:
    """One scale for all panels: from the lowest of all to the highest value of the loss itself."""
    return Normalize(min(found.min() for found in values.values()), values["true"].max(), clip=True)


def _maps(values: dict[str, np.ndarray], line: np.ndarray) -> Figure:
    norm = _norm(values)
    with style.applied():
        figure = style.sheet(8.8, 7.0)
        grid = figure.subplots(3, 4, sharex=True, sharey=True)
        for axes, (name, found) in zip(grid.flat, values.items(), strict=True):
            _map(axes, found, line, norm)
            axes.set_title(name)
        for axes in grid[-1]:
            axes.set_xlabel("a")
        for axes in grid[:, 0]:
            axes.set_ylabel("b", rotation=0)
        shown = grid[0, 0].images[0]
        bar = figure.colorbar(shown, ax=grid, shrink=0.5, aspect=30, pad=0.015)
        bar.set_label("loss, up to its highest value")
        bar.outline.set_visible(False)
    return figure


def _map(axes: Axes, found: np.ndarray, line: np.ndarray, norm: Normalize) -> None:
    """Rows upwards: the first row of values is the lowest b."""
    ends = (line[0], line[-1], line[0], line[-1])
    axes.imshow(found, origin="lower", extent=ends, norm=norm, cmap=style.SURFACE, interpolation="nearest")
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    for side in axes.spines.values():
        side.set_visible(False)
