"""Boxes on images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankgrad.lab.report.curves import COLOURS
from rankgrad.lab.training.checkpoint import write_bytes
from rankgrad.lab.vision.decoding import upright

if TYPE_CHECKING:
    from PIL import Image


def names(paths: list[Path]) -> list[str]:
    """A name for each drawn image; of equal names in several folders, the later ones are numbered."""
    names: list[str] = []
    for path in paths:
        name, number = f"{path.stem}.png", 2
        while name in names:
            name, number = f"{path.stem}-{number}.png", number + 1
        names.append(name)
    return names


def draw(path: Path, out: Path, boxes: list[dict[str, Any]], classes: tuple[str, ...]) -> None:
    """The image with its boxes, as PNG; ``boxes`` have a class, a score and corners in pixels."""
    write_bytes(out, upright(path, lambda *size: size, lambda image: _drawn(image, boxes, classes)))


def _drawn(image: Image.Image, boxes: list[dict[str, Any]], classes: tuple[str, ...]) -> bytes:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(image)
    for box in sorted(boxes, key=lambda one: float(one["score"])):  # the most confident on top
        colour = COLOURS[classes.index(box["class"]) % len(COLOURS)]
        left, top, right, bottom = box["box"]
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=2)
        text = f"{box['class']} {box['score']:.2f}"
        place = pen.textbbox((left + 2, max(top - 12, 0)), text)
        pen.rectangle(place, fill=colour)
        pen.text((left + 2, max(top - 12, 0)), text, fill="white")
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
