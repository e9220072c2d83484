"""A plain multi-label classifier trained for mAP: images of several digits, which digits are there?

    python examples/multi_label.py

Four of scikit-learn's digits side by side; a class is relevant to an image if its digit is among the four.
`rankgrad.ClassRankingLoss` takes the logits as they are and starts from random weights.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

import rankgrad


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[count, 4 * 64]`` of four digits, and which digits they show ``[count, 10]``."""
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(digits.target), (count, 4), generator=generator)
    images = torch.tensor(digits.data, dtype=torch.float32)[chosen].flatten(1) / 16
    shown = torch.nn.functional.one_hot(torch.tensor(digits.target)[chosen], 10).amax(1).bool()
    return images, shown


def train(steps: int = 300, seed: int = 0) -> tuple[float, float]:
    """mAP on unseen images before and after training, in percent."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    loss = rankgrad.ClassRankingLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, shown = draw(4096, seed=1)
    test_images, test_shown = draw(1024, seed=2)

    def measured() -> float:
        with torch.no_grad():
            return 100 * float(rankgrad.metrics.mean_average_precision(model(test_images), test_shown))

    before = measured()
    for _ in range(steps):
        rows = torch.randint(0, len(images), (256,))
        optimizer.zero_grad()
        loss(model(images[rows]), shown[rows]).backward()
        optimizer.step()
    return before, measured()


if __name__ == "__main__":
    print("mAP {:.1f} before, {:.1f} after".format(*train()))
