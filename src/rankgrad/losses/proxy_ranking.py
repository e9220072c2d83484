"""Learned class proxies that rank the batch, between two thresholds. Beyond the paper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.engine.label_check import unknown_labels
from rankgrad.losses._blocks import GlobalStats, LossSpec, lookup_loss
from rankgrad.losses.average_precision import AveragePrecisionLoss
from rankgrad.pairs import Lookup, check_batch, unit_length

#: The weight ``"auto"`` of the pairs is 1 while a batch shows this share of the classes or more, then it grows as
#: the share's inverse, up to the largest: the smaller the share, the less often a proxy sees items of its class.
FULL_SHARE, LARGEST_WEIGHT = 1 / 3, 4.0


class ProxyRankingLoss(nn.Module):
    r"""Learned class vectors (proxies) rank the batch, and items keep to their side of two thresholds.

    A batch shows a few classes; the proxies are there in every step. With :math:`S_{cj}` the cosine similarity of
    proxy c and item j, C classes of which K are in the batch, :math:`p_c` items of class c, window w and
    threshold t, the loss is the sum of

    - **ranks**: :func:`recall_loss` of each proxy's list, the items of its class relevant,
      :math:`W = \log(1 + c)`, window w;
    - **upper**: :math:`\frac1K \sum_c \frac1{p_c} \sum_{i \in c} \max(0, t - S_{ci}) / w`: items rise above t;
    - **lower**: :math:`\frac1C \sum_c \log(1 + n_c)` with :math:`n_c` the items of other classes at or above -t.
      Each of them is pushed by :math:`1 / ((1 + n_c) w C)`, however high it is;
    - **pairs**: the average precision loss among the items (window 0.1, margin 0.05), times its weight.

    Ranks do not depend on the level of the scores: their gradients sum to zero in every list. The upper and the
    lower part do, with equal strength: moving all items together, towards the proxies or away from them, does not
    lower the loss. Both act at any distance. So the embeddings stay spread out from the first step on.

    Args:
        num_classes: How many classes there are; labels are 0 ... num_classes - 1.
        embedding_size: Length of an embedding.
        window: The reach of every relevant item, as in :func:`recall_loss`.
        threshold: The upper threshold, a cosine similarity; the lower one is its negative.
        pairs: Weight of the average precision loss among the items; 0 leaves it out. ``"auto"``: 1 or, where a
            batch shows less than a third of the classes, :math:`C / 3K`, 4 at most.
        distributed: With several processes, take the batches of all of them as one. The proxies of every process
            then get the gradient of the whole batch: leave this module out of DistributedDataParallel.
        process_group: As in :class:`RecallLoss`.

    The proxies are parameters, with a rate of their own: see :func:`rankgrad.parameter_groups`.

    Example:
        >>> loss = rankgrad.ProxyRankingLoss(num_classes=4, embedding_size=16)
        >>> embeddings = torch.randn(8, 16, requires_grad=True)
        >>> labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> loss(embeddings, labels).backward()
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        window: float = 0.4,
        threshold: float = 0.1,
        pairs: float | str = "auto",
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _check.count("num_classes", num_classes, at_least=1, at_most=_check.MANY)
        _check.count("embedding_size", embedding_size, at_least=1, at_most=_check.MANY)
        self.window = _check.positive("window", window)
        self.threshold = _check.non_negative("threshold", threshold)
        if isinstance(pairs, str) and pairs != "auto":
            raise _check.fail("pairs", "a number >= 0 or 'auto'", pairs)
        self.pairs = pairs if isinstance(pairs, str) else _check.non_negative("pairs", pairs)
        self.processes = Processes(distributed, process_group)
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_size))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self.item_loss = AveragePrecisionLoss(window=0.1, margin=0.05)

    def forward(self, embeddings: Tensor, labels: Tensor, *, items: Tensor | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            embeddings: ``[B, embedding_size]``, any float dtype; L2-normalised here, in float32.
            labels: ``[B]`` integers from 0 to ``num_classes - 1``. Others are an error on the CPU; on a GPU, where
                asking would wait for the device, the loss is NaN.
            items: As in :class:`RecallLoss`: which image each row is.
        """
        check_batch(embeddings, labels, None, None, None, items)
        if embeddings.shape[1] != self.proxies.shape[1]:
            raise _check.fail("embeddings", f"rows of length {self.proxies.shape[1]}, as the proxies", embeddings)
        poison = self.processes.total(unknown_labels(labels, len(self.proxies)))
        rows = unit_length(embeddings)
        if self.processes.several:
            rows, labels = self.processes.gather(rows), self.processes.gather(labels)
            items = None if items is None else self.processes.gather(items)
        classes = torch.arange(len(self.proxies), device=labels.device)
        lists = Lookup(unit_length(self.proxies), classes, None, rows, labels, labels)
        loss = lookup_loss(lists, GlobalStats(), self.spec())
        if self.pairs:
            loss = loss + self._pair_weight(labels) * self.item_loss(rows, labels, items=items)
        return loss * (1 + poison)  # times NaN, so that every gradient is NaN

    def _pair_weight(self, labels: Tensor) -> float | Tensor:
        """The weight of the pairs in a batch with these labels; the device is not waited for."""
        if not isinstance(self.pairs, str):
            return self.pairs
        ordered = labels.sort().values
        classes = 1 + (ordered[1:] != ordered[:-1]).sum()
        return (FULL_SHARE * len(self.proxies) / classes).clamp(1.0, LARGEST_WEIGHT)

    def spec(self) -> LossSpec:
        """What is computed of the list of every proxy: its ranks, and the two thresholds."""
        t, w = self.threshold, self.window
        return LossSpec("log", "window", w, forces="balanced", upper=t, lower=-t, weight=1 / w)

    def extra_repr(self) -> str:
        classes, size = self.proxies.shape
        return f"{classes}, {size}, window={self.window}, threshold={self.threshold}, pairs={self.pairs!r}"
