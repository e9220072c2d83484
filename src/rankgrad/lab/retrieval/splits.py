"""What a reader of data returns: items with labels, to train on and to test on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rankgrad.lab.training.errors import UserError

#: Fewer classes than this cannot be split into two to train on and two to test on.
FEW = 4


@dataclass(frozen=True)
class Items:
    """Images, texts or table rows of one split.

    Args:
        sources: Where each comes from: a file, the image itself (of Pillow's, or ``[H, W, 3]`` uint8), a text.
        labels: ``[N]`` integers.
        super_labels: ``[N]`` integers, where the data set has them.
        names: What to call each item in messages and reports.
        class_names: What to call label 0, 1, ...; empty: its number.
    """

    sources: Sequence[Any]
    labels: Tensor
    super_labels: Tensor | None
    names: Sequence[str]
    class_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: Tensor) -> Items:
        """Some of the items."""
        kept = rows.tolist()
        return Items(
            [self.sources[i] for i in kept],
            self.labels[rows],
            None if self.super_labels is None else self.super_labels[rows],
            [self.names[i] for i in kept],
            self.class_names,
        )

    def renumbered(self) -> Items:
        """The same with labels 0, 1, ..., none left out."""
        classes, labels = self.labels.unique(return_inverse=True)
        names = [self.class_names[label] for label in classes.tolist()] if self.class_names else ()
        return replace(self, labels=labels, class_names=names)

    def digest(self) -> bytes:
        """What tells these items from others: their names, their classes and the order."""
        classes = self.renumbered()
        found = hashlib.sha256(classes.labels.numpy().tobytes())
        for name in (*self.names, *classes.class_names):
            found.update(f"{len(name)} {name}".encode("utf-8", "surrogatepass"))
        return found.digest()

    def class_name(self, row: int) -> str:
        """What to call the class of an item."""
        label = int(self.labels[row])
        return self.class_names[label] if self.class_names else str(label)

    def classes(self) -> int:
        """How many classes there are."""
        return int(self.labels.unique().numel())

    def alone(self) -> list[int]:
        """The labels that only one item has."""
        labels, counts = self.labels.unique(return_counts=True)
        found: list[int] = labels[counts == 1].tolist()
        return found


@dataclass(frozen=True)
class RetrievalSplits:
    """Training items, the queries, and the gallery they search; None: they search each other. A note."""

    train: Items
    query: Items
    gallery: Items | None = None
    note: str = field(default="", kw_only=True)


def held_out(splits: RetrievalSplits, part: float, seed: int) -> RetrievalSplits:
    """Choose settings without the test classes: train on some training classes, test on the others."""
    inside, outside = by_classes(splits.train.labels, part, seed)
    return RetrievalSplits(splits.train.take(inside), splits.train.take(outside), note=splits.note)


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


def kept_apart(labels: Tensor, test_share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train and to test on: whole classes, or where there are too few, every other item of each class."""
    return by_items(labels) if few_classes(labels, test_share) else by_classes(labels, test_share, seed)


def few_classes(labels: Tensor, test_share: float) -> bool:
    """Whether there are too few classes to train on some and test on the others."""
    return test_share < 1 and 1 < int(labels.unique().numel()) < FEW


def by_items(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to train and to test on: every other item of each class."""
    order = labels.argsort(stable=True)
    return order[::2].sort().values, order[1::2].sort().values


def numbered(texts: Sequence[str]) -> tuple[Tensor, list[str]]:
    """0, 1, 2, ... for equal texts, in sorted order; and the texts in that order."""
    names = sorted(set(texts))
    order = {text: i for i, text in enumerate(names)}
    return torch.tensor([order[text] for text in texts], dtype=torch.int64), names
