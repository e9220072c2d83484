"""scikit-learn's digits as images: embedded, nothing to download."""

from __future__ import annotations

import torch

from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.splits import Items, RetrievalSplits
from rankgrad.lab.training.errors import UserError


def read(config: Data) -> RetrievalSplits:
    """Every other image of each digit trains, the rest tests: ten classes are too few to keep some apart."""
    if config.root is not None:
        raise UserError(f"--data: the digits need no folder, received {config.root!r}; your own: data=folder")
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = (torch.tensor(data.images) * (255 / 16)).round().to(torch.uint8)
    labels = torch.tensor(data.target, dtype=torch.int64)
    sources = list(pixels.unsqueeze(-1).expand(-1, -1, -1, 3))
    names = [f"{label} ({i})" for i, label in enumerate(labels.tolist())]
    images = Items(sources, labels, None, names, [str(digit) for digit in range(10)])
    order = labels.argsort(stable=True)
    return RetrievalSplits(images.take(order[::2]), images.take(order[1::2]))
