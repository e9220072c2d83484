"""The engines as ``torch.library`` ops: opaque to torch.compile, with fake kernels, vmap and autograd.

Lists come as ``[calls, lists, n]``: one call is one evaluation of a loss with its own number L of lists
that count. A plain call has ``calls = 1``; vmap makes each of its elements a call.

Scores are checked for NaN in here, so that the check holds under torch.compile and vmap as well.
"""

# No `from __future__ import annotations`: torch reads the annotations to make the ops' schemas.
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rankgrad.engine import cuda
from rankgrad.engine.dispatch import engine_for
from rankgrad.engine.precision import compute_dtype, count_dtype, rank_dtype
from rankgrad.engine.ranker import exact_ranks

_F = TypeVar("_F", bound=Callable[..., Any])


def _op(fn: Callable[..., Any]) -> Any:
    """Make ``torch.ops.rankgrad.<name>`` of a function.

    What torch.library.custom_op does, without its check of every call for outputs that alias inputs, which
    costs more than the launches of a small loss (0.2 ms a call).
    """
    name = f"rankgrad::{fn.__name__}"
    torch.library.define(name, torch.library.infer_schema(fn, mutates_args=()))
    torch.library.impl(name, "default")(fn)
    return getattr(torch.ops.rankgrad, fn.__name__).default


def _fake_of(name: str) -> Callable[[_F], _F]:
    """Register the shapes and dtypes an op returns."""
    register: Callable[[_F], _F] = torch.library.register_fake(f"rankgrad::{name}")
    return register


# ---------------------------------------------------------------------------- reading the arguments


def _waits_for_checks(scores: Tensor, check_finite: bool) -> bool:
    """Values are checked on the CPU always, elsewhere (where it waits for the device) if asked to."""
    return check_finite or scores.device.type == "cpu"


def _check_nan(per_list: Tensor) -> None:
    """The engines mark lists whose scores have a NaN among existing items."""
    if bool(per_list.isnan().any()):
        raise ValueError("scores: expected no NaN, received some (in scores or the embeddings they come from)")


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


# ------------------------------------------------------------------------------------- vmap, shared


