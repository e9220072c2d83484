"""Average precision among the items of a batch, with a pull and a push on their similarities. Beyond the paper."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rankgrad import _check
from rankgrad.losses._blocks import LossSpec
from rankgrad.losses.average_precision import AveragePrecisionLoss
from rankgrad.reach import Margin


class PairRankingLoss(AveragePrecisionLoss):
    r"""Average precision loss on a batch of embeddings, and forces between two thresholds of their similarities.

    For training without proxies: pairs, new classes in every batch. A loss on ranks is 0 as soon as the
    relevant items rank first, whatever the similarities are. With :math:`S_{ij}` the similarity of the batch's
    items i and j, the forces add their weight times

    - **pull**: the mean over items i that have another one of their class of the mean of
      :math:`\max(0, h^+ - S_{ij})` over the items j of the class, where i itself and its copies count with 0;
    - **push**: the mean over items i of :math:`\log(1 + n_i)` with :math:`n_i` the items of other classes whose
      similarity is :math:`h^-` or more. Each of them is pushed by :math:`1 / (1 + n_i)`, however high it is.

    Where all similarities are alike and between the thresholds, the gradient of the push is the stronger one,
    unless a class is more than half of the batch: a step does not move all embeddings together.

    Args:
        lam, window, margin, log, memory, max_relevant, distributed, process_group: As in
            :class:`AveragePrecisionLoss`; a window of 0.1 if none is given. The forces act in the batch alone.
        forces: Their weight; 0 leaves them out.
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
        forces: float = 0.3,
        pull: float = 0.9,
        push: float = 0.4,
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
        self.forces = _check.non_negative("forces", forces)
        self.pull, self.push = _check.finite("pull", pull), _check.finite("push", push)

    def spec(self, dtype: torch.dtype) -> LossSpec:
        """What is computed of every list of the batch: ranks, and the forces."""
        return super().spec(dtype)._replace(forces=self.forces, upper=self.pull, lower=self.push)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, forces={self.forces}, pull={self.pull}, push={self.push}"
