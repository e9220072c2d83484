"""The engines as ops of torch: opaque to torch.compile, with fake kernels, vmap and autograd.

Lists come as ``[calls, lists, n]``: one call is one evaluation of a loss with its own number L of lists
that count. A plain call has ``calls = 1``; vmap makes each of its elements a call.
"""

# No `from __future__ import annotations`: torch reads the annotations to make the ops' schemas.
import math
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import cuda, windowed
from rankgrad.engine.dispatch import engine_for, has_triton
from rankgrad.engine.precision import compute_dtype, count_dtype
from rankgrad.engine.registration import check_nan, fake_of, is_plain_call, op, vmap_over_calls, waits_for_checks

_BLOCK = 1 << 18  # numbers scaled at a time: they stay in the cache

# ---------------------------------------------------------------------------- reading the arguments


def _as_bool(relevance: Tensor, mask: Tensor | None, check_values: bool) -> Tensor:
    if relevance.dtype == torch.bool:
        return relevance
    relevant = relevance != 0
    if check_values:
        odd = relevant & (relevance != 1)
        if bool((odd if mask is None else odd & mask).any()):
            raise ValueError("relevance: expected only 0 and 1 (or bool), received other values")
    return relevant


def _check_hint(relevant: Tensor, mask: Tensor | None, max_relevant: int | None) -> None:
    if max_relevant is not None and relevant.numel():
        most = int((relevant if mask is None else relevant & mask).sum(-1).max())
        if most > max_relevant:
            raise ValueError(
                f"max_relevant: expected at least {most} (a list has so many), received {max_relevant}"
            )


# ------------------------------------------------------------------ ranks of the relevant items


@op
def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, check_finite: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one of an engine.

    Returns ``above``, ``position``, ``count`` and ``poison``; see
    :func:`rankgrad.engine.reference.relevant_ranks`.
    """
    checked = waits_for_checks(scores, check_finite)
    out = engine_for(scores).relevant_ranks(scores, _as_bool(relevance, mask, checked), mask, margin)
    if checked:
        check_nan(out[3])
    return out  # type: ignore[no-any-return]


@fake_of("relevant_ranks")
def _(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, check_finite: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = scores.new_empty(scores.shape, dtype=torch.int64)
    per_list = scores.new_empty(scores.shape[:-1], dtype=torch.int64)
    return slots, torch.empty_like(slots), per_list, per_list.double()


torch.library.register_vmap("rankgrad::relevant_ranks", vmap_over_calls(relevant_ranks))


@op
def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two of an engine: how far every item's rank moves; integers, ``[calls, lists, n]``."""
    engine, relevant = engine_for(scores), _as_bool(relevance, mask, check_values=False)
    return engine.rank_changes(scores, relevant, mask, margin, position, steps)  # type: ignore[no-any-return]


