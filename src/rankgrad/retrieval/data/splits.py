"""What a reader returns: pictures with classes, for training and for testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rankgrad.retrieval.config import Data
from rankgrad.training.config import nearest
from rankgrad.training.errors import UserError


@dataclass(frozen=True)
class Pictures:
    """Pictures of one split.

    Args:
        sources: A file each, or the decoded picture itself (``[H, W, 3]`` uint8).
        labels: ``[N]`` integers.
        super_labels: ``[N]`` integers, where the data set has them.
        names: What to call each picture in messages and reports.
    """

    sources: Sequence[Path | Tensor]
    labels: Tensor
    super_labels: Tensor | None
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: Tensor) -> Pictures:
        """Some of the pictures."""
        kept = rows.tolist()
        return Pictures(
            [self.sources[i] for i in kept],
            self.labels[rows],
            None if self.super_labels is None else self.super_labels[rows],
            [self.names[i] for i in kept],
        )

    def classes(self) -> int:
        """How many classes there are."""
        return int(self.labels.unique().numel())


@dataclass(frozen=True)
class Splits:
    """Training pictures, the queries, and the gallery they search; None: they search each other."""

    train: Pictures
    query: Pictures
    gallery: Pictures | None = None


def held_out(splits: Splits, part: float, seed: int) -> Splits:
    """Choose settings without the test classes: train on some training classes, test on the others."""
    inside, outside = by_classes(splits.train.labels, part, seed)
    return Splits(splits.train.take(inside), splits.train.take(outside))


def by_classes(labels: Tensor, test_share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train and to test on, no class in both; at least one class on each side."""
    classes = labels.unique()
    if len(classes) < 2:
        raise UserError(f"data: expected at least 2 classes to split, received {len(classes)}")
    shuffled = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    many = min(max(round(test_share * len(classes)), 1), len(classes) - 1)
    testing = torch.isin(labels, shuffled[:many])
    return (~testing).nonzero().flatten(), testing.nonzero().flatten()


def root_of(config: Data) -> Path:
    """The folder the user points at."""
    if config.root is None:
        raise UserError(f"--data: the data set {config.name!r} needs a folder, say --data DIR")
    root = Path(config.root).expanduser()
    if not root.is_dir():
        beside = [p.name for p in root.parent.iterdir() if p.is_dir()] if root.parent.is_dir() else []
        hint = nearest(root.name, beside) if beside else ""
        raise UserError(f"--data: no such folder {str(root)!r}{hint}")
    return root


def find(root: Path, *places: str) -> Path:
    """The first of some places below the root that exists."""
    for place in places:
        if (root / place).exists():
            return root / place
    raise UserError(f"--data: expected {' or '.join(places)} in {root}, found neither")


def check_counts(config: Data, found: dict[str, int], protocol: dict[str, int]) -> None:
    """Require the sizes of the protocol, unless told not to."""
    wrong = [
        f"{name} {found[name]:,} instead of {wanted:,}"
        for name, wanted in protocol.items()
        if found[name] != wanted
    ]
    if wrong and config.counts == "protocol":
        raise UserError(
            f"--data: {config.name} is not complete: {'; '.join(wrong)}. Results would not compare with published "
            "ones; data.counts=any trains on it all the same."
        )


def numbered(texts: Sequence[str]) -> Tensor:
    """0, 1, 2, ... for equal texts, in sorted order."""
    order = {text: i for i, text in enumerate(sorted(set(texts)))}
    return torch.tensor([order[text] for text in texts], dtype=torch.int64)
