"""Ranking metrics: exact, batched, masked. Plain measurements, no gradient.

All functions of score lists take ``scores, relevance`` of shape ``[..., n]`` (higher is better), an optional
bool ``mask`` (False = the item does not exist) and ``reduction``: ``"mean"`` over the lists that have something
relevant, or ``"none"`` (0 for lists that have not). Ties are counted pessimistically, irrelevant items first, as
in the losses: a model that scores everything alike gets the worst value, whatever the order of the items in
memory. :func:`retrieval_metrics` measures embeddings against a gallery of any size.
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
