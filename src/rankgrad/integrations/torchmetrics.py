"""The metrics of :mod:`rankgrad.metrics` as ``torchmetrics.Metric``: updated by batches, synced over processes.

``update(preds, target, indexes)`` as in torchmetrics' retrieval metrics: ``indexes`` says which query a score
belongs to, in any order and over any number of batches and processes. Unlike there, scores may have any sign, ties
count against the model, and all queries are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankgrad import _check, metrics

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError("rankgrad.integrations.torchmetrics needs torchmetrics: pip install torchmetrics") from error

ACTIONS = ("skip", "neg", "pos", "error")


class _Collected(Metric):
    """States that are lists of tensors, joined over batches and processes.

    Args:
        states: The name of each state and a tensor without rows: its value where no batch came.
        kwargs: As for every ``torchmetrics.Metric``.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, states: dict[str, Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._nothing = states
        for name in states:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def _collect(self, **batch: Tensor) -> None:
        for name, value in batch.items():
            if value.dtype != torch.float64 and self._nothing[name].is_floating_point():
                value = value.float()  # one dtype in all batches and processes
            getattr(self, name).append(value.detach())

    def _all(self, name: str) -> Tensor:
        parts = getattr(self, name)  # one tensor once processes are synced
        if isinstance(parts, Tensor):
            return parts
        return torch.cat(parts) if parts else self._nothing[name].to(self.device)

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        """A process without any batch takes part with tensors of the right kind; torchmetrics' are all float."""
        for name, nothing in self._nothing.items():
            if not getattr(self, name):
                setattr(self, name, [nothing.to(self.device)])
        super()._sync_dist(*args, **kwargs)


class QueryMetric(_Collected):
    """Base of the metrics over queries: collects scores, computes all queries at once.

    Args:
        empty_target_action: How a query without anything relevant counts: ``"skip"``: not at all (as everywhere in
            this library), ``"neg"``: as 0 (torchmetrics' default), ``"pos"``: as 1, ``"error"``: a ValueError.
        kwargs: As for every ``torchmetrics.Metric``.

    Example:
        >>> from rankgrad.integrations.torchmetrics import AveragePrecision
        >>> metric = AveragePrecision(empty_target_action="neg")
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0, 0, 0]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0., dtype=torch.float64)
    """

    metric: Callable[..., Tensor]  #: a function of :mod:`rankgrad.metrics`
    lowest: float = 0  #: of a target

    def __init__(self, *, empty_target_action: str = "skip", **kwargs: Any) -> None:
        nothing = torch.zeros(0)
        super().__init__({"preds": nothing, "target": nothing, "indexes": nothing.long()}, **kwargs)
        self.empty_target_action = _check.one_of("empty_target_action", empty_target_action, ACTIONS)
        self.arguments: dict[str, Any] = {}

    def update(self, preds: Tensor, target: Tensor, indexes: Tensor) -> None:
        """Take in scores.

        Args:
            preds: Scores ``[...]`` of any shape, higher is better.
            target: The same shape: relevance or grades (for :class:`Spearman` the values to be ordered by).
            indexes: The same shape: which query each score belongs to, integers of any size and order.
        """
        preds = _check.floating("preds", preds)
        for name, value in (("target", target), ("indexes", indexes)):
            if _check.tensor(name, value).shape != preds.shape:
                raise _check.fail(name, f"the shape of preds {list(preds.shape)}", value)
        _check.numbers_of("preds", preds, infinite=True)
        self._relevance(target)
        if indexes.is_floating_point() or indexes.is_complex() or indexes.dtype == torch.bool:
            raise TypeError(f"indexes: expected integers, received a tensor of {indexes.dtype}")
        self._collect(preds=preds.flatten(), target=target.flatten(), indexes=indexes.flatten().long())

    def compute(self) -> Tensor:
        """The mean over queries; 0 if none counts."""
        preds, target, indexes = map(self._all, ("preds", "target", "indexes"))
        ids, groups = indexes.unique(return_inverse=True)
        lists = {"groups": groups, "num_groups": len(ids), "reduction": "none"}
        relevance = self._relevance(target)
        values = type(self).metric(preds, relevance, **lists, **self.arguments).double()
        counted = self._counted(relevance, groups, len(ids))
        if self.empty_target_action == "error" and not bool(counted.all()):
            none = int((~counted).sum())
            raise ValueError(f"target: expected something relevant for every query, received {none} without")
        if self.empty_target_action in ("neg", "pos"):
            values = values.where(counted, float(self.empty_target_action == "pos"))
            counted = torch.ones_like(counted)
        return values.where(counted, 0).sum() / counted.sum().clamp(min=1)

    def _relevance(self, target: Tensor) -> Tensor:
        """What the metric takes, checked; not kept instead of the target, for a MetricCollection shares states."""
        _check.numbers_of("target", target, lowest=self.lowest, infinite=self.lowest < 0)
        return target

    def _counted(self, relevance: Tensor, groups: Tensor, number: int) -> Tensor:
        """Which queries have something relevant, ``[number]``."""
        return groups[relevance > 0].bincount(minlength=number) > 0


def _zeros_and_ones(target: Tensor, expected: str) -> Tensor:
    """Require bool, or 0 and 1, where it can be read."""
    if _check.readable(target) and target.dtype != torch.bool:
        wrong = target[(target != 0) & (target != 1)]
        if len(wrong):
            raise _check.fail("target", expected, wrong[0].item())
    return target


class BinaryMetric(QueryMetric):
    """Base of the metrics over queries whose items are relevant or not.

    Args:
        relevant_from: The lowest grade that is relevant, for targets that are grades, as :class:`NDCG` takes them;
            None: targets are bool, or 0 and 1.
        kwargs: As in :class:`QueryMetric`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import ReciprocalRank
        >>> metric = ReciprocalRank(relevant_from=2)
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1, 2, 0]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    def __init__(self, *, relevant_from: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.relevant_from = None if relevant_from is None else _check.positive("relevant_from", relevant_from)

    def _relevance(self, target: Tensor) -> Tensor:
        if self.relevant_from is None:
            return _zeros_and_ones(target, "bool, or 0 and 1 (grades need relevant_from=)")
        grades = super()._relevance(target)
        return (grades >= self.relevant_from).float().where(~grades.isnan(), torch.nan)  # NaN on a GPU stays NaN


class AveragePrecision(BinaryMetric):
    """:func:`rankgrad.metrics.average_precision` over queries; arguments as in :class:`BinaryMetric`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import AveragePrecision
        >>> metric = AveragePrecision()
        >>> metric.update(torch.tensor([0.9, -0.8, 0.3]), torch.tensor([1, 1, 0]), torch.tensor([7, 7, 7]))
        >>> metric.update(torch.tensor([0.1, 0.2]), torch.tensor([1, 0]), torch.tensor([3, 3]))
        >>> metric.compute()  # ((1/1 + 2/3) / 2 + 1/2) / 2
        tensor(0.6667, dtype=torch.float64)
    """

    metric = staticmethod(metrics.average_precision)


class MAPAtR(BinaryMetric):
    """:func:`rankgrad.metrics.map_at_r` over queries; arguments as in :class:`BinaryMetric`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import MAPAtR
        >>> metric = MAPAtR()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0, 1, 1]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)
    """

    metric = staticmethod(metrics.map_at_r)


class ReciprocalRank(BinaryMetric):
    """:func:`rankgrad.metrics.reciprocal_rank` over queries: MRR; arguments as in :class:`BinaryMetric`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import ReciprocalRank
        >>> metric = ReciprocalRank()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0, 1, 1]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    metric = staticmethod(metrics.reciprocal_rank)


