"""The losses of this library behind pytorch-metric-learning's base class, with miners, reducers, distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.precision import compute_dtype, without_autocast
from rankgrad.losses import average_precision_loss

try:
    from pytorch_metric_learning import distances, losses
    from pytorch_metric_learning.utils import common_functions
    from pytorch_metric_learning.utils import loss_and_miner_utils as pairs
except ImportError as error:
    raise ImportError(
        "rankgrad.integrations.pytorch_metric_learning needs that package: pip install pytorch-metric-learning"
    ) from error


class RankingLoss(losses.BaseMetricLossFunction):
    """A list loss of this library as a loss of pytorch-metric-learning.

    Every embedding of ``[B, dim]`` is a query; the references, or the other embeddings of the batch, are its
    candidates. Without a miner and with the default reducer and distance, value and gradient are those of
    :class:`rankgrad.AveragePrecisionLoss` or :class:`rankgrad.RecallLoss` with the same settings.

    - A miner's pairs or triplets are masks: only the candidates it chose for a query are in the query's list.
    - A reducer receives one loss for each query that has something relevant.
    - A distance that is no similarity is ranked from the nearest; ``window`` and ``margin`` are in its units.
    - ``DistributedLossWrapper`` takes it as it is, pytorch-metric-learning's memory as :class:`CrossBatchMemory`.

    Args:
        loss: ``loss(scores, relevance, mask=mask, reduction="none")``: :func:`rankgrad.average_precision_loss`,
            which is the default, ``functools.partial(rankgrad.recall_loss, window=0.1, margin=0.05)``, ...
        kwargs: ``reducer``, ``distance`` (cosine similarity unless given), ``embedding_regularizer``, ... as in
            every loss of pytorch-metric-learning.

    Example:
        >>> from pytorch_metric_learning import miners
        >>> from rankgrad.integrations.pytorch_metric_learning import RankingLoss
        >>> miner, loss = miners.MultiSimilarityMiner(), RankingLoss()
        >>> embeddings = torch.randn(8, 16, requires_grad=True)
        >>> labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> loss(embeddings, labels, miner(embeddings, labels)).backward()
    """

    def __init__(self, loss: Callable[..., Tensor] = average_precision_loss, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not callable(loss):
            raise _check.fail("loss", 'a list loss(scores, relevance, mask=mask, reduction="none")', loss)
        self.list_loss = loss

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, Any]:
        """The losses of the queries that have something relevant, for the reducer."""
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        with without_autocast(embeddings.device.type):
            rows = embeddings.to(compute_dtype(embeddings.dtype))
            references = rows if ref_emb is embeddings else ref_emb.to(rows.dtype)
            scores = self.distance(rows, references)
        if not self.distance.is_inverted:
            scores = -scores
        relevance, mask = _masks(scores, labels, indices_tuple, ref_labels)
        counted = (relevance if mask is None else relevance & mask).any(1)
        values = self.list_loss(scores, relevance, mask=mask, reduction="none")
        if not isinstance(values, Tensor) or values.shape != counted.shape:
            raise _check.fail("loss", f"to return the losses of {len(counted)} lists", values)
        if not bool(counted.any()):
            return self.zero_losses()  # type: ignore[no-any-return]
        return {
            "loss": {
                "losses": values[counted],
                "indices": torch.where(counted)[0],
                "reduction_type": "element",
            }
        }

    def get_default_distance(self) -> distances.BaseDistance:
        """Cosine similarity."""
        return distances.CosineSimilarity()


class CrossBatchMemory(losses.CrossBatchMemory):
    """pytorch-metric-learning's ``CrossBatchMemory``, which accepts losses by a list of names, for ours.

    One list of old and new candidates. The memory of :class:`rankgrad.RecallLoss` keeps the old ones in lists of
    their own, so that embeddings cannot drift away from them.

    Example:
        >>> from rankgrad.integrations.pytorch_metric_learning import CrossBatchMemory, RankingLoss
        >>> loss = CrossBatchMemory(RankingLoss(), embedding_size=16, memory_size=1024)
        >>> loss(torch.randn(4, 16, requires_grad=True), torch.tensor([0, 0, 1, 1])).backward()
    """

    @staticmethod
    def supported_losses() -> list[str]:
        """The names of the losses it takes."""
        return [*losses.CrossBatchMemory.supported_losses(), RankingLoss.__name__]


def _masks(
    scores: Tensor, labels: Tensor | None, indices_tuple: tuple[Tensor, ...] | None, ref_labels: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Which candidates are relevant, and which are there at all."""
    if indices_tuple is None:
        assert labels is not None and ref_labels is not None
        itself = ref_labels is labels  # the batch against itself: no query is its own candidate
        mask = ~torch.eye(len(labels), dtype=torch.bool, device=scores.device) if itself else None
        return labels.unsqueeze(1) == ref_labels, mask
    anchors, positives, others, negatives = pairs.convert_to_pairs(indices_tuple, labels, ref_labels)
    relevance = torch.zeros_like(scores, dtype=torch.bool)
    mask = torch.zeros_like(relevance)
    relevance[anchors, positives] = True
    mask[others, negatives] = True
    return relevance, mask | relevance
