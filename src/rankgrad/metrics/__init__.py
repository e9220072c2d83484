"""Ranking metrics: exact, batched, masked. Plain measurements, no gradient.

:mod:`rankgrad.metrics.lists` measures score lists, :func:`retrieval_metrics` embeddings against a gallery
of any size.
"""

from rankgrad.metrics.embeddings import RetrievalMetrics, retrieval_metrics
from rankgrad.metrics.lists import (
    average_precision,
    map_at_r,
    mean_average_precision,
    ndcg,
    precision_at_k,
    recall_at_k,
    reciprocal_rank,
    refined_recall_at_k,
    spearman,
)

__all__ = [
    "RetrievalMetrics",
    "average_precision",
    "map_at_r",
    "mean_average_precision",
    "ndcg",
    "precision_at_k",
    "recall_at_k",
    "reciprocal_rank",
    "refined_recall_at_k",
    "retrieval_metrics",
    "spearman",
]