class _AtK(BinaryMetric):
    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.arguments = {"k": _check.count("k", k, at_least=1)}


class RecallAtK(_AtK):
    """:func:`rankgrad.metrics.recall_at_k` over queries (torchmetrics: hit rate).

    Args:
        k: How many of the best count.
        kwargs: As in :class:`BinaryMetric`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import RecallAtK
        >>> metric = RecallAtK(1)
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0, 1, 1]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0., dtype=torch.float64)
    """

    metric = staticmethod(metrics.recall_at_k)


class RefinedRecallAtK(_AtK):
    """:func:`rankgrad.metrics.refined_recall_at_k` over queries; arguments as in :class:`RecallAtK`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import RefinedRecallAtK
        >>> metric = RefinedRecallAtK(2)
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0, 1, 1]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    metric = staticmethod(metrics.refined_recall_at_k)


class PrecisionAtK(_AtK):
    """:func:`rankgrad.metrics.precision_at_k` over queries; arguments as in :class:`RecallAtK`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import PrecisionAtK
        >>> metric = PrecisionAtK(2)
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0, 1, 1]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    metric = staticmethod(metrics.precision_at_k)


class NDCG(QueryMetric):
    """:func:`rankgrad.metrics.ndcg` over queries.

    Args:
        k: Count only the best ``k`` places; None: all.
        gain: ``"linear"`` or ``"exponential"``.
        kwargs: As in :class:`QueryMetric`.

    Example:
        >>> from rankgrad.integrations.torchmetrics import NDCG
        >>> metric = NDCG()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1, 2, 0]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(0.8597, dtype=torch.float64)
    """

    metric = staticmethod(metrics.ndcg)

    def __init__(self, k: int | None = None, *, gain: str = "linear", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        k = None if k is None else _check.count("k", k, at_least=1)
        self.arguments = {"k": k, "gain": _check.one_of("gain", gain, ("linear", "exponential"))}


class Spearman(QueryMetric):
    """:func:`rankgrad.metrics.spearman` over queries; those of two scores or more count.

    Example:
        >>> from rankgrad.integrations.torchmetrics import Spearman
        >>> metric = Spearman()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([3.0, 2.0, 1.0]), torch.tensor([7, 7, 7]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    metric = staticmethod(metrics.spearman)
    lowest = -torch.inf

    def _counted(self, relevance: Tensor, groups: Tensor, number: int) -> Tensor:
        return groups.bincount(minlength=number) > 1


class MeanAveragePrecision(_Collected):
    """:func:`rankgrad.metrics.mean_average_precision` of ``[items, classes]`` scores, collected batch by batch.

    Args:
        classes: How many classes there are.
        kwargs: As for every ``torchmetrics.Metric``.

    Example:
        >>> from rankgrad.integrations.torchmetrics import MeanAveragePrecision
        >>> metric = MeanAveragePrecision(2)
        >>> metric.update(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[1, 0], [0, 1]]))
        >>> metric.compute()
        tensor(1.)
    """

    def __init__(self, classes: int, **kwargs: Any) -> None:
        nothing = torch.zeros(0, _check.count("classes", classes, at_least=1))
        super().__init__({"preds": nothing, "target": nothing}, **kwargs)
        self.classes = classes

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take in ``[items, classes]`` scores and relevance of the same shape."""
        preds = _check.floating("preds", preds, ndim=2)
        if preds.shape[1] != self.classes:
            raise _check.fail("preds", f"{self.classes} classes", preds)
        if _check.tensor("target", target).shape != preds.shape:
            raise _check.fail("target", f"the shape of preds {list(preds.shape)}", target)
        self._collect(preds=preds, target=_zeros_and_ones(target, "bool, or 0 and 1"))

    def compute(self) -> Tensor:
        """mAP of all items."""
        return metrics.mean_average_precision(self._all("preds"), self._all("target"))


