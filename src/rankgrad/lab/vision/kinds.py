"""What kind of images a folder has, judged by some of them: how large they are, and whether they are drawings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rankgrad.lab.vision.decoding import size_of, upright

if TYPE_CHECKING:
    from PIL import Image

#: Values that count as black and as white, the share of pixels that have one (MNIST: 0.92 in the mean, 0.86 at
#: least; grey photographs of faces: 0.03), and the mean difference of the channels up to which an image is grey.
_BLACK, _WHITE, _SHARE, _COLOUR = 25, 230, 0.8, 3
_MOST = 0.9  # of the images
_SMALLEST, _LARGEST = 32, 256  # pixels
T = TypeVar("T")


def working_size(paths: Sequence[Path]) -> int | None:
    """The short side to bring images to: their median, from 32 to 256 pixels; None if none can be read."""
    found = _of_each(paths, lambda path: min(size_of(path)))
    return min(max(round(statistics.median(found)), _SMALLEST), _LARGEST) if found else None


def are_drawings(paths: Sequence[Path]) -> bool:
    """Whether nearly all images are drawings in black and white: characters, symbols, text.

    Mirrored they are something else.
    """
    found = _of_each(paths, lambda path: upright(path, lambda *size: size, _is_drawing))
    return bool(found) and sum(found) >= _MOST * len(found)


def _of_each(paths: Sequence[Path], look: Callable[[Path], T]) -> list[T]:
    """What is seen in each file; broken ones are left out, and reported where all images are read."""
    found = []
    for path in paths:
        with suppress(Exception):  # Pillow raises many kinds
            found.append(look(path))
    return found


def _is_drawing(image: Image.Image) -> bool:
    pixels = np.asarray(image).astype(np.int16)
    lowest, highest = pixels.min(2), pixels.max(2)
    two_tones = (highest <= _BLACK) | (lowest >= _WHITE)
    return bool((highest - lowest).mean() <= _COLOUR and two_tones.mean() >= _SHARE)
