"""The classifier's loss of a detector's regions: ranks per class and pooled, beside cross entropy.

A region has one logit a class, and one for the background in front. What is ranked, and what scores a detection at
test time, is made of them by :func:`class_log_odds`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad import _check
from rankgrad.engine.label_check import unknown_labels
from rankgrad.engine.precision import without_autocast
from rankgrad.losses import ClassRankingLoss
from rankgrad.reach import Margin

_IGNORED = -100  # the label that torch's cross entropy ignores: of regions that do not exist

#: How class logits become one number per class, see :func:`class_log_odds`.
SCORES = ("odds", "softmax", "logits")


def class_log_odds(class_logits: Tensor, scores: str) -> Tensor:
    r"""The log-odds of each class, without the background; their sigmoid is the score of a detection.

    With :math:`z_0` the logit of the background:

    * ``"odds"``: :math:`z_c - z_0`, the class against the background, whatever the logits of the other classes;
    * ``"softmax"``: :math:`z_c - \log \sum_{k \ne c} e^{z_k}`, so that the score is the softmax probability;
    * ``"logits"``: :math:`z_c`, for a head whose background column was never trained.

    Args:
        class_logits: ``[regions, 1 + classes]``, background first.
        scores: ``"odds"``, ``"softmax"`` or ``"logits"``.

    Returns:
        ``[regions, classes]``.

    Example:
        >>> from rankgrad.detection import class_log_odds
        >>> class_log_odds(torch.tensor([[1.0, 3.0, 0.0]]), scores="odds")
        tensor([[ 2., -1.]])
    """
    _check.one_of("scores", scores, SCORES)
    if scores == "logits":
        return class_logits[:, 1:]
    if scores == "odds":
        # not two slices: the gradient of a split is one launch, of each slice two
        background, classes = torch.split(class_logits, [1, class_logits.shape[1] - 1], dim=1)
        return classes - background
    # log-odds do not change when all logits of a row do; near 0 half precision keeps what they differ by
    class_logits = class_logits - class_logits.detach().amax(1, keepdim=True)
    return (class_logits - _sum_of_others(class_logits))[:, 1:]


def _sum_of_others(logits: Tensor) -> Tensor:
    """``[n, m] -> [n, m]``: the log of the sum of the exponentials of all others in the row.

    Each exponential is subtracted from the sum of its row, which is accurate while it is at most half of the sum.
    Only the largest can exceed half: for it the others are summed.
    """
    largest = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.argmax(1, keepdim=True), True)
    whole = logits.logsumexp(1, keepdim=True)
    share = (logits - whole).exp().masked_fill(largest, 0)
    beside_largest = logits.masked_fill(largest, -torch.inf).logsumexp(1, keepdim=True)
    return torch.where(largest, beside_largest, whole + torch.log1p(-share))


def class_scores(class_logits: Tensor, scores: str) -> Tensor:
    """Scores in [0, 1] of each class, ``[regions, classes]``: the sigmoid of :func:`class_log_odds`.

    Args:
        class_logits: ``[regions, 1 + classes]``, background first.
        scores: As in :func:`class_log_odds`.

    Example:
        >>> from rankgrad.detection import class_scores
        >>> class_scores(torch.zeros(1, 3), scores="odds")
        tensor([[0.5000, 0.5000]])
    """
    if scores == "softmax":  # the same number, computed directly
        return class_logits.softmax(1)[:, 1:]
    return class_log_odds(class_logits, scores).sigmoid()


class RegionLoss(nn.Module):
    r"""Ranking loss for the region classifier of a detector, blended with cross entropy.

    ``cross_entropy`` times the cross entropy plus ``ranking_weight`` times :class:`rankgrad.ClassRankingLoss` on
    the log-odds of the classes: for each class a list of all regions, and one list of all (region, class) pairs;
    a background region is relevant to nothing. The paper's form is
    ``RegionLoss(form="ap", ranked="logits", ranking_weight=1, cross_entropy=0)``. From random weights a linear
    classifier hardly improves with it, and a detector ends five points lower: AP's slope vanishes where ranks are
    bad (``rankgrad figure cold-start`` shows it). The log form has a slope from the start; cross entropy gives the
    scores a scale that a threshold can use. With the default weight both together have twice the gradient of cross
    entropy alone in the first steps, 1.2 times in the last; at weight 1 it is four to seven times in the first,
    and the gain is lost (benchmarks/results, voc-choose).

    Without foreground in batch and memory the ranking loss is 0; a class without a region there does not count; no
    regions at all give 0. Logits in half precision are ranked as float32 values.

    Args:
        form: What a list's loss is: ``"ap"``, ``"log_ap"``, ``"log"`` or ``"loglog"``.
        ranked: What is ranked; see :func:`class_log_odds`. Without cross entropy it is also the right score at
            test time. Beside it softmax is: ranked odds score better early in training (on VOC's val images, after
            5 epochs, an AP50 of 63.2 against 62.2) and worse at its end (65.6 against 66.6 after 12).
        ranking_weight: Of the ranking loss.
        cross_entropy: Weight of the cross entropy; 0 leaves it out.
        lam, margin, memory, map_weight, pooled_weight, distributed, window: As in
            :class:`rankgrad.ClassRankingLoss`; ``lam=None`` makes room for a window, or for the automatic reach.
            With ``distributed`` the lists are over the regions of all processes; the cross entropy stays each
            process's own mean, as in torchvision, and DistributedDataParallel averages it. The loss is a mean over
            the relevant regions of batch and memory: with ``memory=0`` those of the batch have about eight times
            the gradient, so take an eighth of the weight.

    Example:
        >>> from rankgrad.detection import RegionLoss
        >>> loss = RegionLoss(memory=0)
        >>> class_logits = torch.randn(64, 1 + 5, requires_grad=True)
        >>> loss(class_logits, torch.randint(0, 6, (64,))).backward()
    """

    def __init__(
        self,
        *,
        form: str = "log_ap",
        ranked: str = "odds",
        ranking_weight: float = 0.3,
        cross_entropy: float = 1.0,
        lam: float | None = 0.5,
        margin: Margin = 0.15,
        memory: int = 7,
        map_weight: float = 2,
        pooled_weight: float = 1,
        distributed: bool = False,
        window: float | None = None,
    ) -> None:
        super().__init__()
        self.ranked = _check.one_of("ranked", ranked, SCORES)
        self.ranking_weight = _check.positive("ranking_weight", ranking_weight)
        self.cross_entropy = _check.non_negative("cross_entropy", cross_entropy)
        self.ranking = ClassRankingLoss(
            lam=lam,
            margin=margin,
            memory=memory,
            map_weight=map_weight,
            pooled_weight=pooled_weight,
            form=form,
            distributed=distributed,
            window=window,
        )

    @property
    def scores(self) -> str:
        """What scores a detection at test time: softmax where cross entropy trains it too, else what is ranked."""
        return "softmax" if self.cross_entropy else self.ranked

    def forward(self, class_logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss of the regions of a batch.

        Args:
            class_logits: ``[regions, 1 + classes]``, background first.
            labels: ``[regions]`` int64; 0 is background. One beyond the classes is an error on the CPU.
            mask: ``[regions]`` bool; False = this region does not exist.
        """
        class_logits = _check.floating("class_logits", class_logits, ndim=2)
        _check.per_row("labels", labels, "class_logits", class_logits)
        mask = _check.mask(mask, labels)
        if labels.device.type == "cpu":
            unknown_labels(labels if mask is None else labels.where(mask, 0), class_logits.shape[1])
        with without_autocast(class_logits.device.type):
            logits = class_logits if class_logits.dtype == torch.float64 else class_logits.float()
            classes = torch.arange(1, logits.shape[1], device=logits.device)
            relevance = labels.unsqueeze(1) == classes
            ranked = class_log_odds(logits, self.ranked)
            there = None if mask is None else mask.unsqueeze(1)
            loss: Tensor = self.ranking_weight * self.ranking(ranked, relevance, there)
            if self.cross_entropy:
                loss = torch.add(loss, _cross_entropy(logits, labels, mask), alpha=self.cross_entropy)
        return loss

    def reset(self) -> None:
        """Empty the memory."""
        self.ranking.reset()

    def extra_repr(self) -> str:
        weights = f"ranking_weight={self.ranking_weight}, cross_entropy={self.cross_entropy}"
        return f"ranked={self.ranked!r}, {weights}"


def padded(class_logits: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and labels, filled up to ``rows`` regions, and the mask of those that exist."""
    more = rows - len(class_logits)
    mask = torch.arange(rows, device=class_logits.device) < len(class_logits)
    return (
        torch.cat([class_logits, class_logits.new_zeros(more, class_logits.shape[1])]),
        torch.cat([labels, labels.new_zeros(more)]),
        mask,
    )


def _cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the regions that exist; 0 of none (torch's own gives NaN)."""
    if mask is None:
        return F.cross_entropy(logits, labels) if len(logits) else logits.sum()
    there = labels.masked_fill(~mask, _IGNORED)
    return F.cross_entropy(logits, there, reduction="sum") / mask.sum().clamp(min=1)
