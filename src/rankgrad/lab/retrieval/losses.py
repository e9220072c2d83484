"""Losses by name: ours, and baselines to train in the same loop.

``pml:Name`` is a loss of pytorch-metric-learning, ``surrogate:name`` one of :mod:`rankgrad.surrogates`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named, explained, user_errors
from rankgrad.losses import AveragePrecisionLoss, PairRankingLoss, ProxyRankingLoss, RecallLoss
from rankgrad.pairs import retrieval_pairs, unit_length

OURS: dict[str, tuple[type[nn.Module], str]] = {
    "recall": (RecallLoss, "recall at every K, weight: log or loglog (the paper's retrieval loss)"),
    "ap": (AveragePrecisionLoss, "average precision; log: true for its log form"),
    "pair": (PairRankingLoss, "average precision and a hinge on the similarities (beyond the paper)"),
    "proxy": (ProxyRankingLoss, "learned class vectors rank the batch (images: the default; beyond the paper)"),
}


class _Ours(nn.Module):
    """A loss of this library; an image that is twice in a batch is left out of its own list."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor, items: Tensor) -> Tensor:
        """Loss of a process's part of a batch; ``items`` says which image each row is."""
        return cast(Tensor, self.loss(embeddings, labels, items=items))


class _Pml(nn.Module):
    """A loss of pytorch-metric-learning, on the whole batch in every process."""

    def __init__(self, loss: nn.Module, miner: nn.Module | None) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner

    def forward(self, embeddings: Tensor, labels: Tensor, items: Tensor) -> Tensor:
        """Loss of the gathered batch, in float32 as ours; an image that is twice in it counts as two images."""
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings, labels = distributed.gather(embeddings.float()), distributed.gather(labels)
            mined = () if self.miner is None else (self.miner(embeddings, labels),)
            return cast(Tensor, self.loss(embeddings, labels, *mined))


class _Surrogate(nn.Module):
    """A baseline of :mod:`rankgrad.surrogates` on the lists of the whole batch, in every process."""

    def __init__(self, function: Callable[..., Tensor], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, embeddings: Tensor, labels: Tensor, items: Tensor) -> Tensor:
        """Loss of the gathered batch; an image that is twice in it is left out of its own list."""
        rows, labels, items = (distributed.gather(part) for part in (unit_length(embeddings), labels, items))
        scores, relevance, _ = retrieval_pairs(rows, labels)
        others = items.unsqueeze(0) != items.unsqueeze(1)  # without the query itself, as in the mask of the pairs
        return self.function(scores, relevance, mask=others, **self.arguments)


def _surrogate(config: Named) -> nn.Module:
    """A baseline by name, with its arguments tried."""
    from rankgrad.surrogates import METHODS

    name = config.name.removeprefix("surrogate:")
    known = [one for one, method in METHODS.items() if "sorter" not in inspect.signature(method.loss).parameters]
    if name not in known:
        raise UserError(
            f"loss: unknown name {config.name!r}{nearest(config.name, [f'surrogate:{one}' for one in known])}"
        )
    function = METHODS[name].loss
    parameters = set(inspect.signature(function).parameters) - {"scores", "relevance", "mask", "reduction"}
    arguments = config.checked(parameters, name)
    with user_errors(f"loss: {name}"):
        function(torch.zeros(1, 2), torch.tensor([[True, False]]), **arguments)
    return _Surrogate(function, arguments)


def _made(key: str, made: type[nn.Module], config: Named, given: dict[str, Any]) -> nn.Module:
    """Make an object with checked argument names; ``given`` fills parameters that it has and the user left out."""
    parameters: set[str] = set()
    for kind in inspect.getmro(made):
        if kind.__module__.startswith("torch.nn"):
            break
        parameters |= set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}  # type: ignore[misc]
    arguments = config.checked(parameters, made.__name__, key)
    filled = {name: value for name, value in given.items() if name in parameters and name not in arguments}
    with user_errors(f"{key}: {made.__name__}"):
        return made(**filled, **arguments)


def _pml(key: str, config: Named, given: dict[str, Any]) -> nn.Module:
    """An object of pytorch-metric-learning by name; ``key`` is ``loss`` or ``miner``."""
    from pytorch_metric_learning import losses, miners

    name = config.name.removeprefix("pml:")
    module = {"loss": losses, "miner": miners}[key]
    known = [n for n in vars(module) if n[0].isupper()]
    if not config.name.startswith("pml:") or name not in known:
        raise UserError(f"{key}: unknown name {config.name!r}{nearest(config.name, [f'pml:{n}' for n in known])}")
    return _made(key, getattr(module, name), config, given)


#: Arguments that the task gives, not the settings.
_GIVEN = {"num_classes", "embedding_size", "distributed", "process_group"}


def arguments_of(config: Named) -> dict[str, tuple[Any, str]]:
    """Default and meaning of every argument of one of our losses, by its key (``loss.margin``)."""
    if config.name not in OURS:
        return {}
    kind = OURS[config.name][0]
    return explained(kind, inspect.signature(kind).parameters.keys() - _GIVEN)


def build(config: Named, miner: Named | None, *, classes: int, embedding: int) -> nn.Module:
    """A Module ``(embeddings, labels, items) -> loss``; labels are 0 ... classes - 1."""
    if config.name in OURS:
        given = {"distributed": True, "num_classes": classes, "embedding_size": embedding}
        return _Ours(_made("loss", OURS[config.name][0], config, given))
    if config.name.startswith("surrogate:"):
        return _surrogate(config)
    if not config.name.startswith("pml:"):
        raise UserError(
            f"loss: unknown name {config.name!r}{nearest(config.name, [*OURS, 'pml:NAME', 'surrogate:NAME'])}"
        )
    loss = _pml("loss", config, {"num_classes": classes, "embedding_size": embedding})
    return _Pml(loss, None if miner is None else _pml("miner", miner, {}))
