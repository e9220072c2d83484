"""The network: features to one scale, then a multi-layer perceptron that gives each item a score."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rankgrad.lab.ranker.config import Model
from rankgrad.lab.ranker.data import Queries


def symmetric_log(values: Tensor) -> Tensor:
    """sign(x) log(1 + |x|): features of very different sizes (counts, lengths) come close to one another."""
    return values.sign() * values.abs().log1p()


class Ranker(nn.Module):
    """Items ``[N, features]`` -> scores ``[N]``.

    Args:
        features: How many.
        config: Settings. ``scale``: ``feature`` subtracts each feature's mean over the training items and divides
            by its standard deviation, ``log`` does so after :func:`symmetric_log`, ``query`` expects what
            :func:`within_query` gives, ``none`` changes nothing.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int, config: Model) -> None:
        super().__init__()
        self.logarithm = config.scale == "log"
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))
        layers: list[nn.Module] = []
        for width in config.hidden:
            layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(config.dropout)]
            features = width
        self.layers = nn.Sequential(*layers, nn.Linear(features, 1))

    def fit_scale(self, features: Tensor) -> None:
        """Take mean and deviation from the training items; a feature that never changes becomes 0."""
        values = (symmetric_log(features) if self.logarithm else features).double()
        deviation, mean = torch.std_mean(values, dim=0, correction=0)
        self.mean.copy_(mean)
        constant = deviation <= 1e-6 * values.abs().amax(0)
        self.deviation.copy_(deviation.masked_fill(constant, torch.inf))

    def forward(self, features: Tensor) -> Tensor:
        """Scores, float32 under autocast too: ranks need more than the 8 bits of bf16."""
        values = symmetric_log(features) if self.logarithm else features
        scores = self.layers((values - self.mean) / self.deviation)
        return cast(Tensor, scores).squeeze(-1).float()


def within_query(queries: Queries) -> Queries:
    """Every feature from 0 to 1 within each query, as in LETOR's files; 0 where a query has one value only."""
    index = queries.groups.unsqueeze(-1).expand_as(queries.features)
    shape = (len(queries), queries.features.shape[1])
    low = queries.features.new_zeros(shape).scatter_reduce(0, index, queries.features, "amin", include_self=False)
    high = queries.features.new_zeros(shape).scatter_reduce(0, index, queries.features, "amax", include_self=False)
    span = (high - low)[queries.groups]
    scaled = (queries.features - low[queries.groups]) / span.where(span > 0, 1)
    return Queries(scaled, queries.grades, queries.groups, queries.ids)


def build(features: int, config: Model, seed: int) -> Ranker:
    """The network of these settings, its weights random by the seed."""
    torch.manual_seed(seed)
    return Ranker(features, config)
