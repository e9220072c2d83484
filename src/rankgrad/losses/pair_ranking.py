"""Average precision among the items of a batch, with a hinge on their similarities. Beyond the paper."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rankgrad import _check
from rankgrad.losses._blocks import LossSpec
from rankgrad.losses.average_precision import AveragePrecisionLoss
from rankgrad.reach import Margin


class PairRankingLoss(AveragePrecisionLoss):
    r"""Average precision loss on a batch of embeddings, and a hinge on their similarities.

    For training without proxies: pairs, new classes in every batch. A loss on ranks is 0 as soon as the
    relevant items rank first, whatever the similarities are, so it does not counteract a common direction of all
    embeddings. The hinge does, once items of two classes are alike enough. With :math:`S_{ij}` the similarity of
    the batch's items i and j, it adds its weight times

    - **pull**: the mean of :math:`h^+ - S_{ij}` over the pairs of one class whose similarity is below :math:`h^+`;
    - **push**: the mean of :math:`S_{ij} - h^-` over the pairs of two classes whose similarity is above
      :math:`h^-`: those that are hardest to tell apart. The fewer there are, the more each one is pushed.

    Args:
        lam, window, margin, log, memory, max_relevant, distributed, process_group: As in
            :class:`AveragePrecisionLoss`; a window of 0.1 if none is given. The hinge acts in the batch alone.
        hinge: Its weight; 0 leaves it out. It pulls before it pushes: at 1 an untrained network whose last layer
            learns fast moves all items together in the first steps.
        pull: :math:`h^+`, the similarity that items of one class should reach.
        push: :math:`h^-`, the similarity that items of two classes should stay below.

    Example:
        >>> loss = rankgrad.PairRankingLoss()
        >>> embeddings = torch.randn(8, 16, requires_grad=True)
        >>> labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> loss(embeddings, labels).backward()
    """

    def __init__(
        self,
        *,
        lam: float | None = None,
        window: float | None = None,
        margin: Margin = 0.05,
        log: bool = False,
        hinge: float = 0.3,
        pull: float = 0.9,
        push: float = 0.6,
        memory: int = 0,
        max_relevant: int | None = None,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            lam=lam,
            window=0.1 if lam is None and window is None else window,
            margin=margin,
            log=log,
            memory=memory,
            max_relevant=max_relevant,
            distributed=distributed,
            process_group=process_group,
        )
        self.hinge = _check.non_negative("hinge", hinge)
        self.pull, self.push = _check.finite("pull", pull), _check.finite("push", push)

    def spec(self, dtype: torch.dtype) -> LossSpec:
        """What is computed of every list of the batch: ranks, and the hinge."""
        forces = "hinge" if self.hinge else ""
        return super().spec(dtype)._replace(forces=forces, upper=self.pull, lower=self.push, weight=self.hinge)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hinge={self.hinge}, pull={self.pull}, push={self.push}"
