"""What a reader returns: images with classes, for training and for testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rankgrad.lab.training.errors import UserError


@dataclass(frozen=True)
class Images:
    """Images of one split.

    Args:
        sources: A file each, or the decoded image itself (``[H, W, 3]`` uint8).
        labels: ``[N]`` integers.
        super_labels: ``[N]`` integers, where the data set has them.
        names: What to call each image in messages and reports.
    """

    sources: Sequence[Path | Tensor]
    labels: Tensor
    super_labels: Tensor | None
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: Tensor) -> Images:
        """Some of the images."""
        kept = rows.tolist()
        return Images(
            [self.sources[i] for i in kept],
            self.labels[rows],
            None if self.super_labels is None else self.super_labels[rows],
            [self.names[i] for i in kept],
        )

    def classes(self) -> int:
        """How many classes there are."""
        return int(self.labels.unique().numel())


@dataclass(frozen=True)
class ImageSplits:
    """Training images, the queries, and the gallery they search; None: they search each other."""

    train: Images
    query: Images
    gallery: Images | None = None


def held_out(splits: ImageSplits, part: float, seed: int) -> ImageSplits:
    """Choose settings without the test classes: train on some training classes, test on the others."""
    inside, outside = by_classes(splits.train.labels, part, seed)
    return ImageSplits(splits.train.take(inside), splits.train.take(outside))


def by_classes(labels: Tensor, test_share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train and to test on, no class in both; at least one class on each side, unless all are to test."""
    if test_share == 1:
        return torch.arange(0), torch.arange(len(labels))
    classes = labels.unique()
    if len(classes) < 2:
        raise UserError(f"data: expected at least 2 classes to split, received {len(classes)}")
    shuffled = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    many = min(max(round(test_share * len(classes)), 1), len(classes) - 1)
    testing = torch.isin(labels, shuffled[:many])
    return (~testing).nonzero().flatten(), testing.nonzero().flatten()


def numbered(texts: Sequence[str]) -> Tensor:
    """0, 1, 2, ... for equal texts, in sorted order."""
    order = {text: i for i, text in enumerate(sorted(set(texts)))}
    return torch.tensor([order[text] for text in texts], dtype=torch.int64)
