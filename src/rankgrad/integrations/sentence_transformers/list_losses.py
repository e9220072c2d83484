"""Losses of score lists that are taken where none is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.losses import ndcg_loss, spearman_loss

#: What turns score lists and their relevance into a loss: ``loss(scores, relevance, mask=mask)``.
ListLoss = Callable[..., Tensor]


def graded(scores: Tensor, relevance: Tensor, *, mask: Tensor | None) -> Tensor:
    """NDCG loss with its defaults."""
    return ndcg_loss(scores, relevance, mask=mask)


def in_order(scores: Tensor, relevance: Tensor, *, mask: Tensor | None) -> Tensor:
    """Spearman loss against the order of numbers, the highest first."""
    return spearman_loss(scores, relevance, mask=mask)


def check_grades(name: str, grades: Tensor, *, lowest: float = -math.inf) -> None:
    """Require finite grades, where they can be read without waiting for a device."""
    if grades.device.type != "cpu":
        return
    wrong = grades[~(torch.isfinite(grades) & (grades >= lowest))]
    if len(wrong):
        least = "" if lowest == -math.inf else f" >= {lowest:g}"
        raise _check.fail(name, f"finite numbers{least}", float(wrong[0]))


def described(loss: object) -> str:
    """A loss in the words of a model card."""
    return repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))
