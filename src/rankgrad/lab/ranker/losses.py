"""Losses by name, on the items of some queries: ours and :mod:`rankgrad.lab.ranker.baselines`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.ranker import baselines
from rankgrad.lab.retrieval.config import Named
from rankgrad.lab.training.config import documented, nearest
from rankgrad.lab.training.errors import UserError
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
        self.name, self.relevant, self.arguments = config.name, relevant, config.arguments()
        if self.name not in OURS and self.name not in BASELINES:
            raise UserError(f"loss: unknown name {self.name!r}{nearest(self.name, [*OURS, *BASELINES])}")
        function = OURS[self.name][0] if self.name in OURS else BASELINES[self.name][0]
        known = set(inspect.signature(function).parameters) & _SETTABLE
        for key in self.arguments:
            if key not in known:
                raise UserError(f"loss.{key}: unknown argument of {self.name}{nearest(key, known)}")

    def forward(self, scores: Tensor, grades: Tensor, groups: Tensor) -> Tensor:
        """The mean over queries with something relevant; ``groups`` ascends."""
        arguments: dict[str, Any] = self.arguments
        if self.name in BASELINES:
            return BASELINES[self.name][0](scores, grades, groups, **arguments)
        function, graded, _ = OURS[self.name]
        return function(scores, grades if graded else grades >= self.relevant, groups=groups, **arguments)


def arguments_of(config: Named) -> dict[str, tuple[Any, str]]:
    """Default and meaning of every argument of one of our losses, by its key (``loss.margin``)."""
    if config.name not in OURS:
        return {}
    function = OURS[config.name][0]
    parameters = inspect.signature(function).parameters
    return {f"loss.{n}": (one.default, documented(function, n)) for n, one in parameters.items() if n in _SETTABLE}


def build(config: Named, relevant: float) -> QueryLoss:
    """The loss of these settings; its arguments are tried on three items, before data is read."""
    loss = QueryLoss(config, relevant)
    try:
        loss(torch.tensor([0.2, 0.1, 0.3]), torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64))
    except (TypeError, ValueError) as error:
        raise UserError(f"loss: {config.name}: {error}") from None
    return loss
