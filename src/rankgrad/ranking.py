"""Differentiable ranking: exact ranks forward, Algorithm 1 (blackbox differentiation) backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankgrad import _check
from rankgrad.engine import ops, rank_ops, zero_gradients
from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.registration import is_plain_call
from rankgrad.engine.slopes import value_and_slope
from rankgrad.engine.spread import moments, spread_of
from rankgrad.lists import Lists
from rankgrad.reach import MarginValue, Reach, reach_of

_LONGEST_CUDA_SORT = 2**31 - 1


def _as_lists(name: str, scores: Tensor) -> Tensor:
    """``[..., n]`` -> ``[lists, n]``."""
    if scores.is_cuda and scores.shape[-1] > _LONGEST_CUDA_SORT:
        raise ValueError(
            f"{name}: a dimension of {scores.shape[-1]} is longer than the device can sort "
            f"({_LONGEST_CUDA_SORT}); recall_loss and average_precision_loss have no such limit"
        )
    return scores.reshape(math.prod(scores.shape[:-1]), scores.shape[-1])


def rank(
    scores: Tensor,
    *,
    lam: float,
    ties: str = "ordinal",
    normalize: bool = False,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Rank of every score, 1 for the highest; differentiable.

    Forward the ranks are exact. Backward, with :math:`g` the gradient arriving at the ranks and
    :math:`\lambda_n = \lambda n`,

    .. math:: \nabla = \frac{\mathrm{rank}(s + \lambda_n g) - \mathrm{rank}(s)}{\lambda_n},

    the gradient of a piecewise linear interpolation of the loss (Rolinek et al. 2020, Algorithm 1).

    This is *not* linear in :math:`g`: scaling the loss by c is scaling ``lam`` by c. When you build a
    loss of your own, use :func:`rank_loss`, whose ``lam`` does not depend on loss weights, gradient
    accumulation and GradScaler.

    Args:
        scores: ``[...]``, floating point of any shape, ranked along ``dim``. Higher is better.
        lam: Interpolation strength in the paper's units (ranks divided by n), finite and > 0. A larger
            value compares items further apart.
        ties: As in :func:`scipy.stats.rankdata`: ``"ordinal"`` (the earlier index first, a proper
            permutation), ``"min"``, ``"max"`` or ``"average"``.
        normalize: Return rank / n instead. The gradient with respect to the scores is the same.
        dim: The dimension along which to rank.
        mask: bool, broadcast to ``scores``; False = the item does not exist. Such items rank last, tied with each
            other, are not counted in n, and get zero gradient.

    Returns:
        Ranks in the shape of ``scores``: float32 for up to 2^23 items, float64 beyond or for float64.

    Example:
        >>> scores = torch.tensor([0.2, 0.9, 0.5], requires_grad=True)
        >>> ranks = rankgrad.rank(scores, lam=1.0)
        >>> ranks
        tensor([3., 1., 2.], grad_fn=...)
        >>> ranks[0].backward()  # the first item should rank better: raise it, lower those it would pass
        >>> scores.grad
        tensor([-0.6667,  0.3333,  0.3333])
    """
    scores = _check.floating("scores", scores)
    lam = _check.lam(lam)
    _check.one_of("ties", ties, _check.TIES)
    mask = _check.mask(mask, scores)
    if not isinstance(dim, int) or not -scores.ndim <= dim < scores.ndim:
        raise _check.fail("dim", f"a dimension of scores (it has {scores.ndim})", dim)
    moved = scores.movedim(dim, -1)
    where = None if mask is None else mask.movedim(dim, -1)
    out: Tensor = rank_ops.rank(
        _as_lists("scores", moved), None if where is None else _as_lists("mask", where), lam, ties
    ).reshape(moved.shape)
    if normalize:
        n: Any = moved.shape[-1] if where is None else where.sum(-1, keepdim=True)
        out = out / (max(n, 1) if isinstance(n, int) else n.clamp(min=1))
    return out.movedim(-1, dim)


