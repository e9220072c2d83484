"""Whether images are drawings in black and white: characters, symbols, text. Mirrored they are something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rankgrad.lab.vision.decoding import upright

if TYPE_CHECKING:
    from PIL import Image

#: Values that count as black and as white, the share of pixels that have one (MNIST: 0.92 in the mean, 0.86 at
#: least; grey photographs of faces: 0.03), and the mean difference of the channels up to which an image is grey.
_BLACK, _WHITE, _SHARE, _COLOUR = 25, 230, 0.8, 3
#: Of the images.
_MOST = 0.9


def are_drawings(paths: Sequence[Path]) -> bool:
    """Whether nearly all of some images are drawings in black and white; broken files do not count."""
    found = []
    for path in paths:
        try:
            found.append(upright(path, lambda *size: size, _is_drawing))
        except Exception:  # broken, which is reported where all images are read
            continue
    return bool(found) and sum(found) >= _MOST * len(found)


def _is_drawing(image: Image.Image) -> bool:
    pixels = np.asarray(image).astype(np.int16)
    lowest, highest = pixels.min(2), pixels.max(2)
    two_tones = (highest <= _BLACK) | (lowest >= _WHITE)
    return bool((highest - lowest).mean() <= _COLOUR and two_tones.mean() >= _SHARE)
