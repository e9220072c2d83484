"""The detection loss of the paper: mAP and pooled AP of class scores, with score memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankgrad import _check, distributed
from rankgrad.losses._list_loss import loss_of_lists
from rankgrad.memory import ScoreMemory
from rankgrad.reach import Margin, margin_of, reach_of, text_of

FORMS = ("ap", "log_ap", "log", "loglog")


class ClassRankingLoss(nn.Module):
    r"""Ranking loss for class scores: multi-label classifiers and the class branch of detectors.

    A list with p relevant items has the loss :math:`1 - \frac{1}{p} \sum_i r^+_i / r_i` with ``form="ap"``. The
    mAP loss is its mean over the classes with a positive, each class ranking its column of scores; the pooled AP
    loss ranks all (item, class) pairs as one list. The loss is

    ``(map_weight * mAP loss + pooled_weight * pooled AP loss) / (map_weight + pooled_weight)``, each with
    the given ``lam``. The last ``memory`` batches take part in both as candidates without gradient. The defaults
    serve logits of any scale; the paper's detector has
    ``ClassRankingLoss(form="ap", lam=0.5, margin=0.15, memory=7)``.

    Args:
        lam: Interpolation strength, > 0 (0.5 in the paper). With neither it nor ``window`` the window is taken
            from the spread of the scores, as in :func:`recall_loss`.
        margin: Score margin: ``"auto"``, a share of the spread of the scores, or a number.
        memory: How many past batches serve as extra candidates.
        map_weight: Weight of the mean over per-class lists.
        pooled_weight: Weight of the one list of all (item, class) pairs.
        form: What a list's loss is: ``"log_ap"`` (starts from bad ranks, see :func:`average_precision_loss`),
            ``"ap"`` (the paper's), or the recall weights ``"log"`` and ``"loglog"``.
        distributed: With several processes, take the items of all of them as one batch; see :class:`RecallLoss`.
        window: Instead of ``lam``, as in :func:`recall_loss`.

    Example:
        >>> loss = rankgrad.ClassRankingLoss()
        >>> logits = torch.randn(32, 5, requires_grad=True)
        >>> loss(logits, torch.rand(32, 5) < 0.1).backward()
    """

    def __init__(
        self,
        *,
        lam: float | None = None,
        margin: Margin = "auto",
        memory: int = 0,
        map_weight: float = 2,
        pooled_weight: float = 1,
        form: str = "log_ap",
        distributed: bool = False,
        window: float | None = None,
    ) -> None:
        super().__init__()
        reach_of(lam, window)
        margin_of(margin)
        self.lam, self.window, self.margin = lam, window, margin
        self.map_weight = _check.non_negative("map_weight", map_weight)
        self.pooled_weight = _check.non_negative("pooled_weight", pooled_weight)
        if self.map_weight + self.pooled_weight == 0:
            raise ValueError("map_weight, pooled_weight: expected at least one > 0, received 0 and 0")
        self.form = _check.one_of("form", form, FORMS)
        self.distributed = bool(distributed)
        self.memory = ScoreMemory(_check.count("memory", memory, at_least=0, at_most=_check.MANY))

    def forward(self, scores: Tensor, relevance: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weighted loss of a batch.

        Args:
            scores: ``[items, classes]``, any real numbers (logits); higher is better.
            relevance: The same shape; bool, or 0 and 1. An item may be relevant to several classes, or
                to none (background).
            mask: bool, broadcast to ``scores``; False = this (item, class) pair is left out. Pairs left out
                do not enter the memory either.
        """
        scores, relevance, mask = _check.class_lists(scores, relevance, mask)
        self.memory._check_fits("scores", scores)
        if self.distributed:  # the lists are classes, so every process ranks the items of all
            scores, relevance = distributed.gather(scores), distributed.gather(relevance)
            mask = None if mask is None else distributed.gather(mask.contiguous())
        current, current_relevance, exists = scores, relevance, mask
        if self.memory.rows:
            old, old_relevance, old_mask = self.memory._views()
            now = mask if mask is not None else torch.ones_like(scores, dtype=torch.bool)
            exists = torch.cat([now, old_mask])
            scores = torch.cat([scores, old])
            relevance = torch.cat([relevance, old_relevance.to(relevance.dtype)])
        loss = self._weighted(scores, relevance, exists)
        # torchvision's detectors give a validation loss in training mode only: without a gradient nothing is kept
        if self.training and torch.is_grad_enabled():
            self.memory.push(current, current_relevance, mask)
        return loss

    def _weighted(self, scores: Tensor, relevance: Tensor, mask: Tensor | None) -> Tensor:
        loss: Tensor | None = None
        for weight, arrange in ((self.map_weight, torch.t), (self.pooled_weight, torch.flatten)):
            if weight:
                part = loss_of_lists(
                    arrange(scores),
                    arrange(relevance),
                    form=self.form,
                    lam=self.lam,
                    window=self.window,
                    margin=self.margin,
                    mask=None if mask is None else arrange(mask),
                    reduction="mean",
                )
                share = weight / (self.map_weight + self.pooled_weight)
                loss = part * share if loss is None else torch.add(loss, part, alpha=share)
        assert loss is not None  # one weight is > 0
        return loss

    def reset(self) -> None:
        """Empty the memory."""
        self.memory.reset()

    def extra_repr(self) -> str:
        weights = f"map_weight={self.map_weight}, pooled_weight={self.pooled_weight}"
        return f"{text_of(self.lam, self.window, self.margin)}, {weights}, form={self.form!r}"
