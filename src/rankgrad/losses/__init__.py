"""Losses: from score lists, or embeddings and labels, to one number with a useful gradient."""

from rankgrad.losses.average_precision import (
    AveragePrecisionLoss,
    average_precision_loss,
    mean_average_precision_loss,
    pooled_average_precision_loss,
)
from rankgrad.losses.class_ranking import ClassRankingLoss
from rankgrad.losses.ndcg import NDCGLoss, ndcg_loss
from rankgrad.losses.pair_ranking import PairRankingLoss
from rankgrad.losses.proxy_ranking import ProxyRankingLoss
from rankgrad.losses.recall import RecallLoss, recall_loss
from rankgrad.losses.spearman import SpearmanLoss, spearman_loss

__all__ = [
    "AveragePrecisionLoss",
    "ClassRankingLoss",
    "NDCGLoss",
    "PairRankingLoss",
    "ProxyRankingLoss",
    "RecallLoss",
    "SpearmanLoss",
    "average_precision_loss",
    "mean_average_precision_loss",
    "ndcg_loss",
    "pooled_average_precision_loss",
    "recall_loss",
    "spearman_loss",
]
