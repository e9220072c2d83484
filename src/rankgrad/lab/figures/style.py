"""How every figure looks, and how it is saved: the same on paper and on a screen, and to the byte each time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from rankgrad.lab.training.checkpoint import write_bytes

#: Okabe and Ito's colours, told apart with any colour vision, and on grey paper by their lightness.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, BLACK, GREY = "#56B4E9", "#D55E00", "#1A1A1A", "#7A7A7A"
RELEVANT, IRRELEVANT = BLUE, ORANGE
FAINT = "#DDDDDD"
#: For surfaces: perceptually even, readable in grey.
SURFACE = "viridis"
DPI = 200

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "rankgrad",  # the same file each time
}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Draw inside this: nothing of the caller's matplotlib is changed."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def sheet(width: float, height: float) -> Figure:
    """An empty figure, in inches, without pyplot: no window, no global state."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg``, each whole or not at all."""
    written = []
    with applied():
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
            written.append(folder / f"{name}.{kind}")
            write_bytes(written[-1], file.getvalue())
    return written


def colours(values: np.ndarray, norm: Normalize) -> np.ndarray:
    """RGBA of values, ``[..., 4]``."""
    return np.asarray(matplotlib.colormaps[SURFACE](norm(values)))


def letter(axes: Axes, text: str) -> None:
    """A panel's title at its left edge."""
    axes.set_title(text, loc="left")
