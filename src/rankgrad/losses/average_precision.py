"""Average precision losses: of lists, per class (mAP) and pooled over classes (paper, section 4.6)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from rankgrad import _check
from rankgrad.losses._list_loss import loss_of_lists
from rankgrad.losses.embedding import EmbeddingLoss
from rankgrad.reach import Margin


def average_precision_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    log: bool = False,
    mask: Tensor | None = None,
    reduction: str = "mean",
    check_finite: bool = False,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
    spread: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""One minus average precision.

    With :math:`r_i` the rank of the relevant item i in its list and :math:`r^+_i` its rank among the
    relevant items, a list with p relevant items has the loss :math:`1 - \frac1p \sum_i r^+_i / r_i`. Use it where
    AP, mAP@R or the MAP of queries is reported; on embeddings use :class:`AveragePrecisionLoss`.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        lam: Interpolation strength in the paper's units, finite and > 0.
        window: Instead of ``lam``, as in :func:`recall_loss`; with neither it is taken from the scores.
        margin: Irrelevant scores are raised, relevant ones lowered by half of it before ranking; a number or
            ``"auto"``.
        log: Average :math:`-\log(r^+_i / r_i)` instead: the same optimum, but it still has a slope where
            ranks are bad, so it starts from random scores in long lists.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.
        check_finite, max_relevant, lists, spread, groups, num_groups: As in :func:`recall_loss`.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant).

    Example:
        >>> scores = torch.tensor([0.9, 0.8, 0.3, 0.1], requires_grad=True)
        >>> relevance = torch.tensor([False, True, False, True])
        >>> loss = rankgrad.average_precision_loss(scores, relevance, lam=1.0)
        >>> loss  # precisions 1/2 and 2/4
        tensor(0.5000, grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 0.2500, -0.2500,  0.2500, -0.2500])
    """
    return loss_of_lists(
        scores,
        relevance,
        form="log_ap" if log else "ap",
        lam=lam,
        window=window,
        margin=margin,
        mask=mask,
        reduction=reduction,
        check_finite=check_finite,
        max_relevant=max_relevant,
        lists=lists,
        spread=spread,
        groups=groups,
        num_groups=num_groups,
    )


def mean_average_precision_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    log: bool = False,
    mask: Tensor | None = None,
    reduction: str = "mean",
    check_finite: bool = False,
    max_relevant: int | None = None,
) -> Tensor:
    """One minus mAP: the average precision loss of each class over all items, averaged over classes.

    Use it for multi-label classifiers; :class:`ClassRankingLoss` adds the pooled list and a memory.

    Args:
        scores: ``[items, classes]``; here a list is a *column*.
        relevance: The same shape; bool, or 0 and 1. Classes without a relevant item do not count.
        lam, window, margin, log, check_finite, max_relevant: As in :func:`average_precision_loss`.
        mask: bool, broadcast to ``scores``.
        reduction: ``"mean"`` over the classes that have a relevant item, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[classes]`` for ``"none"``.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.3]], requires_grad=True)
        >>> relevance = torch.tensor([[True, False], [False, False], [False, True]])
        >>> rankgrad.mean_average_precision_loss(scores, relevance, lam=1.0)  # 1 - (1/1 + 1/2) / 2
        tensor(0.2500, grad_fn=...)
    """
    scores, relevance, mask = _check.class_lists(scores, relevance, mask)
    return average_precision_loss(
        scores.T,
        relevance.T,
        lam=lam,
        window=window,
        margin=margin,
        log=log,
        mask=None if mask is None else mask.T,
        reduction=reduction,
        check_finite=check_finite,
        max_relevant=max_relevant,
    )


def pooled_average_precision_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    log: bool = False,
    mask: Tensor | None = None,
    reduction: str = "mean",
    check_finite: bool = False,
    max_relevant: int | None = None,
) -> Tensor:
    """One minus the AP of a single list of all (item, class) pairs; the paper's AP_C.

    Scores of different classes compete here: use it beside :func:`mean_average_precision_loss` where one score
    threshold is to serve all classes, as in detectors.

    Args:
        scores: ``[items, classes]``.
        relevance: The same shape; bool, or 0 and 1.
        lam, window, margin, log, mask, check_finite, max_relevant: As in :func:`mean_average_precision_loss`.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``: all the same for the one list.

    Returns:
        A scalar.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.3]], requires_grad=True)
        >>> relevance = torch.tensor([[True, False], [False, False], [False, True]])
        >>> rankgrad.pooled_average_precision_loss(scores, relevance, lam=1.0)  # 1 - (1/1 + 2/4) / 2
        tensor(0.2500, grad_fn=...)
    """
    scores, relevance, mask = _check.class_lists(scores, relevance, mask)
    return average_precision_loss(
        scores.flatten(),
        relevance.flatten(),
        lam=lam,
        window=window,
        margin=margin,
        log=log,
        mask=None if mask is None else mask.flatten(),
        reduction=reduction,
        check_finite=check_finite,
        max_relevant=max_relevant,
    )


class AveragePrecisionLoss(EmbeddingLoss):
    """Average precision loss on a batch of embeddings; see :func:`average_precision_loss`.

    Use it where AP or mAP@R is reported and only the order of the items matters. :class:`PairRankingLoss` adds a
    hinge on the similarities; where the training classes are known, begin with :class:`ProxyRankingLoss`.

    Every embedding is a query with a list of all others (itself excluded), and a second list of what the memory
    holds. A class may have any number of items in a batch.

    Args:
        lam: Interpolation strength, > 0.
        window: Instead of ``lam``, as in :func:`recall_loss`. Neither given: the window is the standard
            deviation of the similarities.
        margin: Score margin, in cosine similarity; ``"auto"``: half the standard deviation of the similarities.
        log: Average -log(precision) instead of 1 - precision.
        memory: How many past batches to remember. Their embeddings, as they were then, make a second list for
            every query, less older copies of the query itself (``items``); all lists have the same weight. They
            are never ranked against fresh ones: a network could then lower the loss by moving all embeddings
            away from the remembered ones.
        max_relevant: As in :func:`recall_loss`: the most partners an item can have in the batch, or in the memory.
        distributed: With several processes, take the batches of all of them as one; see :class:`RecallLoss`.
        process_group: As in :class:`RecallLoss`.

    Example:
        >>> loss = rankgrad.AveragePrecisionLoss()
        >>> embeddings = torch.randn(8, 16, requires_grad=True)
        >>> labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> loss(embeddings, labels).backward()
    """

    def __init__(
        self,
        *,
        lam: float | None = None,
        window: float | None = None,
        margin: Margin = "auto",
        log: bool = False,
        memory: int = 0,
        max_relevant: int | None = None,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(lam, window, margin, memory, max_relevant, distributed, process_group)
        self.log = bool(log)

    @property
    def form(self) -> str:
        """Its name in the engine."""
        return "log_ap" if self.log else "ap"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, log={self.log}"
