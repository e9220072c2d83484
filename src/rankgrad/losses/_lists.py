"""The one road from score lists to a loss; the named losses are its forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine import forms, ops
from rankgrad.engine.precision import compute_dtype


def loss_of_lists(
    scores: Tensor,
    relevance: Tensor,
    *,
    form: str | Tensor | Callable[[Tensor], Tensor],
    lam: float,
    margin: float,
    mask: Tensor | None,
    reduction: str,
    check_finite: bool,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
) -> Tensor:
    """Validate, compute the loss of ``[..., n]`` lists and bind its gradient.

    Args:
        form: A name from :data:`rankgrad.engine.forms.FORMS`, the weights of a recall loss, or a callable W
            on counts.
        lists: How many lists count, a scalar tensor, where other processes have some of them.
    """
    scores = _check.floating("scores", scores)
    relevance = _check.relevance(relevance, scores)
    lam = _check.lam(lam)
    margin = _check.non_negative("margin", margin)
    mask = _check.mask(mask, scores)
    _check.one_of("reduction", reduction, _check.REDUCTIONS)
    if max_relevant is not None:
        max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
    if lists is not None and (_check.tensor("lists", lists).numel() != 1 or lists.is_floating_point()):
        raise _check.fail("lists", "one integer: how many lists count everywhere", lists)

    with_changes = ops.gradient_wanted(scores)
    everywhere = None if lists is None else lists.reshape(1)
    if isinstance(form, str | Tensor):
        name, weights = (form, None) if isinstance(form, str) else ("weights", form.detach())
        if weights is not None:
            _check.same_device("weight", weights, "scores", scores)
        options = (lam, margin, with_changes, check_finite, max_relevant, everywhere)
        return ops.named_loss(scores, reduction, relevance, mask, weights, name, *options)
    rows, relevant = ops.as_lists(scores), ops.as_lists(relevance)
    exists = None if mask is None else ops.as_lists(mask)
    losses, changes, items, counting = _with_callable(
        rows.detach(), relevant, exists, form, lam, margin, with_changes, check_finite, everywhere
    )
    loss: Tensor = ops.reduce_lists(rows, losses, changes, items, counting, lam, reduction)
    return loss.reshape(scores.shape[:-1] if reduction == "none" else ())


def _with_callable(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weight: Callable[[Tensor], Tensor],
    lam: float,
    margin: float,
    with_changes: bool,
    check_finite: bool,
    lists: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``ops.list_losses`` does, with a given W between the engine's two steps."""
    above, position, count, poison = ops.relevant_ranks(scores, relevance, mask, margin, check_finite)

    def values_of(counts: Tensor) -> Tensor:
        values = weight(counts)
        if not isinstance(values, Tensor) or values.shape != counts.shape:
            raise _check.fail("weight", f"to return a tensor of the counts' shape {list(counts.shape)}", values)
        return values.double()

    lists = (count > 0).sum(-1) if lists is None else lists
    items = torch.full_like(count, scores.shape[-1]) if mask is None else mask.sum(-1)
    if not with_changes:
        losses = forms.list_losses(values_of(above.double()), count)
        return losses + poison, above[..., :0], items, lists
    values, slope = torch.func.vjp(values_of, above.double())  # type: ignore[misc]
    (slopes,) = slope(torch.ones_like(values))
    steps = forms.score_steps(slopes.detach(), count, items, lists, lam, compute_dtype(scores.dtype))
    poison = poison.masked_fill(steps.isnan().any(-1), torch.nan)  # a slope that is not a number gives no gradient
    changes = ops.rank_changes(scores, relevance, mask, margin, position, steps.nan_to_num())
    return forms.list_losses(values, count) + poison, changes, items, lists
