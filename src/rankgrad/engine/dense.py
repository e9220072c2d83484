"""For lists with many relevant items, on the GPU: two whole sorts by torch, one before and one after the step."""

import torch
from torch import Tensor

from rankgrad.engine.forms import FORMS, weight_tables
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.triton_arguments import as_bytes, bits, half_of

_BLOCK = 1024


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
    from rankgrad.engine._kernels import dense_lists as kernels

    calls, per_call, n = scores.shape
    rows, masked = calls * per_call, mask is not None
    blocks = -(-n // _BLOCK)
    grid = (rows * blocks,)
    relevant = relevance if mask is None else relevance & mask
    count = relevant.sum(-1)
    items = torch.full_like(count, n) if mask is None else mask.sum(-1)
    lists = (count > 0).sum(-1) if lists is None else lists
    flags, exists = as_bytes(relevance), as_bytes(relevance if mask is None else mask)
    values = scores.new_empty(rows, n, dtype=torch.float32)
    kernels.shift[grid](
        scores.contiguous(), flags, exists, values, n, half_of(margin), MASKED=masked, BLOCK=_BLOCK, num_warps=4
    )
    nan = values.isnan().reshape(scores.shape)
    nan = (nan if mask is None else nan & mask).any(-1)

    def standing() -> tuple[Tensor, Tensor, Tensor]:
        """Sorted values, their order, and running totals of relevant and irrelevant items."""
        best_first, order = torch.sort(values, dim=-1, descending=True, stable=True)
        totals = values.new_empty(rows, n, dtype=torch.int64)
        kernels.flag[grid](order, flags, exists, totals, n, MASKED=masked, BLOCK=_BLOCK, num_warps=4)
        return best_first, order, totals.cumsum(-1)

    shape = (calls, per_call, n if with_changes else 0)
    changes = scores.new_empty(shape, dtype=count_dtype(n))
    partial = values.new_empty(rows, blocks, dtype=torch.float64)
    tables = partial if weights is None else torch.stack(weight_tables(weights))
    best_first, order, totals = standing()
    kernels.move[grid](
        best_first, totals, order, count, items, lists, tables, values, changes, partial, n, tables.shape[-1],
        bits(lam), per_call, FORM=FORMS.index(form), WRITE=with_changes, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    losses = partial.sum(-1).reshape(calls, per_call) / count.clamp(min=1)
    losses = losses.masked_fill_(nan, torch.nan)
    if with_changes:
        del best_first, order, totals
        best_first, order, totals = standing()
        kernels.settle[grid](best_first, totals, order, changes, n, BLOCK=_BLOCK, num_warps=4)
    return losses, changes, items, lists