class EmbeddingRetrieval(_Collected):
    """:func:`rankgrad.metrics.retrieval_metrics` of embeddings, collected batch by batch: every item a query.

    Args:
        size: Length of an embedding.
        recall_at: The K of R@K.
        kwargs: As for every ``torchmetrics.Metric``.

    Example:
        >>> from rankgrad.integrations.torchmetrics import EmbeddingRetrieval
        >>> metric = EmbeddingRetrieval(2, recall_at=(1,))
        >>> metric.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
        >>> {name: float(value) for name, value in metric.compute().items()}
        {'R@1': 100.0, 'mAP@R': 100.0, 'AP': 100.0}
    """

    def __init__(self, size: int, recall_at: Sequence[int] = (1,), **kwargs: Any) -> None:
        nothing = torch.zeros(0, _check.count("size", size, at_least=1))
        super().__init__({"embeddings": nothing, "labels": nothing[:, 0].long()}, **kwargs)
        self.recall_at = [_check.count("recall_at", k, at_least=1) for k in recall_at]
        self.size = size

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Take in ``[B, size]`` embeddings and their labels ``[B]``."""
        _check.floating("embeddings", embeddings, ndim=2)
        if embeddings.shape[1] != self.size:
            raise _check.fail("embeddings", f"rows of length {self.size}", embeddings)
        self._collect(
            embeddings=embeddings, labels=_check.per_row("labels", labels, "embeddings", embeddings).long()
        )

    def compute(self) -> dict[str, Tensor]:
        """R@K, mAP@R and AP in percent."""
        found = metrics.retrieval_metrics(self._all("embeddings"), self._all("labels"))
        return {name: torch.tensor(value) for name, value in found.summary(self.recall_at).items()}
