"""Losses by name, on the items of some queries: ours and :mod:`rankgrad.lab.ranker.baselines`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.ranker import baselines
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named, explained, user_errors
from rankgrad.losses import average_precision_loss, ndcg_loss, recall_loss, spearman_loss

#: name -> (function, whether it takes grades rather than bool relevance, what it is)
OURS: dict[str, tuple[Callable[..., Tensor], bool, str]] = {
    "ap": (average_precision_loss, False, "average precision; log: true for its log form"),
    "ndcg": (ndcg_loss, True, "NDCG of all grades; k: the places that count"),
    "recall": (recall_loss, False, "recall at every K, weight: log or loglog"),
    "spearman": (spearman_loss, True, "Spearman's rank correlation with the grades"),
}
BASELINES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "lambdarank": (baselines.lambdarank_loss, "LambdaRank (Burges et al., 2006); sigma, k"),
    "listnet": (baselines.listnet_loss, "ListNet, top-one (Cao et al., 2007)"),
    "ranknet": (baselines.ranknet_loss, "RankNet (Burges et al., 2005); sigma"),
    "approxndcg": (baselines.approx_ndcg_loss, "ApproxNDCG (Qin et al., 2010); temperature"),
}
#: What a loss may be given in the settings, beside its own name.
_SETTABLE = {"lam", "window", "margin", "log", "weight", "k", "gain", "ties", "sigma", "temperature"}


class QueryLoss(nn.Module):
    """A loss of the items of some queries: ``(scores [N], grades [N], groups [N]) -> scalar``.

    Args:
        config: Name and arguments.
        relevant: The lowest grade that is relevant, for losses of bool relevance.
    """

    def __init__(self, config: Named, relevant: float) -> None:
        super().__init__()
        self.name, self.relevant = config.name, relevant
        if self.name not in OURS and self.name not in BASELINES:
            raise UserError(f"loss: unknown name {self.name!r}{nearest(self.name, [*OURS, *BASELINES])}")
        function = OURS[self.name][0] if self.name in OURS else BASELINES[self.name][0]
        settable = inspect.signature(function).parameters.keys() & _SETTABLE
        trains = {"margin": "auto"} if "margin" in settable else {}  # as the Modules, which are for training
        self.arguments = trains | config.checked(settable, self.name)

    def forward(self, scores: Tensor, grades: Tensor, groups: Tensor) -> Tensor:
        """The mean over queries with something relevant; ``groups`` ascends."""
        if self.name in BASELINES:
            return BASELINES[self.name][0](scores, grades, groups, **self.arguments)
        function, graded, _ = OURS[self.name]
        return function(scores, grades if graded else grades >= self.relevant, groups=groups, **self.arguments)


def arguments_of(config: Named) -> dict[str, tuple[Any, str]]:
    """Default and meaning of every argument of one of our losses, by its key (``loss.margin``)."""
    if config.name not in OURS:
        return {}
    found = explained(OURS[config.name][0], _SETTABLE)
    return found | {"loss.margin": ("auto", found["loss.margin"][1])}


def build(config: Named, relevant: float) -> QueryLoss:
    """The loss of these settings; its arguments are tried on three items, before data is read."""
    loss = QueryLoss(config, relevant)
    with user_errors(f"loss: {config.name}"):
        loss(torch.tensor([0.2, 0.1, 0.3]), torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64))
    return loss
