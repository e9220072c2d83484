"""A named loss from an engine's two steps, with plain torch between them."""

from types import ModuleType

import torch
from torch import Tensor

from rankgrad.engine import forms
from rankgrad.engine.precision import compute_dtype, count_dtype


def list_losses(
    engine: ModuleType,
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss of every list, and how far Algorithm 1 moves every item's rank.

    ``lists`` (``[calls]``) is how many lists count where this call has only some of them.

    Returns:
        ``losses`` (float64 ``[calls, lists]``, NaN where a score is), ``changes`` (integers
        ``[calls, lists, n]``, or ``[calls, lists, 0]`` without ``with_changes``), ``items`` (existing
        items of each list) and ``lists`` (how many lists count, ``[calls]``).
    """
    n = scores.shape[-1]
    above, position, count, poison = engine.relevant_ranks(scores, relevance, mask, margin)
    values, slopes = forms.item_terms(form, weights, above)
    losses = forms.list_losses(values, count) + poison
    items = torch.full_like(count, n) if mask is None else mask.sum(-1)
    lists = (count > 0).sum(-1) if lists is None else lists
    if not with_changes:
        return losses, above.new_empty(*count.shape, 0, dtype=count_dtype(n)), items, lists
    steps = forms.score_steps(slopes, count, items, lists, lam, compute_dtype(scores.dtype))
    return losses, engine.rank_changes(scores, relevance, mask, margin, position, steps), items, lists
