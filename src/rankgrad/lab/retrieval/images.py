"""The images of a retrieval split at their working size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rankgrad.lab.retrieval.config import Data, View
from rankgrad.lab.retrieval.data.splits import Images
from rankgrad.lab.vision.images import Store, require_8_bits


def decode(source: Path | Tensor, view: View) -> Tensor:
    """An image as ``[H, W, 3]`` uint8 at its working size. The content says the format, not the name."""
    from PIL import Image, ImageOps

    if isinstance(source, Tensor):
        if view.shape == "short" and min(source.shape[:2]) == view.resize:
            return source
        image = Image.fromarray(source.numpy())
    else:
        with Image.open(source) as file:
            require_8_bits(file)
            # a JPEG far larger than needed is read at a fraction
            file.draft("RGB", (2 * view.resize, 2 * view.resize))
            image = ImageOps.exif_transpose(file).convert("RGB")  # upright, as it is shown
    width, height = image.size
    if view.shape == "square":
        size = (view.resize, view.resize)
    else:
        scale = view.resize / min(width, height)
        size = (max(view.resize, round(width * scale)), max(view.resize, round(height * scale)))
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image))


class ImageSource(Store):
    """The images of a split, ready to be cut into batches on a device.

    Args:
        images: What to read.
        config: Cache and threads.
        view: Working size.
        device: Where batches are made.
        progress: Called with the number of images read so far.
    """

    def __init__(
        self,
        images: Images,
        config: Data,
        view: View,
        device: torch.device,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        super().__init__(
            images.sources,
            images.names,
            lambda source: decode(source, view),
            cache=config.cache,
            workers=config.workers,
            device=device,
            progress=progress,
        )
        self.images = images.take(self.kept) if self.faults else images
