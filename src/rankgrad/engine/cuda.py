"""The GPU engine: chooses among the regimes of lists, by shape and the hint ``max_relevant``.

Nothing here waits for the device, and nothing is sized or chosen by how many items are relevant, which only
the device knows.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import dense, long, reference, short
from rankgrad.engine.launching import Launcher, Plan, kinds, on_its_device, programs
from rankgrad.engine.triton_arguments import bits

LONGEST_SHORT_LIST = 65_536
FEWEST_SHORT_LISTS = 16  # fewer lists would leave most of the device idle: one program takes a list
ITEMS_A_SHORT_LIST = 256  # and the longer they are, the more lists it takes to keep all programs busy
DENSE = 8  # one relevant item in so many, or more, is a case for whole sorts
_MOST_ROWS = 65_535  # a grid's second axis ends there


def supports(scores: Tensor) -> bool:
    """Whether the kernels take these scores: a 32-bit key and a 32-bit index make a word."""
    return scores.dtype != torch.float64 and scores.numel() > 0 and scores.shape[-1] < 2**32


@on_its_device
def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one; see :func:`rankgrad.engine.reference.relevant_ranks`."""
    if scores.shape[0] * scores.shape[1] > _MOST_ROWS:
        return reference.relevant_ranks(scores, relevance, mask, margin)
    return long.relevant_ranks(scores, relevance, mask, margin)


@on_its_device
def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two; see :func:`rankgrad.engine.reference.rank_changes`."""
    if scores.shape[0] * scores.shape[1] > _MOST_ROWS:
        return reference.rank_changes(scores, relevance, mask, margin, position, steps)
    return long.rank_changes(scores, relevance, mask, margin, steps)


@on_its_device
def list_losses(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both steps and the loss between them; see :func:`rankgrad.engine.stepwise.list_losses`."""
    calls, per_call, n = scores.shape
    engine: ModuleType = long
    if max_relevant is not None and max_relevant * DENSE > n and 1024 < n < 2**31:
        engine = dense
    elif n <= LONGEST_SHORT_LIST and calls * per_call >= max(FEWEST_SHORT_LISTS, n // ITEMS_A_SHORT_LIST):
        engine = short
    return engine.list_losses(  # type: ignore[no-any-return]
        scores, relevance, mask, weights, form, lam, margin, with_changes, max_relevant, lists
    )


@functools.lru_cache(maxsize=256)
def _plan(*key: Any) -> Plan:
    return Plan()


@on_its_device
def reduce(losses: Tensor, lists: Tensor, mean: bool, dtype: torch.dtype) -> Tensor:
    """Sum or mean of each call's list losses, ``[calls, lists] -> [calls]``, in one launch."""
    losses = losses.contiguous()
    calls, per_call = losses.shape
    out = torch.empty(calls, dtype=dtype, device=losses.device)
    launch = Launcher(_plan(losses.device, per_call, dtype, *kinds(losses, lists)), losses.device)
    launch(short.kernels().reduce_losses, (calls, 1), losses, lists, out, per_call, MEAN=mean, BLOCK=1024)
    return out


@on_its_device
def scale(
    changes: Tensor,
    upstream: Tensor,
    losses: Tensor,
    items: Tensor,
    lists: Tensor,
    lam: float,
    reduction: str,
    out: Tensor,
) -> None:
    """The gradient from rank changes into ``out``, in one launch; ``out`` may be the memory of ``changes``."""
    calls, per_call, n = changes.shape
    rows, device = calls * per_call, changes.device
    upstream = upstream.contiguous()
    blocks = min(-(-n // 2048), max(1, 16 * programs(device) // rows))
    key = kinds(changes, upstream, losses, items, lists, out)
    launch = Launcher(_plan(device, calls, per_call, n, *key), device)
    launch(
        short.kernels().scale_changes, (rows, blocks), changes, upstream, losses, items, lists, out, n, per_call,
        bits(lam), REDUCTION=("mean", "sum", "none").index(reduction), BLOCK=2048,
    )  # fmt: skip
