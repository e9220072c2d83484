"""From score lists to a loss: the function that every named loss calls with its form, and the base of Modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.engine import forms, ops
from rankgrad.engine.layouts import layout_of
from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.request import Request
from rankgrad.engine.slopes import value_and_slope
from rankgrad.lists import Lists
from rankgrad.reach import Margin, margin_of, reach_of, text_of

#: A name in :data:`rankgrad.engine.forms.FORMS`, the weights of a recall loss, or W itself.
FormLike = str | Tensor | Callable[[Tensor], Tensor]


def loss_of_lists(
    scores: Tensor,
    relevance: Tensor,
    *,
    form: FormLike,
    lam: float | None = None,
    window: float | None = None,
    margin: Margin = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    check_finite: bool = False,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
    spread: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    """Validate, compute the loss of ``[..., n]`` lists and bind its gradient.

    Args:
        form: See :data:`FormLike`.
        lists: How many lists count, a scalar tensor, where other processes have some of them.
        spread: The spread of all scores, a scalar tensor, likewise.
        groups, num_groups: See :class:`rankgrad.lists.Lists`.
    """
    scores = _check.floating("scores", scores)
    relevance = _check.relevance(relevance, scores)
    dtype = compute_dtype(scores.dtype)
    reach = reach_of(lam, window, dtype)
    margin, margin_is_share = margin_of(margin, dtype)
    mask = _check.mask(mask, scores)
    _check.one_of("reduction", reduction, _check.REDUCTIONS)
    if max_relevant is not None:
        max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
    if lists is not None:
        if _check.tensor("lists", lists).numel() != 1 or lists.is_floating_point() or lists.dtype == torch.bool:
            raise _check.fail("lists", "one integer: how many lists count everywhere", lists)
        _check.same_device("lists", lists, "scores", scores)
        _check.numbers_of("lists", lists, lowest=0)
    _check.spread(spread, scores)
    wanted = ops.gradient_wanted(scores)
    tables = None
    if not isinstance(form, str):
        by_window = reach.kind != "lam"
        tables = tables_of(form, scores.shape[-1], scores.device, by_window=by_window, wanted=wanted)
    given = Lists(scores, groups, num_groups, by_list=reduction == "none")
    placed = given.put(scores)
    request = Request(
        placed.detach(),
        given.put(relevance),
        given.put_optional(mask),
        given.offsets,
        tables=None if tables is None else tables.detach(),
        spread=None if spread is None else spread.detach().double().reshape(1),
        lists=None if lists is None else lists.long().reshape(1),
        form=form if isinstance(form, str) else "tables",
        reach=reach.kind,
        strength=reach.strength,
        margin=margin,
        margin_is_share=margin_is_share,
        with_gradient=wanted,
        check_finite=check_finite,
        max_relevant=max_relevant,
    )
    if tables is not None and tables.requires_grad:
        loss = _loss_with_learned_weight(placed, request, tables[0], reduction)
        return loss.reshape(given.shape if reduction == "none" else ())
    return ops.list_loss(placed, request, reduction, given.shape)


def tables_of(
    form: Tensor | Callable[[Tensor], Tensor], n: int, device: torch.device, *, by_window: bool, wanted: bool
) -> Tensor:
    """W and its slope at all counts there can be in a list of ``n``, float64 ``[2, counts]``."""
    if isinstance(form, Tensor):
        if form.device != device:
            raise ValueError(f"weight: expected on the device of scores ({device}), received on {form.device}")
        _check.numbers_of("weight", form, lowest=0)
        if form.requires_grad:
            raise _check.fail("weight", "a tensor without gradient (parameters learn in a callable)", form)
        return forms.weight_tables(form.detach())

    def values_of(counts: Tensor) -> Tensor:
        values = form(counts)
        if not isinstance(values, Tensor) or values.shape != counts.shape:
            raise _check.fail("weight", f"to return a tensor of the counts' shape {list(counts.shape)}", values)
        return values.double()

    counts = torch.arange(n + 1, dtype=torch.float64, device=device)
    values, slopes = value_and_slope(values_of, counts, torch.ones_like(counts))
    if by_window:  # at 0, where a slope may be infinite, there is nothing to pass
        slopes = slopes.where(counts > 0, 0)
    bad = ~slopes.isfinite() if by_window else slopes.isnan()
    if wanted:  # a slope that is not a number gives no gradient
        values = values.masked_fill(bad, torch.nan)
    return torch.stack([values, slopes.masked_fill(bad, 0)])


def _loss_with_learned_weight(placed: Tensor, request: Request, values: Tensor, reduction: str) -> Tensor:
    """The loss where W has parameters that learn: its value depends on ``values``, W at all counts."""
    layout = layout_of(request)
    above, own, _ = ops.standings(*request)
    there = own > 0
    terms = values[above.clamp(max=len(values) - 1)].where(there, 0)
    losses, gradient, divisor, counting = ops.evaluate_op(*request)
    losses = layout.total(terms) / layout.total(there.long()).clamp(min=1) + 0 * losses  # NaN stays
    loss: Tensor = ops.reduce_lists(placed, losses, gradient, divisor, counting, request.offsets, reduction)
    return loss


class ListLoss(nn.Module):
    """Base of :class:`NDCGLoss` and :class:`SpearmanLoss`: a loss function of score lists with its settings."""

    def __init__(self, lam: float | None, window: float | None, margin: Margin) -> None:
        super().__init__()
        reach_of(lam, window)
        margin_of(margin)
        self.lam, self.window, self.margin = lam, window, margin

    def function(self, scores: Tensor, target: Tensor, **given: Any) -> Tensor:
        """The loss, with the settings that only a subclass has."""
        raise NotImplementedError

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        groups: Tensor | None = None,
        num_groups: int | None = None,
    ) -> Tensor:
        """Mean loss of the lists.

        Args:
            scores: ``[..., n]``, or ``[N]`` with ``groups``.
            target: Relevance, grades or target values in the same shape, as the function takes them.
            mask: bool, broadcast to ``scores``; False = the item does not exist.
            groups: int64 ids ``[N]`` in any order: each id is a list.
            num_groups: How many ids there are.
        """
        return self.function(
            scores,
            target,
            lam=self.lam,
            window=self.window,
            margin=self.margin,
            mask=mask,
            groups=groups,
            num_groups=num_groups,
        )

    def extra_repr(self) -> str:
        return text_of(self.lam, self.window, self.margin)
