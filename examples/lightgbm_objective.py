"""LightGBM trained for average precision: our gradient as its objective, beside its own lambdarank.

    python examples/lightgbm_objective.py            (needs lightgbm: pip install 'rankgrad[ranker]')

LightGBM takes from an objective the gradient and the second derivative at each item's score. The gradient is that
of `rankgrad.average_precision_loss` with its automatic reach, summed over queries. A loss of ranks has no second
derivative of its own; |gradient| / window stands for it, so that a leaf moves its items by a share of the window,
and by all of it where they are all to move the same way.
"""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import torch

import rankgrad


def queries(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features ``[items, 8]``, grades 0 to 2 and the number of items of each query."""
    random = np.random.default_rng(seed)
    sizes = random.integers(5, 30, count)
    features = random.normal(size=(int(sizes.sum()), 8))
    useful = features[:, 0] * features[:, 1] + np.abs(features[:, 2]) + 0.5 * random.normal(size=len(features))
    return features, np.digitize(useful, [1.5, 2.5]), sizes


def average_precision(predictions: np.ndarray, dataset: lightgbm.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """An objective for `lightgbm.train`: gradient and second derivative."""
    scores = torch.tensor(predictions, requires_grad=True)
    sizes = torch.tensor(np.asarray(dataset.get_group(), dtype=np.int64))
    groups = torch.arange(len(sizes)).repeat_interleave(sizes)
    relevance = torch.tensor(dataset.get_label() > 0)
    loss = rankgrad.average_precision_loss(scores, relevance, groups=groups, margin="auto", reduction="sum")
    gradient = torch.autograd.grad(loss, scores)[0].numpy()
    window = predictions.std() or 1.0  # the automatic one; equal scores, as before the first tree, have 1
    return gradient, np.abs(gradient) / window + 1e-3


def train(objective: Any, trees: int = 60) -> float:
    """Mean average precision on unseen queries, in percent."""
    features, grades, sizes = queries(200, seed=0)
    settings = {"objective": objective, "num_leaves": 15, "learning_rate": 0.1, "num_threads": 1, "verbosity": -1}
    model = lightgbm.train(settings, lightgbm.Dataset(features, grades, group=sizes), trees)
    features, grades, sizes = queries(100, seed=1)
    scores = torch.from_numpy(model.predict(features))
    groups = torch.arange(len(sizes)).repeat_interleave(torch.from_numpy(sizes))
    return 100 * float(rankgrad.metrics.average_precision(scores, torch.from_numpy(grades > 0), groups=groups))


if __name__ == "__main__":
    print(f"lambdarank          MAP {train('lambdarank'):.1f}")
    print(f"gradients of our AP MAP {train(average_precision):.1f}")