@fake_of("rank_changes")
def _(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    return scores.new_empty(scores.shape, dtype=count_dtype(scores.shape[-1]))


torch.library.register_vmap("rankgrad::rank_changes", vmap_over_calls(rank_changes))


@op
def window_gradient(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    margin: float,
    position: Tensor,
    slopes: Tensor,
    window: float,
) -> Tensor:
    """Step two with a fixed score window; see :func:`rankgrad.engine.windowed.window_gradient`."""
    relevant = _as_bool(relevance, mask, check_values=False)
    return windowed.window_gradient(scores, relevant, mask, margin, position, slopes, window)


@fake_of("window_gradient")
def _(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    margin: float,
    position: Tensor,
    slopes: Tensor,
    window: float,
) -> Tensor:
    return scores.new_empty(scores.shape, dtype=compute_dtype(scores.dtype))


torch.library.register_vmap("rankgrad::window_gradient", vmap_over_calls(window_gradient))

# --------------------------------------------------------------------- the named losses in one op


def _list_losses(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    check_finite: bool,
    max_relevant: int | None,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss of every list, and how far Algorithm 1 moves every item's rank.

    ``lists`` (``[calls]``) is how many lists count where some of them are on other processes.

    Returns:
        ``losses`` (float64 ``[calls, lists]``), ``changes`` (integers ``[calls, lists, n]``, or
        ``[calls, lists, 0]`` without ``with_changes``), ``items`` (existing items of each list) and
        ``lists`` (how many lists count, ``[calls]``).
    """
    checked = waits_for_checks(scores, check_finite)
    relevant = _as_bool(relevance, mask, checked)
    if checked:
        _check_hint(relevant, mask, max_relevant)
    everywhere = None if lists is None else lists.clone()
    out = engine_for(scores).list_losses(
        scores, relevant, mask, weights, form, lam, margin, with_changes, max_relevant, everywhere
    )
    if checked:
        check_nan(out[0])
    return out  # type: ignore[no-any-return]


list_losses = op(_list_losses)


@fake_of("list_losses")
def _(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    check_finite: bool,
    max_relevant: int | None,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    calls, rows, n = scores.shape
    return (
        scores.new_empty(calls, rows, dtype=torch.float64),
        scores.new_empty(calls, rows, n if with_changes else 0, dtype=count_dtype(n)),
        scores.new_empty(calls, rows, dtype=torch.int64),
        scores.new_empty(calls, dtype=torch.int64),
    )


torch.library.register_vmap("rankgrad::list_losses", vmap_over_calls(list_losses, whole=[3]))

# -------------------------------------------------------- one number, and the gradient it stands for


def _reduce_lists(
    scores: Tensor, losses: Tensor, changes: Tensor, items: Tensor, lists: Tensor, lam: float, reduction: str
) -> Tensor:
    """Reduce list losses; backward, send every score its rank change times ``upstream / (lam n)``.

    The gradient is Algorithm 1's for the mean at an upstream gradient of one, times whatever arrives:
    linear, so loss scales and weights leave lambda alone. ``changes`` are rank changes of that mean.
    """
    dtype = compute_dtype(scores.dtype)
    if reduction != "none" and engine_for(scores) is cuda:
        return cuda.reduce(losses, lists, reduction == "mean", dtype)
    if reduction == "mean":
        losses = losses.sum(-1) / lists.clamp(min=1)
    elif reduction == "sum":
        losses = losses.sum(-1)
    return losses.to(dtype, copy=True)


reduce_lists = op(_reduce_lists)


@fake_of("reduce_lists")
def _(
    scores: Tensor, losses: Tensor, changes: Tensor, items: Tensor, lists: Tensor, lam: float, reduction: str
) -> Tensor:
    shape = losses.shape if reduction == "none" else lists.shape
    return scores.new_empty(shape, dtype=compute_dtype(scores.dtype))


@op
def reduce_lists_backward(
    upstream: Tensor,
    losses: Tensor,
    changes: Tensor,
    items: Tensor,
    lists: Tensor,
    lam: float,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient with respect to the scores, rounded once to their dtype."""
    out = torch.empty_like(changes, dtype=dtype)
    _scale(changes, upstream, losses, items, lists, lam, reduction, out)
    return out


def _scale(
    changes: Tensor,
    upstream: Tensor,
    losses: Tensor,
    items: Tensor,
    lists: Tensor,
    lam: float,
    reduction: str,
    out: Tensor,
) -> None:
    """``changes * upstream / (lam n)`` into ``out``, which may be the memory of ``changes``."""
    whole = not changes.is_floating_point() and out.dtype != torch.float64 and out.numel() > 0
    if changes.is_cuda and whole and has_triton():
        cuda.scale(changes, upstream, losses, items, lists, lam, reduction, out)
        return
    factor = upstream.double()
    if reduction != "mean":
        factor = factor * (lists if reduction == "sum" else lists.unsqueeze(-1))
    if reduction != "none":
        factor = factor.unsqueeze(-1)
    # A list whose loss is NaN must not send a harmless-looking gradient: 0 * NaN is NaN.
    factor = factor / (lam * items.clamp(min=1).double()) + 0 * losses
    factor = factor.to(compute_dtype(out.dtype)).unsqueeze(-1)
    if changes.is_floating_point():  # nothing to cast
        torch.mul(changes, factor, out=out)
        return
    width = max(1, _BLOCK // max(1, factor.numel()))
    for start in range(0, changes.shape[-1], width):  # on the CPU torch would cast all of the integers first
        part = slice(start, start + width)
        torch.mul(changes[..., part], factor, out=out[..., part])


def _may_take_over(changes: Tensor, upstream: Tensor, dtype: torch.dtype) -> bool:
    """Whether the gradient may replace the rank changes in their own memory, in backward.

    Only if nobody will come back for them (no retain_graph), and not while torch.compile traces (inductor
    plans memory itself) or a batch of gradients arrives, each of which needs them. It halves the memory of a
    backward pass.
    """
    return (
        is_plain_call(changes)
        and not torch._C._functorch.is_legacy_batchedtensor(upstream)  # of is_grads_batched
        and changes.dtype == torch.int32
        and dtype == torch.float32
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


@fake_of("reduce_lists_backward")
def _(
    upstream: Tensor,
    losses: Tensor,
    changes: Tensor,
    items: Tensor,
    lists: Tensor,
    lam: float,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(changes, dtype=dtype)


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, losses, changes, items, lists, ctx.lam, ctx.reduction = inputs
    ctx.save_for_backward(losses, changes, items, lists)
    ctx.dtype, ctx.shape = scores.dtype, scores.shape


def _reduce_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    losses, changes, items, lists = ctx.saved_tensors
    grad_scores = grad_losses = None
    if ctx.needs_input_grad[0]:
        if changes.shape != ctx.shape:
            raise AssertionError("rank changes were not computed for scores that need a gradient")
        if _may_take_over(changes, upstream, ctx.dtype):
            grad_scores = changes.view(ctx.dtype)
            _scale(changes, upstream, losses, items, lists, ctx.lam, ctx.reduction, grad_scores)
        else:
            grad_scores = reduce_lists_backward(
                upstream, losses, changes, items, lists, ctx.lam, ctx.reduction, ctx.dtype
            )
    if ctx.needs_input_grad[1]:  # the losses may hang on parameters of their own (rank_loss)
        share = upstream.double()
        if ctx.reduction != "none":
            share = share.unsqueeze(-1).expand(losses.shape)
        if ctx.reduction == "mean":
            share = share / lists.clamp(min=1).unsqueeze(-1)
        grad_losses = share.to(losses.dtype)
    return grad_scores, grad_losses, None, None, None, None, None


torch.library.register_autograd("rankgrad::reduce_lists", _reduce_backward, setup_context=_reduce_setup)
torch.library.register_vmap("rankgrad::reduce_lists", vmap_over_calls(reduce_lists))
torch.library.register_vmap("rankgrad::reduce_lists_backward", vmap_over_calls(reduce_lists_backward))

# ------------------------------------------------------------------- both in one, for an eager call


class _NamedLoss(torch.autograd.Function):
    """:func:`list_losses` and :func:`reduce_lists` as one step of autograd, past torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, reduction: str, *arguments: Any) -> Tensor:
        relevance, mask, weights, form, lam, *rest = arguments
        rows, relevance = as_lists(scores), as_lists(relevance)
        mask = None if mask is None else as_lists(mask)
        losses, changes, items, lists = _list_losses(rows, relevance, mask, weights, form, lam, *rest)
        out = _reduce_lists(rows, losses, changes, items, lists, lam, reduction)
        _reduce_setup(ctx, (rows, losses, changes, items, lists, lam, reduction), out)
        ctx.scores_shape, ctx.upstream_shape = scores.shape, out.shape
        return out.reshape(scores.shape[:-1] if reduction == "none" else ())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad = _reduce_backward(ctx, upstream.reshape(ctx.upstream_shape))[0]
        grad = None if grad is None else grad.reshape(ctx.scores_shape)
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


def as_lists(tensor: Tensor) -> Tensor:
    """``[..., n]`` as one call's lists."""
    return tensor.reshape(1, math.prod(tensor.shape[:-1]), tensor.shape[-1])


def named_loss(
    scores: Tensor, reduction: str, relevance: Tensor, mask: Tensor | None, weights: Tensor | None, form: str,
    lam: float, *arguments: Any,
) -> Tensor:  # fmt: skip
    """Reduced loss of ``[..., n]`` scores, all lists of one call, with its gradient.

    ``arguments`` are those of :func:`list_losses` after ``lam``.
    """
    if is_plain_call(scores):
        return _NamedLoss.apply(  # type: ignore[no-any-return]
            scores, reduction, relevance, mask, weights, form, lam, *arguments
        )
    rows = as_lists(scores)
    exists = None if mask is None else as_lists(mask)
    losses, changes, items, lists = list_losses(
        rows.detach(), as_lists(relevance), exists, weights, form, lam, *arguments
    )
    loss: Tensor = reduce_lists(rows, losses, changes, items, lists, lam, reduction)
    return loss.reshape(scores.shape[:-1] if reduction == "none" else ())


# ------------------------------------------------------------------------------------ a question


def gradient_wanted(scores: Tensor) -> bool:
    """Whether anybody may ask for the gradient of these scores.

    Inside a transform of torch.func ``requires_grad`` says False whatever the caller will do.
    """
    if not torch.is_grad_enabled():
        return False
    if scores.requires_grad or torch.compiler.is_compiling():
        return scores.requires_grad
    return torch._C._are_functorch_transforms_active()