class _Blackbox(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(solver: Callable[[Tensor], Tensor], lam: float, costs: Tensor) -> Tensor:
        solution = solver(costs.detach().clone())  # a solver may write into its costs
        if not isinstance(solution, Tensor):
            raise TypeError(f"solver: expected to return a tensor, received {type(solution).__name__}")
        if solution.shape != costs.shape:
            raise _check.fail("solver", f"a solution of the shape of the costs {list(costs.shape)}", solution)
        return solution.to(costs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solver, ctx.lam, costs = inputs
        ctx.save_for_backward(costs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        costs, solution = ctx.saved_tensors
        moved = ctx.solver(costs + ctx.lam * grad.to(costs.dtype)).to(costs.dtype)
        return None, None, ((moved - solution) / ctx.lam).to(costs.dtype)


def blackbox(solver: Callable[[Tensor], Tensor], *, lam: float) -> Callable[[Tensor], Tensor]:
    r"""Make any solver of a linear problem differentiable (Vlastelica et al. 2020).

    The solver must return :math:`s(y) = \arg\min_{s \in S} s \cdot y` for a fixed finite set S: shortest
    paths, matchings, cuts; the ranks of y are the case of all permutations. Backward, with :math:`g` the
    gradient arriving at the solution, :math:`\nabla = (s(y + \lambda g) - s(y)) / \lambda`.

    Args:
        solver: Takes a tensor of costs ``[...]``, returns the solution as a tensor of the same shape. It is called
            once forward and once backward, never differentiated.
        lam: Interpolation strength, raw: :func:`rank` with ``lam`` is a ranker with ``lam * n`` here.

    Returns:
        A differentiable function of the costs.

    Example:
        >>> cheapest = rankgrad.blackbox(lambda y: torch.eye(len(y))[y.argmin()], lam=2.0)
        >>> costs = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
        >>> choice = cheapest(costs)
        >>> choice
        tensor([1., 0., 0.], grad_fn=...)
        >>> choice[0].backward()  # do not choose the first: make it dearer, the second cheaper
        >>> costs.grad
        tensor([-0.5000,  0.5000,  0.0000])
    """
    if not callable(solver):
        raise TypeError(f"solver: expected a callable tensor -> tensor, received {type(solver).__name__}")
    lam = _check.lam(lam)

    def solve(costs: Tensor) -> Tensor:
        costs = _check.floating("costs", costs)
        solution: Tensor = _Blackbox.apply(solver, lam, costs)
        return solution

    return solve


def rank_loss(
    fn: Callable[[Tensor], Tensor],
    scores: Tensor,
    *,
    lam: float | None = None,
    window: float | None = None,
    ties: str = "ordinal",
    mask: Tensor | None = None,
    reduction: str = "mean",
    spread: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    r"""A loss of your own from any differentiable function of the ranks.

    Algorithm 1 is applied to the mean of ``fn``'s list losses at an upstream gradient of one; the actual upstream
    gradient then multiplies the result. Loss weights, gradient accumulation and GradScaler therefore do not change
    ``lam``, which they do when a loss is composed from :func:`rank`.

    Args:
        fn: Takes the ranks ``[..., n]`` (floats, 1 is best), returns one loss per list, ``[...]``. It must
            be made of differentiable torch operations (it runs inside :func:`torch.func.vjp`); its own
            parameters get their gradients too.
        scores: ``[..., n]``, higher is better.
        lam: Interpolation strength in the paper's units, > 0.
        window: Instead of ``lam``: the item of a list with the largest slope moves this far in score, the others
            in proportion (one raw lambda for each list, w / max :math:`|slope_i|`). With neither of the two the
            window is taken from the spread of the scores, as in :func:`recall_loss`.
        ties: As in :func:`rank`.
        mask: bool, broadcast to ``scores``; False = the item does not exist (it ranks behind all others).
            A list without any item does not count.
        reduction: ``"mean"`` over the lists that count, ``"sum"``, or ``"none"`` for one loss a list.
        spread: The spread of all scores, a scalar tensor, where other processes have some of them.
        groups: For scores of one dimension, the id of each item's list, int64 in any order. ``fn`` then takes the
            ranks ``[N]`` and returns a loss for each id, in ascending order.
        num_groups: How many groups there are, as in :func:`recall_loss`.

    Returns:
        A scalar, or ``[...]`` for ``"none"``.

    Example:
        >>> scores = torch.tensor([0.2, 0.9, 0.5], requires_grad=True)
        >>> loss = rankgrad.rank_loss(lambda ranks: ranks[..., 0].log(), scores, lam=4.0)
        >>> loss.backward()
        >>> scores.grad
        tensor([-0.1667,  0.0833,  0.0833])
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a callable ranks -> list losses, received {type(fn).__name__}")
    scores = _check.floating("scores", scores)
    mask = _check.mask(mask, scores)
    _check.spread(spread, scores)
    lists = Lists(scores, groups, num_groups, by_list=True)

    def flat_losses(ranks: Tensor) -> Tensor:
        losses = fn(lists.take(ranks))
        if not isinstance(losses, Tensor) or losses.shape != lists.shape:
            raise _check.fail("fn", f"to return one loss per list, shape {list(lists.shape)}", losses)
        return losses.reshape(1, -1)

    reach = reach_of(lam, window, compute_dtype(scores.dtype))
    return loss_of_ranks(
        flat_losses, lists, lists.put(scores), lists.put_optional(mask), reach, ties, reduction, spread
    )


def loss_of_ranks(
    fn: Callable[[Tensor], Tensor],
    lists: Lists,
    scores: Tensor,
    mask: Tensor | None,
    reach: Reach,
    ties: str,
    reduction: str,
    spread: Tensor | None,
) -> Tensor:
    """:func:`rank_loss` in the engine's layout.

    ``scores``, ``mask`` and the ranks that ``fn`` takes are what ``lists.put`` returns; ``fn`` returns
    ``[1, lists]``. ``spread`` must be given where it is not that of these scores: other processes have some, or
    a margin has shifted them.
    """
    _check.one_of("ties", ties, _check.TIES)
    _check.one_of("reduction", reduction, _check.REDUCTIONS)
    layout, dtype = lists.layout, compute_dtype(scores.dtype)
    before = ranks_of(lists, scores.detach(), mask, ties)
    items = layout.total(torch.ones_like(before, dtype=torch.int64) if mask is None else mask.long())
    counts = items > 0
    counting = counts.sum(-1)

    def counted_losses(ranks: Tensor) -> Tensor:
        return fn(ranks).double().where(counts, 0)

    if ops.gradient_wanted(scores):
        losses, slopes = value_and_slope(counted_losses, before, counts.double() / counting.clamp(min=1))
        slopes = slopes.double() if mask is None else slopes.double().where(mask, 0)

        def change(divisor: Tensor) -> Tensor:
            """How the ranks change with these raw lambdas, one for each list."""
            moved = scores.detach().to(dtype) + (layout.per_item(divisor) * slopes).to(dtype)
            if mask is not None:
                moved = moved.where(mask, 0)  # a masked score may be NaN
            difference = ranks_of(lists, moved.nan_to_num(0.0, torch.inf, -torch.inf), mask, ties) - before
            difference = difference if mask is None else difference.where(mask, 0)
            bad = layout.per_item(layout.total(moved.isnan().long())) > 0  # fn has no slope there
            return difference.masked_fill(bad, torch.nan)

        def reaching(longest: Tensor) -> Tensor:
            """The raw lambda of each list whose longest step is this one."""
            top = layout.largest(slopes.abs())
            return longest / top.where(top != 0, 1)

        if reach.kind == "lam":
            divisor = reach.strength * items.clamp(min=1).double()
        else:
            window = torch.full((), reach.strength, dtype=torch.float64, device=scores.device)
            if reach.kind == "share":
                window = (window * (spread_over(scores, mask) if spread is None else spread)).to(dtype).double()
            divisor = reaching(window)
        gradient = change(divisor)
        if scores.device.type == "cpu" and is_plain_call(scores) and zero_gradients.is_due(scores):
            with_gradient = layout.total((gradient != 0).long()) > 0
            if not bool(with_gradient.all()) and int(slopes.count_nonzero()) >= zero_gradients.FEWEST_ITEMS:
                further = change(reaching(spread_over(scores, mask)))
                with_loss = with_gradient | (layout.total((further != 0).long()) > 0)  # others are in order
                zero_gradients.warn_if_mostly_zero(with_loss, with_gradient, reach.kind, reach.strength)
    else:
        losses, gradient, divisor = counted_losses(before), before[..., :0], items.double()
    loss: Tensor = ops.reduce_lists(scores, losses, gradient, divisor, counting, lists.offsets, reduction)
    return loss.reshape(lists.shape if reduction == "none" else ())


def lowered(scores: Tensor, shares: Tensor, margin: MarginValue, spread: Tensor | None) -> Tensor:
    """Scores less the margin times ``shares``."""
    if margin.number == 0:
        return scores
    dtype = compute_dtype(scores.dtype)
    by = shares * margin.number
    if margin.is_share:
        assert spread is not None
        by = by * spread
    return scores.to(dtype) - by.to(dtype)


def spread_over(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The spread of a call's scores, a float64 scalar; both in the engine's layout."""
    return spread_of(moments(scores, mask).unsqueeze(0), compute_dtype(scores.dtype)).squeeze(0)


def ranks_of(lists: Lists, scores: Tensor, mask: Tensor | None, ties: str) -> Tensor:
    """Exact ranks, not differentiable, in the engine's layout."""
    if lists.offsets is not None:
        return rank_ops.ranks(scores, mask, lists.offsets, ties)  # type: ignore[no-any-return]
    rows = None if mask is None else _as_lists("mask", mask)
    out = rank_ops.ranks(_as_lists("scores", scores), rows, None, ties)
    return out.unsqueeze(0)  # type: ignore[no-any-return]