def _fold(info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Merge the batch dimension of vmap into the first dimension of every tensor argument."""
    folded = []
    for arg, dim in zip(args, in_dims, strict=True):
        if isinstance(arg, Tensor):
            batched = arg.unsqueeze(0).expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
            arg = batched.reshape(batched.shape[0] * batched.shape[1], *batched.shape[2:])
        folded.append(arg)
    return folded


def _unfold(info: Any, out: Tensor) -> Tensor:
    return out.reshape(info.batch_size, out.shape[0] // info.batch_size, *out.shape[1:])


def _vmap_over_calls(op: Callable[..., Any], whole: Sequence[int] = ()) -> Callable[..., Any]:
    """A vmap rule that makes each element of the batch its own call.

    ``whole`` are the positions of tensor arguments that belong to all calls and cannot be batched.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        for at in whole:
            if in_dims[at] is not None:
                raise ValueError("weight: expected the same weights for every element of torch.vmap")
        kept = {at: args[at] for at in whole}
        folded = _fold(info, in_dims, [None if at in kept else arg for at, arg in enumerate(args)])
        out = op(*[kept.get(at, arg) for at, arg in enumerate(folded)])
        if isinstance(out, Tensor):
            return _unfold(info, out), 0
        return tuple(_unfold(info, one) for one in out), (0,) * len(out)

    return rule


# ------------------------------------------------------------------------------------- whole ranks


@_op
def ranks(scores: Tensor, mask: Tensor | None, ties: str) -> Tensor:
    """Exact ranks of ``[lists, n]`` scores, not differentiable. On a GPU a list with a NaN ranks NaN."""
    nan = scores.isnan() if mask is None else scores.isnan() & mask
    out = exact_ranks(scores, mask, ties)
    out.masked_fill_(nan.any(-1, keepdim=True), torch.nan)
    if _waits_for_checks(scores, check_finite=False):
        _check_nan(out)
    return out


@_fake_of("ranks")
def _(scores: Tensor, mask: Tensor | None, ties: str) -> Tensor:
    return scores.new_empty(scores.shape, dtype=rank_dtype(scores))


torch.library.register_vmap("rankgrad::ranks", _vmap_over_calls(ranks))


@_op
def rank(scores: Tensor, mask: Tensor | None, lam: float, ties: str) -> Tensor:
    """Exact ranks of ``[lists, n]`` scores, differentiable by Algorithm 1."""
    out: Tensor = ranks(scores, mask, ties)
    return out


@_fake_of("rank")
def _(scores: Tensor, mask: Tensor | None, lam: float, ties: str) -> Tensor:
    return scores.new_empty(scores.shape, dtype=rank_dtype(scores))


@_op
def rank_backward(
    grad: Tensor, scores: Tensor, rank: Tensor, mask: Tensor | None, lam: float, ties: str
) -> Tensor:
    """Algorithm 1: rank again at ``scores + lam n grad``. A non-finite gradient stays non-finite."""
    dtype = compute_dtype(scores.dtype)
    exists = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    lam_eff = lam * exists.sum(-1, keepdim=True).clamp(min=1).double()
    grad = grad.masked_fill(~exists, 0)
    moved = exact_ranks(scores.to(dtype) + (lam_eff * grad.double()).to(dtype), mask, ties)
    out = ((moved - rank).masked_fill_(~exists, 0) / lam_eff.to(moved.dtype)).to(scores.dtype)
    return out.masked_fill_(~grad.isfinite().all(-1, keepdim=True), torch.nan)


@_fake_of("rank_backward")
def _(grad: Tensor, scores: Tensor, rank: Tensor, mask: Tensor | None, lam: float, ties: str) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _rank_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, mask, ctx.lam, ctx.ties = inputs
    ctx.save_for_backward(scores, output, mask)


def _rank_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    scores, output, mask = ctx.saved_tensors
    return rank_backward(grad, scores, output, mask, ctx.lam, ctx.ties), None, None, None


torch.library.register_autograd("rankgrad::rank", _rank_backward, setup_context=_rank_setup)
torch.library.register_vmap("rankgrad::rank", _vmap_over_calls(rank))
torch.library.register_vmap("rankgrad::rank_backward", _vmap_over_calls(rank_backward))

# ------------------------------------------------------------------ ranks of the relevant items


@_op
def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, check_finite: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one of an engine.

    Returns ``above``, ``position``, ``count`` and ``poison``; see
    :func:`rankgrad.engine.reference.relevant_ranks`.
    """
    checked = _waits_for_checks(scores, check_finite)
    out = engine_for(scores).relevant_ranks(scores, _as_bool(relevance, mask, checked), mask, margin)
    if checked:
        _check_nan(out[3])
    return out  # type: ignore[no-any-return]


@_fake_of("relevant_ranks")
def _(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, check_finite: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = scores.new_empty(scores.shape, dtype=torch.int64)
    per_list = scores.new_empty(scores.shape[:-1], dtype=torch.int64)
    return slots, torch.empty_like(slots), per_list, per_list.double()


torch.library.register_vmap("rankgrad::relevant_ranks", _vmap_over_calls(relevant_ranks))


@_op
def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two of an engine: how far every item's rank moves; integers, ``[calls, lists, n]``."""
    engine, relevant = engine_for(scores), _as_bool(relevance, mask, check_values=False)
    return engine.rank_changes(scores, relevant, mask, margin, position, steps)  # type: ignore[no-any-return]


@_fake_of("rank_changes")
def _(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    return scores.new_empty(scores.shape, dtype=count_dtype(scores.shape[-1]))


torch.library.register_vmap("rankgrad::rank_changes", _vmap_over_calls(rank_changes))

# --------------------------------------------------------------------- the named losses in one op


@_op
def list_losses(
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
    checked = _waits_for_checks(scores, check_finite)
    relevant = _as_bool(relevance, mask, checked)
    if checked:
        _check_hint(relevant, mask, max_relevant)
    everywhere = None if lists is None else lists.clone()
    out = engine_for(scores).list_losses(
        scores, relevant, mask, weights, form, lam, margin, with_changes, max_relevant, everywhere
    )
    if checked:
        _check_nan(out[0])
    return out  # type: ignore[no-any-return]


@_fake_of("list_losses")
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


torch.library.register_vmap("rankgrad::list_losses", _vmap_over_calls(list_losses, whole=[3]))

# -------------------------------------------------------- one number, and the gradient it stands for


@_op
def reduce_lists(
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


@_fake_of("reduce_lists")
def _(
    scores: Tensor, losses: Tensor, changes: Tensor, items: Tensor, lists: Tensor, lam: float, reduction: str
) -> Tensor:
    shape = losses.shape if reduction == "none" else lists.shape
    return scores.new_empty(shape, dtype=compute_dtype(scores.dtype))


@_op
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
    if changes.is_cuda and not changes.is_floating_point() and out.dtype != torch.float64 and out.numel():
        cuda.scale(changes, upstream, losses, items, lists, lam, reduction, out)
        return
    factor = upstream.double()
    if reduction != "mean":
        factor = factor * (lists if reduction == "sum" else lists.unsqueeze(-1))
    if reduction != "none":
        factor = factor.unsqueeze(-1)
    # A list whose loss is NaN must not send a harmless-looking gradient: 0 * NaN is NaN.
    factor = factor / (lam * items.clamp(min=1).double()) + 0 * losses
    torch.mul(changes, factor.to(compute_dtype(out.dtype)).unsqueeze(-1), out=out)


def _may_take_over(changes: Tensor, dtype: torch.dtype) -> bool:
    """Whether the gradient may replace the rank changes in their own memory, in backward.

    Only if nobody will come back for them (no retain_graph), and not while torch.compile traces (inductor
    plans memory itself). It halves the memory of a backward pass.
    """
    return (
        type(changes) is Tensor
        and changes.dtype == torch.int32
        and dtype == torch.float32
        and not torch.compiler.is_compiling()
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


@_fake_of("reduce_lists_backward")
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
        if _may_take_over(changes, ctx.dtype):
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
torch.library.register_vmap("rankgrad::reduce_lists", _vmap_over_calls(reduce_lists))
torch.library.register_vmap("rankgrad::reduce_lists_backward", _vmap_over_calls(reduce_lists_backward))


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
