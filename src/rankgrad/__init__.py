"""rankgrad: train directly for ranking metrics. Exact ranks forward, a useful gradient backward.

Imported by name: :mod:`rankgrad.samplers` for batches, :mod:`rankgrad.detection` for torchvision's detectors,
:mod:`rankgrad.integrations` for other trainers, :mod:`rankgrad.surrogates` for the baselines.
"""

from rankgrad import metrics
from rankgrad.graphs import graphed
from rankgrad.losses import (
    AveragePrecisionLoss,
    ClassRankingLoss,
    NDCGLoss,
    PairRankingLoss,
    ProxyRankingLoss,
    RecallLoss,
    SpearmanLoss,
    average_precision_loss,
    mean_average_precision_loss,
    ndcg_loss,
    pooled_average_precision_loss,
    recall_loss,
    spearman_loss,
)
from rankgrad.memory import EmbeddingMemory, ScoreMemory
from rankgrad.pairs import Pairs, retrieval_pairs
from rankgrad.parameters import parameter_groups
from rankgrad.ranking import blackbox, rank, rank_loss

__version__ = "0.1.0"

__all__ = [
    "AveragePrecisionLoss",
    "ClassRankingLoss",
    "EmbeddingMemory",
    "NDCGLoss",
    "PairRankingLoss",
    "Pairs",
    "ProxyRankingLoss",
    "RecallLoss",
    "ScoreMemory",
    "SpearmanLoss",
    "average_precision_loss",
    "blackbox",
    "graphed",
    "mean_average_precision_loss",
    "metrics",
    "ndcg_loss",
    "parameter_groups",
    "pooled_average_precision_loss",
    "rank",
    "rank_loss",
    "recall_loss",
    "retrieval_pairs",
    "spearman_loss",
]
