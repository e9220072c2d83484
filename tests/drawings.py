"""Checks of a figure: its size, that no texts overlap, and that it looks like the stored one."""

import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rankgrad.lab.figures import (
    sorters,
    style,
)
from rankgrad.lab.figures.drawing import FigureInputs
from rankgrad.surrogates import sodeep

REFERENCE = Path(__file__).parent / "lab" / "figures_reference.json"


def quiet(**given):
    told = []
    return FigureInputs(tell=told.append, **given), told


def use_untrained_sorter(monkeypatch):
    """A smaller sorter; its ranks are about the mean rank."""
    torch.manual_seed(0)
    network = sodeep.LSTMSorter(sorters.LENGTH, hidden=4).requires_grad_(False)
    monkeypatch.setattr(sorters, "sorter", lambda: network)


def pixels(figure):
    """The drawn image, ``[height, width]`` in grey, 0 to 1."""
    file = io.BytesIO()
    with style.applied():
        figure.savefig(file, format="png", dpi=style.DPI)
    return np.asarray(Image.open(file).convert("L"), dtype=float) / 255


def size(figure):
    """Height and width in pixels that the sheet was made with."""
    width, height = figure.get_size_inches()
    return round(height * style.DPI), round(width * style.DPI)


def assert_texts_apart(figure):
    """No two texts of a drawn figure touch, and none is cut off."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with style.applied():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    beyond = set()  # labels of ticks outside of the view, and of axes that are off
    for axes in figure.axes:
        for axis in axes._axis_map.values():
            beyond |= {id(text) for text in axis.findobj(Text)}
            if axes.axison:
                beyond -= {id(tick.label1) for tick in axis._update_ticks()} | {
                    id(axis.label),
                    id(axis.offsetText),
                }
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond
    ]
    assert boxes
    for told, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, (
            told
        )
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), (one, other)


def assert_looks_like(figure, name):
    """The image in 24 x 24 grey fields against the stored one; RANKGRAD_WRITE_REFERENCE=1 stores it anew."""
    image = pixels(figure)
    rows, columns = (np.linspace(0, length, 25).astype(int)[:-1] for length in image.shape)
    fields = np.add.reduceat(np.add.reduceat(image, rows, 0), columns, 1)
    fields /= np.outer(np.diff([*rows, image.shape[0]]), np.diff([*columns, image.shape[1]]))
    stored = json.loads(REFERENCE.read_text()) if REFERENCE.is_file() else {}
    if os.environ.get("RANKGRAD_WRITE_REFERENCE"):
        stored[name] = np.round(100 * fields).astype(int).tolist()
        REFERENCE.write_text(json.dumps(stored) + "\n")
    assert np.abs(fields - np.array(stored[name]) / 100).mean() < 0.01
