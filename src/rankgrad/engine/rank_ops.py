"""Whole ranks as ops: exact forward, Algorithm 1 backward. Lists come as ``[lists, n]``."""

# No `from __future__ import annotations`: torch reads the annotations to make the ops' schemas.
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine.layouts import Ragged, Rows
from rankgrad.engine.precision import compute_dtype, rank_dtype
from rankgrad.engine.ranker import exact_ranks
from rankgrad.engine.registration import check_nan, fake_of, op, vmap_over_calls, waits_for_checks


@op
def ranks(scores: Tensor, mask: Tensor | None, offsets: Tensor | None, ties: str) -> Tensor:
    """Exact ranks of ``[lists, n]`` scores (``[calls, N]`` with the offsets of ragged lists), not differentiable.

    On a GPU a list with a NaN ranks NaN.
    """
    nan = scores.isnan() if mask is None else scores.isnan() & mask
    out = exact_ranks(scores, mask, ties, offsets)
    lists = Rows() if offsets is None else Ragged(offsets, scores.shape[-1])
    out.masked_fill_(lists.per_item(lists.total(nan.long())) > 0, torch.nan)
    if waits_for_checks(scores, check_finite=False):
        check_nan(out)
    return out


@fake_of("ranks")
def _(scores: Tensor, mask: Tensor | None, offsets: Tensor | None, ties: str) -> Tensor:
    return scores.new_empty(scores.shape, dtype=rank_dtype(scores))


torch.library.register_vmap("rankgrad::ranks", vmap_over_calls(ranks))


@op
def rank(scores: Tensor, mask: Tensor | None, lam: float, ties: str) -> Tensor:
    """Exact ranks of ``[lists, n]`` scores, differentiable by Algorithm 1."""
    out: Tensor = ranks(scores, mask, None, ties)
    return out


@fake_of("rank")
def _(scores: Tensor, mask: Tensor | None, lam: float, ties: str) -> Tensor:
    return scores.new_empty(scores.shape, dtype=rank_dtype(scores))


@op
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


@fake_of("rank_backward")
def _(grad: Tensor, scores: Tensor, rank: Tensor, mask: Tensor | None, lam: float, ties: str) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _rank_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, mask, ctx.lam, ctx.ties = inputs
    ctx.save_for_backward(scores, output, mask)


def _rank_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    scores, output, mask = ctx.saved_tensors
    return rank_backward(grad, scores, output, mask, ctx.lam, ctx.ties), None, None, None


torch.library.register_autograd("rankgrad::rank", _rank_backward, setup_context=_rank_setup)
torch.library.register_vmap("rankgrad::rank", vmap_over_calls(rank))
torch.library.register_vmap("rankgrad::rank_backward", vmap_over_calls(rank_backward))
