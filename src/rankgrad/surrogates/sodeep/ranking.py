"""A trained sorter in place of the ranking."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rankgrad.surrogates._lists import SurrogateLists, read_lists, read_scores
from rankgrad.surrogates._soft_ranks import average_precision_losses
from rankgrad.surrogates.sodeep.networks import CNNSorter, LSTMSorter, Sorter, filled


def sodeep_rank(scores: Tensor, *, sorter: Sorter, mask: Tensor | None = None) -> Tensor:
    r"""Soft ranks from a trained sorter: :math:`\tilde r = f_\theta(s)`.

    Scores unlike those the sorter was trained with (beyond [-4, 4] or so, see
    :func:`rankgrad.lab.sodeep.synthetic_lists`) are sorted badly, and an item's rank depends a little on its
    index.

    Args:
        scores: ``[..., n]``, higher is better; n up to ``sorter.length``.
        sorter: From :func:`rankgrad.lab.sodeep.train` or :func:`rankgrad.lab.sodeep.load`. Leave it in training
            mode (nothing in it depends on that): in evaluation mode cuDNN has no backward pass for an LSTM.
        mask: bool, broadcast to ``scores``; items that do not exist tie behind all others, without gradient.

    Returns:
        Soft ranks in the shape of ``scores``, about 1 for the best.

    Example:
        >>> sorter = rankgrad.surrogates.sodeep.LSTMSorter(length=20, hidden=8)  # untrained
        >>> rankgrad.surrogates.sodeep_rank(torch.randn(3, 20), sorter=sorter).shape
        torch.Size([3, 20])

    Reference:
        Engilberge et al., SoDeep: a sorting deep net to learn ranking loss surrogates, CVPR 2019.
    """
    lists = read_scores(scores, mask)
    return lists.ranks(_sorted(lists, sorter))


def sodeep_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    sorter: Sorter,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus average precision with the ranks of :func:`sodeep_rank`.

    One list has the loss :math:`1 - \frac1p \sum_i r^+_i / \tilde r_i` over its relevant items, :math:`r^+_i`
    their exact ranks among themselves, held constant. O(n h^2) for an LSTM with h units.

    Args:
        scores: ``[..., n]``, higher is better; n up to ``sorter.length``.
        relevance: The same shape; bool, or 0 and 1.
        sorter: As in :func:`sodeep_rank`.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant).

    Example:
        >>> sorter = rankgrad.surrogates.sodeep.LSTMSorter(length=3, hidden=8)  # untrained
        >>> scores, relevance = torch.tensor([0.9, 0.2, 0.1]), torch.tensor([True, False, False])
        >>> rankgrad.surrogates.sodeep_loss(scores, relevance, sorter=sorter).isfinite()
        tensor(True)

    Reference:
        Engilberge et al., SoDeep: a sorting deep net to learn ranking loss surrogates, CVPR 2019.
    """
    lists = read_lists(scores, relevance, mask, reduction)
    return lists.reduce(average_precision_losses(lists, _sorted(lists, sorter)), reduction)


def _sorted(lists: SurrogateLists, sorter: Sorter) -> Tensor:
    if not isinstance(sorter, LSTMSorter | CNNSorter):
        raise TypeError(f"sorter: expected an LSTMSorter or a CNNSorter, received {type(sorter).__name__}")
    n = lists.scores.shape[-1]
    if n > sorter.length:
        raise ValueError(f"scores: expected lists of at most {sorter.length} items (the sorter's), received {n}")
    room = (0, sorter.length - n)
    scores, exists = F.pad(lists.scores, room), F.pad(lists.exists, room)
    # Existing items to the front, in their order, whatever lies between them: masked is removed.
    order = (~exists).to(torch.int8).argsort(dim=-1, stable=True)
    values = filled(scores.gather(-1, order), exists.gather(-1, order))
    ranks: Tensor = sorter(values.to(next(sorter.parameters()).dtype)) * sorter.length
    return torch.zeros_like(scores).scatter(-1, order, ranks.to(scores.dtype))[:, :n]
