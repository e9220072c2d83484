"""Recall loss (paper, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rankgrad import _check
from rankgrad.losses._list_loss import FormLike, loss_of_lists
from rankgrad.losses.embedding import EmbeddingLoss
from rankgrad.reach import Margin

#: What W is: ``"log"``, ``"loglog"``, weights of the first ranks (a 1-D tensor or a list), or a callable.
Weight = FormLike | Sequence[float]


def _checked(weight: Weight, scores: Tensor | None = None) -> FormLike:
    """Require a weight of one of the four kinds; a list of weights becomes a tensor on the scores' device."""
    if isinstance(weight, list | tuple):
        weights = [_check.non_negative("weight", one) for one in weight]
        device = scores.device if isinstance(scores, Tensor) else None
        return torch.tensor(weights, dtype=torch.float64, device=device)
    if isinstance(weight, Tensor):
        if weight.ndim != 1 or not weight.is_floating_point():
            raise _check.fail("weight", "a 1-D floating-point tensor or a list w_1, w_2, ...", weight)
        return weight
    if callable(weight):
        return weight
    if weight not in ("log", "loglog"):
        raise _check.fail("weight", "'log', 'loglog', a 1-D tensor, a list or a callable on counts", weight)
    return weight


def recall_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    weight: Weight = "log",
    mask: Tensor | None = None,
    reduction: str = "mean",
    check_finite: bool = False,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
    spread: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""Recall at every K at once: how many irrelevant items rank above each relevant one.

    With :math:`c_i` the number of irrelevant items at or above the relevant item i, a list with p relevant items
    has the loss :math:`\frac1p \sum_i W(c_i)`. With :math:`W(c) = w_1 + \dots + w_c` that is
    :math:`\sum_K w_K (1 - \tilde r@K)`, where :math:`\tilde r@K` is the refined recall,
    :func:`rankgrad.metrics.refined_recall_at_k`. Use it where R@K is reported; on embeddings use
    :class:`RecallLoss`.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        lam: Interpolation strength in the paper's units, finite and > 0; 0.2 to 4 in the paper. With neither it
            nor ``window`` the reach is automatic: the window is the spread of the call's scores (their standard
            deviation times :data:`rankgrad.reach.WINDOW_SHARE`), for scores on any scale.
        window: Instead of ``lam``: every relevant item is compared with the items up to this far above it in
            score, whatever its slope. The gradient is then :math:`-s_i m_i / w` for a relevant item with slope
            :math:`s_i` that passes :math:`m_i` irrelevant ones on its way up by :math:`w`; an irrelevant one gets
            the sum of :math:`s_i / w` of all that pass it.
        margin: Irrelevant scores are raised, relevant ones lowered by half of it before ranking. A number, or
            ``"auto"``: the spread times :data:`rankgrad.reach.MARGIN_SHARE`.
        weight: ``"log"``: W = log(1 + c); ``"loglog"``: W = log(1 + log(1 + c)); a callable W on float64
            counts, increasing, elementwise and differentiable; or weights :math:`w_1, w_2, \dots` >= 0 of the
            first ranks (0 beyond their end), a 1-D tensor or a list.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.
        check_finite: On a GPU a NaN score makes the loss NaN; True waits for the device and raises instead
            (as the CPU always does). The same for relevance that is neither 0 nor 1, and a W that is NaN.
        max_relevant: A bound on the relevant items of a list, if you know one: memory is then sized by it, and
            lists of which an eighth or more may be relevant are sorted whole. Only speed depends on it; if it
            is wrong, the CPU raises and on a GPU the loss is NaN.
        lists: How many lists count, a scalar tensor, where other processes have some of them; the result is then
            this call's share of their mean.
        spread: The spread of all scores, a scalar tensor, likewise.
        groups: For scores of one dimension: the id of each item's list, int64 in any order. Lists may have any
            lengths (one huge list among a million short ones): memory grows with the number of items alone.
        num_groups: How many groups there are; ids are then 0 ... num_groups - 1 (on a GPU others make the loss
            NaN), and ``reduction="none"`` has a place for each. Without it that is ordered by the ids that occur,
            which only a plain call on a CPU can tell.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant). Its gradient is linear in the
        upstream gradient: loss weights and GradScaler do not change ``lam``.

    Example:
        >>> scores = torch.tensor([0.9, 0.8, 0.3, 0.1], requires_grad=True)
        >>> relevance = torch.tensor([False, True, False, True])
        >>> loss = rankgrad.recall_loss(scores, relevance, lam=0.2)
        >>> loss  # c = 1 and 2: (log 2 + log 3) / 2
        tensor(0.8959, grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 1.2500, -1.2500,  0.0000,  0.0000])
    """
    return loss_of_lists(
        scores,
        relevance,
        form=_checked(weight, scores),
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


class RecallLoss(EmbeddingLoss):
    """Recall loss on a batch of embeddings; see :func:`recall_loss`. The paper's retrieval loss.

    Use it to reproduce the paper, or where R@K for given K matters more than the whole order (``weight`` takes
    weights for the first ranks). Otherwise begin with :class:`ProxyRankingLoss`, where the training classes
    are known, or :class:`PairRankingLoss`.

    Every embedding is a query with a list of all others (itself excluded), and a second list of what the memory
    holds. A class may have any number of items in a batch.

    Args:
        lam: Interpolation strength, > 0.
        window: Instead of ``lam``, as in :func:`recall_loss`. Neither given: the window is the standard
            deviation of the similarities.
        margin: Score margin, in cosine similarity; ``"auto"``: half the standard deviation of the similarities.
        weight: As in :func:`recall_loss`.
        memory: How many past batches to remember. Their embeddings, as they were then, make a second list for
            every query, less older copies of the query itself (``items``); all lists have the same weight. They
            are never ranked against fresh ones: a network could then lower the loss by moving all embeddings
            away from the remembered ones.
        max_relevant: As in :func:`recall_loss`: the most partners an item can have in the batch, or in the memory.
        distributed: With several processes of torch.distributed, the batch is all of theirs together: the value is
            the same in each, and after DistributedDataParallel's averaging so are the gradients, as if one process
            had the whole batch.
        process_group: The processes that share the batch, where these are not all (the data-parallel ones, beside
            tensor parallelism): the group DistributedDataParallel has.

    Example:
        >>> loss = rankgrad.RecallLoss(memory=3)
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
        weight: Weight = "loglog",
        memory: int = 0,
        max_relevant: int | None = None,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(lam, window, margin, memory, max_relevant, distributed, process_group)
        weight = _checked(weight)
        if isinstance(weight, Tensor):
            self.register_buffer("weight", weight)
        else:
            self.weight = weight

    @property
    def form(self) -> FormLike:
        """The weight."""
        return self.weight

    def extra_repr(self) -> str:
        weight = f"{len(self.weight)} weights" if isinstance(self.weight, torch.Tensor) else repr(self.weight)
        return f"{super().extra_repr()}, weight={weight}"
