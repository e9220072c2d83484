"""Lists with many relevant items on the GPU: sorts by torch, and the kernels of ``_kernels.dense_lists``."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine.forms import code
from rankgrad.engine.launching import Launcher, Plan, kinds
from rankgrad.engine.triton_arguments import as_bytes, bits, half_of

_BLOCK = 1024


@functools.cache
def _kernels() -> ModuleType:
    from rankgrad.engine._kernels import dense_lists

    return dense_lists


@functools.lru_cache(maxsize=256)
def _plan(*key: Any) -> Plan:
    return Plan()


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
    """Both steps and the loss between them; see :class:`rankgrad.engine.request.Answer`."""
    calls, per_call, n = scores.shape
    rows, masked, device = calls * per_call, mask is not None, scores.device
    slots = min(n, max_relevant or n)
    words = -(-n // 32)
    apart = rows * words  # the bits of irrelevant items lie behind those of all lists' relevant ones
    blocks, slot_blocks = -(-n // _BLOCK), -(-slots // _BLOCK)
    scores, relevance = scores.contiguous(), as_bytes(relevance)
    exists = relevance if mask is None else as_bytes(mask)
    tables = weights
    key = kinds(scores, relevance, exists if masked else None, tables, lists)
    launch = Launcher(_plan(device, calls, per_call, n, slots, *key), device)
    kernels = _kernels()
    new = functools.partial(torch.empty, device=device)
    masking: dict[str, Any] = {"MASKED": masked, "BLOCK": _BLOCK}
    grid, slot_grid = (rows * blocks, 1), (rows * slot_blocks, 1)

    values = new(rows, n, dtype=torch.float32)
    by_index, ones = new(2, 2 if masked else 1, rows, words, dtype=torch.int32).unbind(0)
    nan = torch.zeros(rows, dtype=torch.int32, device=device)
    launch(
        kernels.shift, grid, scores, relevance, exists, values, by_index, ones, nan, n, words, apart,
        half_of(margin), **masking,
    )  # fmt: skip
    totals_by_index = ones.cumsum(-1, dtype=torch.int32)
    counts, items = new(2, calls, per_call, dtype=torch.int64).unbind(0)
    counting = new(calls, dtype=torch.int64)
    launch(
        kernels.count_lists, (calls, 1), totals_by_index, counts, items, counting, n, words, apart, per_call,
        MASKED=masked, BLOCK=128,
    )  # fmt: skip
    counting = counting if lists is None else lists
    best_first, order = torch.sort(values, dim=-1, descending=True, stable=True)
    in_order = torch.empty_like(by_index)
    launch(kernels.flag, grid, order, by_index, in_order, ones, n, words, apart, **masking)
    totals = ones.cumsum(-1, dtype=torch.int32)

    places = values.view(torch.int32)
    changes = new(calls, per_call, n if with_changes else 0, dtype=torch.int32)
    old = new(rows, slots if with_changes else 1, dtype=torch.int64)
    partial = new(calls, per_call, blocks, dtype=torch.float64)
    launch(
        kernels.move, grid, best_first, order, in_order, totals, by_index, totals_by_index, counts, items,
        counting, nan, partial if tables is None else tables, old, places, partial, n, slots, words, apart,
        0 if tables is None else tables.shape[1], bits(lam), per_call, FORM=code(form), WRITE=with_changes,
        **masking, warps=8,
    )  # fmt: skip
    losses = partial.sum(-1)
    if not with_changes:
        return losses, changes, items, counting

    moved = new(rows, slots, dtype=torch.float32)
    launch(kernels.take_moved, slot_grid, old, counts, moved, slots, BLOCK=_BLOCK)
    moved, moved_order = torch.sort(moved, dim=-1, descending=True, stable=True)
    ranks = new(rows, slots, dtype=torch.int32)
    launch(
        kernels.place_moved, slot_grid, moved, moved_order, best_first, in_order, totals, counts, ranks, n, slots,
        words, apart, **masking,
    )  # fmt: skip
    launch(
        kernels.place_others, grid, best_first, order, in_order, moved, counts, places, changes, n, slots, words,
        apart, **masking,
    )  # fmt: skip
    launch(kernels.finish, grid, by_index, totals_by_index, old, ranks, changes, n, slots, words, BLOCK=_BLOCK)
    return losses, changes, items, counting
