"""A trained detector, to be used: from image files to boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from rankgrad.lab.detection.config import Config
from rankgrad.lab.detection.scenes import Objects, Scenes
from rankgrad.lab.detection.task import Detections, SceneSource, detect
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Trained
from rankgrad.lab.vision.decoding import size_of
from rankgrad.lab.vision.folders import image_files


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
        self, images: Sequence[str | Path], *, progress: Callable[[int], None] = lambda done: None
    ) -> Detections:
        """For each image ``boxes [N, 4]`` (left, top, right, bottom in its pixels), ``scores`` and ``labels``."""
        paths = image_files(images)
        view = self.config.view
        source = SceneSource(_unlabelled(paths), self.config.data, view.longest(), self.device, lambda done: None)
        if source.faults:
            raise UserError(f"IMAGES: {'; '.join(source.faults[:5])}")
        found = detect(self.network, source, self.config, progress)[self.config.scoring()]  # type: ignore[arg-type]
        for one, path, (height, width) in zip(found, paths, source.shapes.tolist(), strict=True):
            wide, high = size_of(path)  # large images are reduced while they are read
            one["boxes"] = one["boxes"] * torch.tensor([wide / width, high / height] * 2)
        return found


def _unlabelled(paths: list[Path]) -> Scenes:
    """Images without annotations."""
    nothing = Objects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
    return Scenes(
        paths, [str(path) for path in paths], [nothing] * len(paths), [(math.inf, math.inf)] * len(paths)
    )
