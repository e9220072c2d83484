"""Learned class proxies that rank the batch, with bars to clear. Beyond the paper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.engine.label_check import unknown_labels
from rankgrad.engine.precision import without_autocast
from rankgrad.losses.average_precision import AveragePrecisionLoss
from rankgrad.losses.recall import recall_loss
from rankgrad.pairs import Lookup, check_batch, unit_length


class ProxyRankingLoss(nn.Module):
    r"""Recall loss of learned class vectors (proxies) that rank the batch, with two bars.

    A batch shows a few classes; the proxies are there in every step. Each ranks the batch's items by cosine
    similarity, those of its class relevant. Ranks alone are content as soon as the relevant items stand first, and
    say nothing about the scores. So there are two more items of fixed score, the bars:

    - pull: in the list of every class of the batch an irrelevant item stands at ``+threshold``;
    - push: every class, in the batch or not, ranks the items of the *other* classes against one relevant item at
      ``-threshold``.

    The relevant items have to rise above the upper bar and no further, and all others to sink below the lower
    one, however far above them the relevant ones are: classes need not shrink, and the embeddings stay spread out.
    Both are recall losses with :math:`W(c) = \log(1 + c)` and a fixed window. ``pairs`` adds the average precision
    loss among the items of the batch (window 0.1, margin 0.05). ``attraction`` pulls items of a class together
    however well they rank: ranks are content early, and so are bars. (On CUB: +0.5 R@1 and +1.6 mAP@R on held-out
    training classes, +0.8 and +0.9 on the test classes; benchmarks/results, cub-held-out and h200-cub.)

    Args:
        num_classes: How many classes there are; labels are 0 ... num_classes - 1.
        embedding_size: Length of an embedding.
        window: How far every relevant item (a bar too) looks up, as in :func:`recall_loss`.
        threshold: Height of the bars, a cosine similarity.
        pairs: Weight of the average precision loss among the items; 0 leaves it out.
        attraction: Weight of (1 - cosine similarity), averaged over the items of the same class, then over items
            (two rows of one image attract each other too); 0 leaves it out.
        distributed: With several processes, take the batches of all of them as one. Every process has then the
            gradient of the whole batch at its proxies: leave this module out of DistributedDataParallel.
        process_group: As in :class:`RecallLoss`.

    The proxies are parameters: give them to the optimiser, at a rate some thousand times the backbone's.

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
        pairs: float = 0.3,
        attraction: float = 0.15,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _check.count("num_classes", num_classes, at_least=1)
        _check.count("embedding_size", embedding_size, at_least=1)
        self.window = _check.positive("window", window)
        self.threshold = _check.non_negative("threshold", threshold)
        self.pairs = _check.non_negative("pairs", pairs)
        self.attraction = _check.non_negative("attraction", attraction)
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
        own = torch.arange(len(self.proxies), device=labels.device)
        scores, relevance, _ = Lookup(unit_length(self.proxies), own, None, rows, labels, labels).pairs()
        loss = self._pull(scores, relevance) + self._push(scores, relevance)
        if self.pairs:
            loss = loss + self.pairs * self.item_loss(rows, labels, items=items)
        if self.attraction:
            loss = loss + self.attraction * _apart(rows, relevance)
        return loss * (1 + poison)  # times NaN, so that no gradient looks sound

    def _pull(self, scores: Tensor, relevance: Tensor) -> Tensor:
        """Items rise above those of other classes and above the upper bar, one more irrelevant item."""
        scores, relevance = _with_one_more(scores, self.threshold), _with_one_more(relevance, False)
        return recall_loss(scores, relevance, window=self.window, weight="log")

    def _push(self, scores: Tensor, relevance: Tensor) -> Tensor:
        """Items of other classes sink below the lower bar, the only relevant item there is."""
        exists = _with_one_more(~relevance, True)
        scores, relevance = _with_one_more(scores, -self.threshold), _with_one_more(relevance, True)
        return recall_loss(scores, relevance, window=self.window, weight="log", mask=exists)

    def extra_repr(self) -> str:
        classes, size = self.proxies.shape
        weights = f"pairs={self.pairs}, attraction={self.attraction}"
        return f"{classes}, {size}, window={self.window}, threshold={self.threshold}, {weights}"


def _with_one_more(lists: Tensor, value: float) -> Tensor:
    """``[lists, n]`` with a column of this value behind."""
    return torch.nn.functional.pad(lists, (0, 1), value=value)


def _apart(rows: Tensor, relevance: Tensor) -> Tensor:
    """1 - similarity of an item to the others of its class, mean over the items that have one; 0 without any.

    The similarities of a class sum up to the square of the sum of its rows: no matrix of pairs is needed.
    """
    with without_autocast(rows.device.type):
        members = relevance.to(rows.dtype)
        many, sums = members.sum(1), members @ rows
        similarity = (sums.square().sum(1) - members @ rows.square().sum(1)) / (many * (many - 1)).clamp(min=1)
        counted = many.where(many > 1, 0)
        return ((1 - similarity) * counted).sum() / counted.sum().clamp(min=1)
