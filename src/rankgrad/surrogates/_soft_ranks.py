"""Average precision from soft ranks: what turns a surrogate of the ranking into a loss."""

from __future__ import annotations

from torch import Tensor

from rankgrad.engine.layouts import Rows
from rankgrad.surrogates._lists import SurrogateLists

#: A soft rank may fall below 1 where its method errs; only a division by (nearly) nothing is kept away.
_LEAST_RANK = 0.5


def average_precision_losses(lists: SurrogateLists, ranks: Tensor) -> Tensor:
    r"""One minus :math:`\frac1p \sum_i r^+_i / \tilde r_i` of each list, ``[lists]``.

    :math:`\tilde r_i` are the soft ranks ``[lists, n]``; :math:`r^+_i`, the rank among the relevant items, is
    exact and held constant, as in our own AP loss. Soft ranks that are too small can bring the loss below 0.
    """
    rows = Rows()
    own = rows.ranks_among(lists.relevant, rows.order(lists.scores.detach(), lists.relevant, lists.exists))
    precision = own.to(ranks.dtype) / ranks.clamp(min=_LEAST_RANK)
    count = lists.relevant.sum(-1)
    return 1 - precision.where(lists.relevant, 0).sum(-1) / count.clamp(min=1)
