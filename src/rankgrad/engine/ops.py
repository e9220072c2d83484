"""The engines as ops of torch: opaque to torch.compile, with fake kernels, vmap and autograd.

One call is one evaluation of a loss with its own number L of lists that count. A plain call has one; vmap makes
each of its elements a call.
"""

# No `from __future__ import annotations`: torch reads the annotations to make the ops' schemas.
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine import cuda, zero_gradients
from rankgrad.engine.dispatch import engine_for, has_triton
from rankgrad.engine.forms import terms
from rankgrad.engine.layouts import Ragged, Rows, layout_of
from rankgrad.engine.precision import compute_dtype, count_dtype
from rankgrad.engine.registration import (
    check_nan,
    fake_of,
    is_plain_call,
    op,
    op_on,
    vmap_over_calls,
    waits_for_checks,
)
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.spread import spread

_BLOCK = 1 << 18  # numbers scaled at a time: they stay in the cache

# ---------------------------------------------------------------------------- reading the arguments


def _ready(request: Request, *, marked: bool) -> tuple[ModuleType, Request, Tensor | None]:
    """The engine, the checked request with bool relevance and its spread, and NaN where relevance was not 0 or 1.

    Where a check would wait for the device, such relevance makes the loss NaN instead; ``marked``: the GPU kernels
    do that themselves.
    """
    engine = engine_for(request)
    checked = waits_for_checks(request.scores, request.check_finite)
    relevance, mask, poison = request.relevance, request.mask, None
    if relevance.dtype != torch.bool and (checked or engine is not cuda or not marked):
        relevant = relevance != 0
        odd = relevant & (relevance != 1)
        odd = odd if mask is None else odd & mask
        if not checked:
            poison = (layout_of(request).total(odd.long()) > 0).double()
            poison = poison.masked_fill_(poison > 0, torch.nan)
        elif bool(odd.any()):
            raise _check.fail("relevance", "only 0 and 1 (or bool)", relevance[odd][0].item())
        request = request._replace(relevance=relevant)
    if checked and request.max_relevant is not None and relevance.numel():
        found = request.relevance if mask is None else request.relevance & mask
        most = int(layout_of(request).total(found.long()).max())
        if most > request.max_relevant:
            raise ValueError(
                f"max_relevant: expected at least {most} (a list has so many), received {request.max_relevant}"
            )
    if request.needs_spread and request.spread is None:
        request = request._replace(spread=spread(request.scores, mask, request.dtype))
    return engine, request, poison


def evaluate(request: Request) -> Answer:
    """The loss of every list and its gradient, without autograd and without torch's dispatcher."""
    engine, asked, poison = _ready(request, marked=True)
    answer: Answer = engine.evaluate(asked)
    if poison is not None:
        answer = answer._replace(losses=answer.losses + poison)
    if waits_for_checks(request.scores, request.check_finite):
        check_nan(answer.losses, request.tables)
    if request.with_gradient and request.scores.device.type == "cpu" and zero_gradients.is_due(request.scores):
        _warn_if_mostly_zero(asked, answer)
    return answer


def _warn_if_mostly_zero(request: Request, answer: Answer) -> None:
    """See :mod:`rankgrad.engine.zero_gradients`."""
    if int(request.relevance.count_nonzero()) >= zero_gradients.FEWEST_ITEMS:
        layout, with_loss = layout_of(request), answer.losses > 0
        if request.tables is not None:  # a weight may be flat where a list's items stand: no reach would help
            above = engine_for(request).standings(request)[0]  # 0 of all but relevant items
            sloped = (above > 0) & (terms(request.form, request.tables, above, above)[1] != 0)
            with_loss &= layout.total(sloped.long()) > 0
        with_gradient = layout.total((answer.gradient != 0).long()) > 0
        zero_gradients.warn_if_mostly_zero(with_loss, with_gradient, request.reach, request.strength)


def evaluate_mean(request: Request) -> Answer:
    """:func:`evaluate` with the gradient of the mean at an upstream gradient of one, in the compute dtype."""
    if engine_for(request) is cuda and cuda.scales_at_once(request):
        return evaluate(request._replace(scaled=True))
    answer = evaluate(request)
    if not request.with_gradient:
        return answer
    gradient, dtype = answer.gradient, request.dtype
    fits = gradient.dtype.itemsize == dtype.itemsize and gradient.is_contiguous()
    out = gradient.view(dtype) if fits else torch.empty_like(gradient, dtype=dtype)
    scale(answer, None, "mean", out)
    return answer._replace(gradient=out)


