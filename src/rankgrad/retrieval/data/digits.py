"""scikit-learn's digits as pictures: embedded, nothing to download."""

from __future__ import annotations

import torch

from rankgrad.retrieval.config import Data
from rankgrad.retrieval.data.splits import Pictures, Splits
from rankgrad.training.errors import UserError


def read(config: Data) -> Splits:
    """Every other picture of each digit trains, the rest tests: ten classes are too few to keep some apart."""
    if config.root is not None:
        raise UserError(f"--data: the digits need no folder, received {config.root!r}; your own: data=folder")
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (torch.tensor(data.images) * (255 / 16)).round().to(torch.uint8)
    labels = torch.tensor(data.target, dtype=torch.int64)
    sources = list(images.unsqueeze(-1).expand(-1, -1, -1, 3))
    pictures = Pictures(sources, labels, None, [f"{label} ({i})" for i, label in enumerate(labels.tolist())])
    order = labels.argsort(stable=True)
    return Splits(pictures.take(order[::2]), pictures.take(order[1::2]))
