"""Losses of score lists that are taken where none is given."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from rankgrad.losses import ndcg_loss, spearman_loss

#: What turns score lists and their relevance into a loss: ``loss(scores, relevance, mask=mask)``.
ListLoss = Callable[..., Tensor]


def graded(scores: Tensor, relevance: Tensor, *, mask: Tensor | None) -> Tensor:
    """NDCG loss with its defaults."""
    return ndcg_loss(scores, relevance, mask=mask)


def in_order(scores: Tensor, relevance: Tensor, *, mask: Tensor | None) -> Tensor:
    """Spearman loss against the order of numbers, the highest first."""
    return spearman_loss(scores, relevance, mask=mask)


def described(loss: object) -> str:
    """A loss in the words of a model card."""
    return repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))
