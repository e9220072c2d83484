"""The plain sort-based engine: oracle, fallback and benchmark baseline. Any device, any dtype, ragged lists too.

Whole lists are ranked before and after the relevant scores have moved: Algorithm 1 as it is written.
"""

import torch
from torch import Tensor

from rankgrad.engine import forms
from rankgrad.engine.layouts import Layout, layout_of
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.request import Answer, Request


def _broadcast(value: float | Tensor, scores: Tensor) -> Tensor:
    """A number of all calls, or one of each, ``[calls]``, in the shape and dtype to be added to the scores."""
    if isinstance(value, Tensor):
        return value.reshape(-1, *[1] * (scores.ndim - 1)).to(scores.dtype)
    return torch.full((), value, dtype=scores.dtype, device=scores.device)


def shifted(request: Request, relevant: Tensor) -> Tensor:
    """Scores after the margin: irrelevant items up by half of it, relevant items down."""
    scores = request.scores.to(request.dtype)
    half = _broadcast(request.half_margin(), scores)
    return scores + torch.where(relevant, -half, half)


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    lists = layout_of(request)
    scores, mask = request.scores, request.mask
    exists = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    relevant = request.relevance & exists
    y = shifted(request, relevant)
    before = lists.order(y, relevant, exists)
    rank, own = lists.ranks(before), lists.ranks_among(relevant, before)
    above = (rank - own).where(relevant, 0)
    count, items = lists.total(relevant.long()), lists.total(exists.long())
    counting = (count > 0).sum(-1) if request.lists is None else request.lists
    values, slopes = forms.terms(request.form, request.tables, above, own)
    poison = lists.total((scores.isnan() & exists).long()) > 0
    losses = (lists.total(values.where(relevant, 0)) / count.clamp(min=1)).masked_fill(poison, torch.nan)
    by_window = request.by_window
    if by_window:
        divisor = (counting.clamp(min=1).double() * request.window()).unsqueeze(-1).expand(losses.shape)
    else:
        divisor = request.strength * items.clamp(min=1).double()
    if not request.with_gradient:
        nothing = scores.new_empty(0, dtype=request.dtype if by_window else count_dtype(scores.shape[-1]))
        return Answer(losses, nothing.expand(*scores.shape[:-1], 0), divisor.contiguous(), counting)
    if by_window:
        gradient = _window_gradient(request, lists, y, relevant, exists, before, above, slopes, count)
    else:
        scale = (
            request.strength * items.double() / counting.clamp(min=1).double().unsqueeze(-1) / count.clamp(min=1)
        )
        steps = (lists.per_item(scale) * slopes).where(relevant, 0).to(y.dtype)
        gradient = lists.ranks(lists.order(y + steps, relevant, exists)) - rank
        gradient = gradient.masked_fill_(~exists, 0).to(count_dtype(scores.shape[-1]))
    return Answer(losses, gradient, divisor.contiguous(), counting)


def _window_gradient(
    request: Request,
    lists: Layout,
    y: Tensor,
    relevant: Tensor,
    exists: Tensor,
    before: Tensor,
    above: Tensor,
    slopes: Tensor,
    count: Tensor,
) -> Tensor:
    """Sums of the slopes of the relevant items that pass, or are passed, when all of them move up by the window.

    With a lambda of its own for each relevant item, ``window / slope_i``, all of them move equally far:

        gradient_i = -slope_i / p * (irrelevant j with y_i <= y_j < y_i + window)
        gradient_j = sum over the relevant i with y_i <= y_j < y_i + window of slope_i / p

    The sums are those of integers, slopes in units of a power of two: every engine, in any order, has the same
    bits.
    """
    moved = torch.where(relevant, y + _broadcast(request.window(), y), y)
    after = lists.order(moved, relevant, exists)
    passed = above - (lists.ranks(after) - lists.ranks_among(relevant, after))
    slopes = slopes.where(relevant & (above > 0), 0)
    exponent = _exponent(lists.largest(slopes.abs()), count)
    units = (slopes * lists.per_item(_power_of_two(exponent))).long()
    sums = lists.sums_above(units, after) - lists.sums_above(units, before)
    others = sums.double() * lists.per_item(_power_of_two(-exponent))
    gradient = torch.where(relevant, -(slopes * passed), others) / lists.per_item(count.clamp(min=1))
    return gradient.where(exists, 0).to(y.dtype)


def _exponent(top: Tensor, count: Tensor) -> Tensor:
    """Slopes times two to this power are summed as integers: as many bits as p of them leave room for."""
    bits = torch.frexp(count.double()).exponent  # of a count: how many bits it has
    return 61 - bits - torch.frexp(top).exponent.clamp(min=-900)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, as float64: torch.ldexp takes a power in float32 in some versions."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def standings(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand: what metrics are made of.

    Returns:
        ``above``, irrelevant items at or above a relevant one, and ``own``, its rank among the relevant ones (0 in
        places without one), both int64 in the shape of the scores, each list's in any order; ``poison``, float64
        ``[calls, lists]``: NaN where a score is NaN, else 0.
    """
    lists = layout_of(request)
    scores, mask = request.scores, request.mask
    exists = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    relevant = request.relevance & exists
    order = lists.order(shifted(request, relevant), relevant, exists)
    own = lists.ranks_among(relevant, order)
    bad = lists.total((scores.isnan() & exists).long()) > 0
    poison = torch.zeros_like(bad, dtype=torch.float64).masked_fill_(bad, torch.nan)
    return (lists.ranks(order) - own).where(relevant, 0), own.where(relevant, 0), poison
