"""Queries of a run and their nearest images, right and wrong marked."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.lab.retrieval.report import Examples
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.run_files import read_json

_ROWS, _NEAREST = 4, 8

CAPTION = """Queries (left, grey frame) of {run} and their nearest test images, most similar first. A blue
frame with a tick is right, the query's class; an orange frame with a cross is wrong; the number is the cosine
similarity. Upper rows: queries drawn at random. Lower rows: the queries with the worst average precision, which
show wrong labels and classes the embedding cannot separate."""


def draw(inputs: FigureInputs) -> list[Drawing]:
    """From ``--run``, or from the digits recipe, trained for it in seconds."""
    if inputs.run is not None:
        examples, name = read(inputs.run), f"the run {inputs.run.name!r}"
    else:
        from rankgrad.lab.recipes import run

        inputs.tell("no --run: training the recipe digits, some seconds")
        with tempfile.TemporaryDirectory() as folder:
            run.run("digits", ["device=cpu"], out=str(Path(folder) / "digits"))
            examples, name = read(Path(folder) / "digits"), "the recipe digits"
    rows = [*examples["examples"][:_ROWS], *examples["hardest"][:_ROWS]]
    random = len(examples["examples"][:_ROWS])
    with style.applied():
        figure = style.sheet(0.98 * (_NEAREST + 1) + 0.5, 1.16 * len(rows) + 0.4)
        grid = figure.subplots(len(rows), _NEAREST + 1, squeeze=False)
        for number, (line, example) in enumerate(zip(grid, rows, strict=True)):
            _image(line[0], example["image"], style.GREY, f"first relevant: {example['rank']}")
            for axes, item in zip(line[1:], example["nearest"][:_NEAREST], strict=False):
                mark, colour = ("\u2713", style.RELEVANT) if item["right"] else ("\u2717", style.IRRELEVANT)
                _image(axes, item["image"], colour, f"{mark} {item['score']:.2f}")
            for axes in line[1 + len(example["nearest"]) :]:
                axes.set_axis_off()
            if number in (0, random):
                line[0].set_title("the hardest" if number else "query", loc="left")
            if number == 0:
                line[1].set_title("nearest images", loc="left")
    return [Drawing("retrieval-examples", figure, CAPTION.format(run=name))]


def read(run: Path) -> Examples:
    """The examples a run of images keeps."""
    file = run / "examples.json"
    if not file.is_file():
        raise UserError(f"--run: no examples.json in {str(run)!r}; a finished run of `rankgrad train` has one")
    found: Examples = read_json(file, Examples)
    queries = [*found["examples"], *found["hardest"]]
    if any("image" not in one for query in queries for one in (query, *query["nearest"])):
        raise UserError(f"--run: expected a run of images, some items in {str(file)!r} have none")
    return found


def _image(axes: Axes, url: str, colour: str, text: str) -> None:
    from PIL import Image

    try:
        content = io.BytesIO(base64.b64decode(url.partition(",")[2]))
        pixels = Image.open(content, formats=["JPEG", "PNG"]).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"--run: an image in examples.json is broken ({error})") from None
    side = min(pixels.size)
    left, top = (pixels.width - side) // 2, (pixels.height - side) // 2
    square = pixels.crop((left, top, left + side, top + side)).resize((192, 192))
    axes.imshow(np.asarray(square))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(text, fontsize=7.5, labelpad=2)
    for edge in axes.spines.values():
        edge.set_visible(True)
        edge.set_edgecolor(colour)
        edge.set_linewidth(2.6)
