"""Ranking losses for sentence-transformers: bi-encoders, cross-encoders, large batches, checkpoints.

:class:`RankingLoss` and :class:`CachedRankingLoss` train bi-encoders, :class:`CrossEncoderRankingLoss` rerankers.
:class:`ClassBatches` draws batches of P labels x K texts, and :class:`LossCheckpoint` saves and resumes the state
of a loss, which the trainer itself does not.
"""

try:
    import sentence_transformers

    # before 6.2 a cached loss does not reset the gradients of the loss's own parameters, such as proxies
    if tuple(int(part) for part in sentence_transformers.__version__.split(".")[:2]) < (6, 2):
        raise ImportError(f"sentence-transformers {sentence_transformers.__version__} is too old")
except ImportError as error:
    raise ImportError(
        "rankgrad.integrations.sentence_transformers needs sentence-transformers 6.2 or newer: "
        "pip install 'sentence-transformers[train]>=6.2'"
    ) from error

from rankgrad.integrations.sentence_transformers.bi_encoder import CachedRankingLoss, RankingLoss
from rankgrad.integrations.sentence_transformers.cross_encoder import CrossEncoderRankingLoss
from rankgrad.integrations.sentence_transformers.training import ClassBatches, LossCheckpoint

__all__ = ["CachedRankingLoss", "ClassBatches", "CrossEncoderRankingLoss", "LossCheckpoint", "RankingLoss"]