def _evaluate(*fields: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    request = Request(*fields)
    losses, gradient, divisor, lists = evaluate(request)
    # An op returns nothing of its arguments, and the strides that its fake promises.
    return losses, gradient.contiguous(), divisor, lists.clone() if lists is request.lists else lists


evaluate_op = op_on(Request)(_evaluate)
_TABLES = Request._fields.index("tables")


@fake_of("evaluate")
def _(*fields: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    request = Request(*fields)
    scores = request.scores
    per_list = scores.new_empty(request.shape, dtype=torch.float64)
    gradient = scores.shape if request.with_gradient else (*scores.shape[:-1], 0)
    dtype = request.dtype if request.by_window else count_dtype(scores.shape[-1])
    lists = scores.new_empty(scores.shape[0], dtype=torch.int64)
    return per_list, scores.new_empty(gradient, dtype=dtype), torch.empty_like(per_list), lists


torch.library.register_vmap("rankgrad::evaluate", vmap_over_calls(evaluate_op, whole=[_TABLES]))


def _standings(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand; see :func:`rankgrad.engine.reference.standings`."""
    engine, request, poison = _ready(Request(*fields), marked=False)
    above, own, bad = engine.standings(request)
    bad = bad if poison is None else bad + poison
    if waits_for_checks(request.scores, request.check_finite):
        check_nan(bad)
    return above.contiguous(), own.contiguous(), bad  # the strides that the op's fake promises


standings = op_on(Request)(_standings)


@fake_of("standings")
def _(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    request = Request(*fields)
    places = request.scores.new_empty(request.scores.shape, dtype=torch.int64)
    return places, torch.empty_like(places), places.new_empty(request.shape, dtype=torch.float64)


torch.library.register_vmap("rankgrad::standings", vmap_over_calls(standings, whole=[_TABLES]))

# -------------------------------------------------------------- one number, and its gradient


def reduce_into(losses: Tensor, lists: Tensor, reduction: str, out: Tensor) -> Tensor:
    """``[calls, lists]`` losses into ``out``: ``[calls]``, or as they are for ``"none"``."""
    if reduction == "none":
        return out.copy_(losses)
    if losses.is_cuda and losses.numel() and has_triton():
        cuda.reduce(losses, lists, reduction == "mean", out)
        return out
    total = losses.sum(-1)
    return out.copy_(total / lists.clamp(min=1) if reduction == "mean" else total)


@op
def reduce_lists(
    scores: Tensor,
    losses: Tensor,
    gradient: Tensor,
    divisor: Tensor,
    lists: Tensor,
    offsets: Tensor | None,
    reduction: str,
) -> Tensor:
    """Reduce list losses; backward multiplies the gradient of every score by the upstream gradient.

    That gradient is Algorithm 1's for the mean at an upstream gradient of one. So the loss is linear in the
    upstream gradient, and loss scales and weights do not change lambda. See
    :class:`rankgrad.engine.request.Answer`.
    """
    out = losses.new_empty(losses.shape if reduction == "none" else lists.shape, dtype=compute_dtype(scores.dtype))
    return reduce_into(losses, lists, reduction, out)


@fake_of("reduce_lists")
def _(scores: Tensor, losses: Tensor, gradient: Tensor, divisor: Tensor, lists: Tensor, *rest: Any) -> Tensor:
    shape = losses.shape if rest[-1] == "none" else lists.shape
    return scores.new_empty(shape, dtype=compute_dtype(scores.dtype))


@op
def reduce_lists_backward(
    upstream: Tensor,
    losses: Tensor,
    gradient: Tensor,
    divisor: Tensor,
    lists: Tensor,
    offsets: Tensor | None,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient with respect to the scores, rounded once to their dtype."""
    out = torch.empty_like(gradient, dtype=dtype)
    scale(Answer(losses, gradient, divisor, lists), upstream, reduction, out, offsets)
    return out


def scale(
    answer: Answer, upstream: Tensor | None, reduction: str, out: Tensor, offsets: Tensor | None = None
) -> None:
    """The gradient times the upstream one, into ``out``, which may be the memory of the answer's gradient.

    Args:
        upstream: ``[calls]``, or ``[calls, lists]`` for the reduction ``"none"``; None: ones.
    """
    losses, gradient, divisor, lists = answer
    if gradient.is_cuda and offsets is None and out.dtype != torch.float64 and out.numel() and has_triton():
        cuda.scale(answer, upstream, reduction, out)
        return
    shape = divisor.shape if reduction == "none" else divisor.shape[:1]
    factor = divisor.new_ones(shape) if upstream is None else upstream.double()
    if reduction != "mean":
        factor = factor * (lists if reduction == "sum" else lists.unsqueeze(-1))
    if reduction != "none":
        factor = factor.unsqueeze(-1)
    # Tiny scores have tiny divisors: the factor ends at the largest number, unless upstream is infinite.
    most = torch.finfo(compute_dtype(out.dtype)).max
    scaled = factor / divisor
    scaled = torch.where(factor.isinf(), scaled, scaled.clamp(-most, most))
    # A list whose loss is NaN must not send a harmless-looking gradient: 0 * NaN is NaN.
    factor = (scaled + 0 * losses).to(compute_dtype(out.dtype))
    factor = (Rows() if offsets is None else Ragged(offsets, gradient.shape[-1])).per_item(factor)
    if gradient.is_floating_point() or offsets is not None:  # nothing to cast
        torch.mul(gradient, factor, out=out)
        return
    width = max(1, _BLOCK // max(1, factor.numel()))
    for start in range(0, gradient.shape[-1], width):  # on the CPU torch would cast all of the integers first
        part = slice(start, start + width)
        torch.mul(gradient[..., part], factor, out=out[..., part])


def _may_take_over(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> bool:
    """Whether the scaled gradient may replace the answer's in its own memory, in backward.

    Only if it is not needed again (no retain_graph), and not while torch.compile traces (inductor plans memory
    itself) or a batch of gradients arrives, each of which needs it. It halves the memory of a backward pass.
    """
    return (
        is_plain_call(gradient)
        and not torch._C._functorch.is_legacy_batchedtensor(upstream)  # of is_grads_batched
        and gradient.dtype.itemsize == dtype.itemsize == 4
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


@fake_of("reduce_lists_backward")
def _(upstream: Tensor, losses: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(gradient, dtype=rest[-1])


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, *answer, offsets, ctx.reduction = inputs
    ctx.save_for_backward(*answer, offsets)
    ctx.dtype, ctx.shape = scores.dtype, scores.shape


def _reduce_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    *parts, offsets = ctx.saved_tensors
    answer = Answer(*parts)
    grad_scores = grad_losses = None
    if ctx.needs_input_grad[0]:
        if answer.gradient.shape != ctx.shape:
            raise AssertionError("no gradient was computed for scores that need one")
        if _may_take_over(answer.gradient, upstream, ctx.dtype):
            grad_scores = answer.gradient.view(ctx.dtype)
            scale(answer, upstream, ctx.reduction, grad_scores, offsets)
        else:
            grad_scores = reduce_lists_backward(upstream, *answer, offsets, ctx.reduction, ctx.dtype)
    if ctx.needs_input_grad[1]:  # the losses may depend on parameters of their own (rank_loss)
        share = upstream.double()
        if ctx.reduction != "none":
            share = share.unsqueeze(-1).expand(answer.losses.shape)
        if ctx.reduction == "mean":
            share = share / answer.lists.clamp(min=1).unsqueeze(-1)
        grad_losses = share.to(answer.losses.dtype)
    return grad_scores, grad_losses, None, None, None, None, None


torch.library.register_autograd("rankgrad::reduce_lists", _reduce_backward, setup_context=_reduce_setup)
torch.library.register_vmap("rankgrad::reduce_lists", vmap_over_calls(reduce_lists))
torch.library.register_vmap("rankgrad::reduce_lists_backward", vmap_over_calls(reduce_lists_backward))

# ------------------------------------------------------------------- both in one, for an eager call


class _ListLoss(torch.autograd.Function):
    """:func:`evaluate` and :func:`reduce_lists` as one autograd function, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, request: Request, reduction: str, shape: tuple[int, ...]) -> Tensor:
        answer = evaluate(request)
        # Its own memory and no view: a caller may write `loss *= 0.5`.
        out = torch.empty(shape, dtype=request.dtype, device=scores.device)
        ctx.upstream_shape = answer.losses.shape if reduction == "none" else answer.lists.shape
        reduce_into(answer.losses, answer.lists, reduction, out.view(ctx.upstream_shape))
        _reduce_setup(ctx, (scores, *answer, request.offsets, reduction), out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None, None]:
        return _reduce_backward(ctx, upstream.reshape(ctx.upstream_shape))[0], None, None, None


def list_loss(scores: Tensor, request: Request, reduction: str, shape: tuple[int, ...]) -> Tensor:
    """The loss of a call, differentiable with respect to ``scores``, which the request holds detached.

    ``shape`` is that of the caller's lists, for the reduction ``"none"``.
    """
    shape = shape if reduction == "none" else ()
    if is_plain_call(scores):
        return _ListLoss.apply(scores, request, reduction, shape)  # type: ignore[no-any-return]
    loss: Tensor = reduce_lists(scores, *evaluate_op(*request), request.offsets, reduction)
    return loss.reshape(shape)


# ---------------------------------------------------------------- whether a gradient is needed


def gradient_wanted(scores: Tensor) -> bool:
    """Whether a gradient of these scores may be needed.

    Inside a transform of torch.func ``requires_grad`` is False even where the caller will take a gradient.
    """
    if not torch.is_grad_enabled():
        return False
    if scores.requires_grad or torch.compiler.is_compiling():
        return scores.requires_grad
    return torch._C._are_functorch_transforms_active()
