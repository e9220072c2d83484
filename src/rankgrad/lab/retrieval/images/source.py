"""Images as a source: decoded once, kept at their working size, cut into batches on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rankgrad.lab.report.page import data_url
from rankgrad.lab.retrieval.images import augment
from rankgrad.lab.retrieval.images.config import Data, View
from rankgrad.lab.retrieval.source import Draw, Source
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.vision.decoding import upright
from rankgrad.lab.vision.images import Store

if TYPE_CHECKING:
    from PIL import Image

_SIDE = 96  # pixels of an image in the report


def decode(source: Path | Image.Image | Tensor, view: View) -> Tensor:
    """An image as ``[H, W, 3]`` uint8 at its working size. The content says the format, not the name."""
    from PIL import Image

    resize = view.resize
    assert resize is not None  # of a view that is complete
    if isinstance(source, Tensor):
        if view.shape == "short" and min(source.shape[:2]) == resize:
            return source
        image = Image.fromarray(source.numpy())
    else:
        # a JPEG far larger than needed is read at a fraction
        enough = (2 * resize, 2 * resize)
        return upright(source, lambda *size: enough, lambda image: _resized(image, resize, view.shape))
    return _resized(image, resize, view.shape)


def _resized(image: Image.Image, resize: int, shape: str) -> Tensor:
    from PIL.Image import Resampling

    width, height = image.size
    if shape == "square":
        size = (resize, resize)
    else:
        scale = resize / min(width, height)
        size = (max(resize, round(width * scale)), max(resize, round(height * scale)))
    if image.size != size:
        image = image.resize(size, Resampling.BILINEAR)
    return torch.from_numpy(np.array(image))


class ImageSource(Source):
    """The images of a split, as crops ``[B, 3, crop, crop]``.

    Args:
        items: What to read.
        config: Cache and threads.
        view: Working size, crop, mean and standard deviation: nothing left out.
        device: Where batches are made.
        progress: Called with the number of images read so far.
    """

    def __init__(
        self,
        items: Items,
        config: Data,
        view: View,
        device: torch.device,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.store = Store(
            items.sources,
            items.names,
            lambda source: decode(source, view),
            cache=config.cache,
            workers=config.workers,
            device=device,
            progress=progress,
        )
        super().__init__(items.take(self.store.kept) if self.store.faults else items, device)
        self.view = view

    def take(self, rows: Tensor) -> ImageSource:
        """Some of the images, which are not read again."""
        part = copy.copy(self)
        part.items, part.store = self.items.take(rows), self.store.take(rows)
        return part

    def inputs(self, rows: Tensor, following: Tensor | None = None, draw: Draw | None = None) -> Tensor:
        """Random crops for training, else the centre."""
        images = self.store.fetch(rows, following)
        view = self.view
        assert view.crop is not None
        if draw is None:
            boxes = augment.centre_boxes(images.height, images.width, view.crop)
            return augment.crops(images, boxes, None, view, view.test_crop)
        boxes, flips = self._boxes(images.height, images.width, draw)
        return augment.crops(images, boxes, flips, view)

    def _boxes(self, height: Tensor, width: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """This process's part of the boxes of the global batch: the same whatever the number of processes."""
        if draw.total == len(height):
            return augment.training_boxes(height, width, self.view, draw.generator)
        whole = torch.full((2, draw.total), self.view.resize or 0)
        part = slice(draw.first, draw.first + len(height))
        whole[:, part] = torch.stack([height, width])
        boxes, flips = augment.training_boxes(whole[0], whole[1], self.view, draw.generator)
        return boxes[part], flips[part]

    def shown(self, row: int) -> dict[str, str]:
        """A small JPEG as a data URL."""
        from PIL import Image

        image = Image.fromarray(self.store.image(row).cpu().numpy())
        if min(image.size) < _SIDE:
            image = image.resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
        else:
            image.thumbnail((2 * _SIDE, 2 * _SIDE))
        return {"image": data_url(image)}
