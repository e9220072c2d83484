"""A trained detector, to be used: from image files to boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankgrad.lab.detection.config import Config
from rankgrad.lab.detection.scenes import Objects, Scenes
from rankgrad.lab.detection.task import Detections, SceneSource, detect
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Trained
from rankgrad.lab.vision.decoding import size_of
from rankgrad.lab.vision.folders import given_images
from rankgrad.lab.vision.images import listed

if TYPE_CHECKING:
    from rankgrad.lab.vision.folders import Given

_AT_ONCE = 512  # images that are decoded, and in memory, at a time


class TrainedDetector(Trained):
    """Image files to boxes.

    Args:
        config: The settings of the run.
        network: With the weights of a checkpoint.
        device: Where it is.
        classes: Their names; label 1 is the first.
    """

    def __init__(self, config: Config, network: nn.Module, device: torch.device, classes: tuple[str, ...]) -> None:
        super().__init__(config, network, device)
        self.classes = classes

    def detect(
        self, images: Given | Sequence[Given], *, progress: Callable[[int], None] = lambda done: None
    ) -> Detections:
        """For each image ``boxes [N, 4]`` (left, top, right, bottom in its pixels), ``scores`` and ``labels``.

        Images are files, or images of Pillow's. One that cannot be read is an error; see :meth:`detect_readable`.
        """
        return self._detect(images, progress, skip=False)[0]

    def detect_readable(
        self, images: Given | Sequence[Given], *, progress: Callable[[int], None] = lambda done: None
    ) -> tuple[Detections, list[int], list[str]]:
        """The same for the images that can be read, their rows in ``images``, and the faults of the others."""
        return self._detect(images, progress, skip=True)

    def _detect(
        self, images: Given | Sequence[Given], progress: Callable[[int], None], *, skip: bool
    ) -> tuple[Detections, list[int], list[str]]:
        sources, names = given_images(images)
        found: Detections = []
        rows: list[int] = []
        faults: list[str] = []
        for done in range(0, len(sources), _AT_ONCE):
            scenes = _unlabelled(sources[done : done + _AT_ONCE], names[done : done + _AT_ONCE])
            source = SceneSource(
                scenes, self.config.data, self.config.view.longest(), self.device, lambda count: None
            )
            faults += source.faults
            if not len(source.scenes) or (faults and not skip):
                continue
            network: Any = self.network
            some = detect(network, source, self.config, _after(done, progress))[self.config.scoring()]
            for one, image, (height, width) in zip(
                some, source.scenes.sources, source.shapes.tolist(), strict=True
            ):
                wide, high = size_of(image)  # large images are reduced while they are read
                one["boxes"] = one["boxes"] * torch.tensor([wide / width, high / height] * 2)
            found += some
            rows += [done + row for row in source.kept.tolist()]
        if faults and not (skip and found):
            raise UserError(f"IMAGES: {listed(faults, len(sources))}")
        return found, rows, faults


def _after(before: int, progress: Callable[[int], None]) -> Callable[[int], None]:
    """Progress of a part, counted from the first image of all."""
    return lambda done: progress(before + done)


def _unlabelled(images: list[Any], names: list[str]) -> Scenes:
    """Images without annotations."""
    nothing = Objects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
    return Scenes(images, names, [nothing] * len(images), [(math.inf, math.inf)] * len(images))
