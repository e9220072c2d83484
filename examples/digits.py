"""Train a linear embedding of scikit-learn's digits for recall and print R@1 before and after.

    python examples/digits.py

The embedding has 4 dimensions, so that there is something to learn, and is judged on images it never saw.
"""

import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import rankgrad


def recall_at_1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose nearest other image shows the same digit."""
    with torch.no_grad():
        pairs = rankgrad.retrieval_pairs(model(images), labels)
        return rankgrad.metrics.recall_at_k(*pairs[:2], k=1, mask=pairs.mask).item()


def train(epochs: int = 15, batch: int = 128, seed: int = 0) -> tuple[float, float]:
    """R@1 on held-out images before and after training."""
    torch.manual_seed(seed)
    data, target = load_digits(return_X_y=True)
    split = train_test_split(data, target, test_size=0.5, random_state=seed, stratify=target)
    images, test_images = (torch.tensor(part, dtype=torch.float32) / 16 for part in split[:2])
    labels, test_labels = (torch.tensor(part) for part in split[2:])

    model = nn.Linear(64, 4)
    loss = rankgrad.RecallLoss(lam=4.0, margin=0.1, weight="log", memory=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = recall_at_1(model, test_images, test_labels)
    print(f"epoch  0: R@1 {before:.3f} on {len(test_labels)} held-out images")
    for epoch in range(1, epochs + 1):
        total, batches = 0.0, torch.randperm(len(labels)).split(batch)
        for index in batches:
            optimizer.zero_grad()
            value = loss(model(images[index]), labels[index], items=index)  # not its own copy in memory
            value.backward()
            optimizer.step()
            total += value.item()
        if epoch % 5 == 0:
            now = recall_at_1(model, test_images, test_labels)
            print(f"epoch {epoch:2d}: R@1 {now:.3f}, loss {total / len(batches):.3f}")
    return before, recall_at_1(model, test_images, test_labels)


if __name__ == "__main__":
    start = time.perf_counter()
    before, after = train()
    print(f"R@1 {before:.3f} -> {after:.3f} in {time.perf_counter() - start:.1f} s")
