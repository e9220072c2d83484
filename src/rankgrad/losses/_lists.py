"""The one road from score lists to a loss; the named losses are its forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine import forms, ops
from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.slopes import value_and_slope


def loss_of_lists(
    scores: Tensor,
    relevance: Tensor,
    *,
    form: str | Tensor | Callable[[Tensor], Tensor],
    lam: float | None,
    margin: float,
    mask: Tensor | None,
    reduction: str,
    check_finite: bool,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
    window: float | None = None,
) -> Tensor:
    """Validate, compute the loss of ``[..., n]`` lists and bind its gradient, by ``lam`` or by ``window``.

    Args:
        form: A name from :data:`rankgrad.engine.forms.FORMS`, the weights of a recall loss, or a callable W
            on counts.
        lists: How many lists count, a scalar tensor, where other processes have some of them.
    """
    scores = _check.floating("scores", scores)
    relevance = _check.relevance(relevance, scores)
    lam, window = _check.lam_or_window(lam, window)
    strength = 1.0 if lam is None else lam  # the gradient of a window needs no factor
    margin = _check.non_negative("margin", margin)
    mask = _check.mask(mask, scores)
    _check.one_of("reduction", reduction, _check.REDUCTIONS)
    if max_relevant is not None:
        max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
    if lists is not None and (_check.tensor("lists", lists).numel() != 1 or lists.is_floating_point()):
        raise _check.fail("lists", "one integer: how many lists count everywhere", lists)

    if isinstance(form, Tensor):
        _check.same_device("weight", form, "scores", scores)
    wanted = ops.gradient_wanted(scores)
    everywhere = None if lists is None else lists.reshape(1)
    if window is None and isinstance(form, str | Tensor):
        name, weights = (form, None) if isinstance(form, str) else ("weights", form.detach())
        options = (strength, margin, wanted, check_finite, max_relevant, everywhere)
        return ops.named_loss(scores, reduction, relevance, mask, weights, name, *options)
    rows, relevant = ops.as_lists(scores), ops.as_lists(relevance)
    exists = None if mask is None else ops.as_lists(mask)
    if window is None:
        parts = _with_callable(
            rows.detach(), relevant, exists, form, strength, margin, wanted, check_finite, everywhere
        )
    else:
        parts = _by_window(rows.detach(), relevant, exists, form, window, margin, wanted, check_finite, everywhere)
    loss: Tensor = ops.reduce_lists(rows, *parts, strength, reduction)
    return loss.reshape(scores.shape[:-1] if reduction == "none" else ())


def _by_window(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    form: str | Tensor | Callable[[Tensor], Tensor],
    window: float,
    margin: float,
    with_gradient: bool,
    check_finite: bool,
    lists: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``ops.list_losses`` does, with the gradient of a fixed score window in place of rank changes.

    The gradient of a list does not depend on how many there are: in the mean each is divided by that number, which
    stands where ``reduce_lists`` divides rank changes by lam times a list's items.
    """
    above, position, count, poison = ops.relevant_ranks(scores, relevance, mask, margin, check_finite)
    values, slopes = _terms(form, above)
    lists = (count > 0).sum(-1) if lists is None else lists
    losses = forms.list_losses(values, count) + poison
    gradient = scores[..., :0]
    if with_gradient:
        used = forms.in_use(count, slopes.shape[-1])
        if callable(form):  # whose slope may be infinite at 0, where nothing is above to be passed
            slopes = slopes.where(above > 0, 0)
        slopes = (slopes / count.clamp(min=1).unsqueeze(-1)).where(used, 0)
        gradient = ops.window_gradient(scores, relevance, mask, margin, position, slopes, window)
    return losses, gradient, lists.unsqueeze(-1).expand(losses.shape), lists


def _terms(form: str | Tensor | Callable[[Tensor], Tensor], above: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and slope of each relevant item, as :func:`rankgrad.engine.forms.item_terms`, also for a callable W."""
    if isinstance(form, str):
        return forms.item_terms(form, None, above)
    if isinstance(form, Tensor):
        return forms.item_terms("weights", form.detach(), above)

    def values_of(counts: Tensor) -> Tensor:
        values = form(counts)
        if not isinstance(values, Tensor) or values.shape != counts.shape:
            raise _check.fail("weight", f"to return a tensor of the counts' shape {list(counts.shape)}", values)
        return values.double()

    counts = above.double()
    return value_and_slope(values_of, counts, torch.ones_like(counts))


def _with_callable(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weight: str | Tensor | Callable[[Tensor], Tensor],
    lam: float,
    margin: float,
    with_changes: bool,
    check_finite: bool,
    lists: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``ops.list_losses`` does, with a given W between the engine's two steps."""
    above, position, count, poison = ops.relevant_ranks(scores, relevance, mask, margin, check_finite)

    values, slopes = _terms(weight, above)
    lists = (count > 0).sum(-1) if lists is None else lists
    items = torch.full_like(count, scores.shape[-1]) if mask is None else mask.sum(-1)
    if not with_changes:
        return forms.list_losses(values, count) + poison, above[..., :0], items, lists
    steps = forms.score_steps(slopes, count, items, lists, lam, compute_dtype(scores.dtype))
    poison = poison.masked_fill(steps.isnan().any(-1), torch.nan)  # a slope that is not a number gives no gradient
    changes = ops.rank_changes(scores, relevance, mask, margin, position, steps.nan_to_num())
    return forms.list_losses(values, count) + poison, changes, items, lists
