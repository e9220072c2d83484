"""Many short lists on the GPU: the order of the kernels in ``_kernels.short_lists``."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine.forms import code
from rankgrad.engine.launching import Launcher, Plan, kinds, programs
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.triton_arguments import as_bytes, bits, half_of

_ROW_BLOCK = 512
_PROGRAMS = 16  # a processor; each takes a list, and then another


@functools.cache
def kernels() -> ModuleType:
    """The Triton kernels, loaded when first needed."""
    from rankgrad.engine._kernels import short_lists

    return short_lists


class _Plan(Plan):
    """Sizes and workspace for lists of one shape."""

    def __init__(self, device: torch.device, rows: int, n: int, max_relevant: int, with_changes: bool) -> None:
        super().__init__()
        self.group = 4 if max_relevant <= 4 else 16
        self.programs = min(rows, _PROGRAMS * programs(device))
        self.block = min(_ROW_BLOCK, max(128, 1 << (n - 1).bit_length()))
        self.counts = self.part(torch.int32, rows)
        self.first_group = self.part(torch.int32, rows * self.group)
        several = with_changes and max_relevant > self.group
        self.ranks = self.part(torch.uint16, self.programs * n if several else 1)


@functools.lru_cache(maxsize=256)
def _plan(device: torch.device, rows: int, n: int, max_relevant: int, with_changes: bool, *key: Any) -> _Plan:
    """The plan for a kind of evaluation; ``key`` is what its compiled kernels depend on besides."""
    return _Plan(device, rows, n, max_relevant, with_changes)


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
    scores, relevance = scores.contiguous(), as_bytes(relevance)
    exists = relevance if mask is None else as_bytes(mask)
    tables = weights
    key = kinds(scores, relevance, exists if masked else None, lists, tables)
    plan = _plan(device, rows, n, min(n, max_relevant or n), with_changes, per_call, *key)
    launch = Launcher(plan, device)
    items = torch.empty((calls, per_call), dtype=torch.int64, device=device)
    losses = torch.empty((calls, per_call), dtype=torch.float64, device=device)
    changes = torch.empty((calls, per_call, n if with_changes else 0), dtype=count_dtype(n), device=device)
    counting = torch.empty(calls, dtype=torch.int64, device=device) if lists is None else lists
    launch(
        kernels().count_items, (rows, 1), relevance, exists, plan.counts, items, plan.first_group, n,
        MASKED=masked, ROWS=plan.group, BLOCK=1024,
    )  # fmt: skip
    launch(
        kernels().rank_lists, (plan.programs, 1), scores, relevance, exists, plan.counts, items, plan.first_group,
        counting, losses if tables is None else tables, losses, changes if with_changes else items, plan.ranks,
        rows, n, half_of(margin), bits(lam), 0 if tables is None else tables.shape[1], per_call,
        FORM=code(form), WRITE=with_changes, MASKED=masked, FEW=4, ROWS=plan.group,
        GIVEN=lists is not None, BLOCK=plan.block,
    )  # fmt: skip
    return losses, changes, items, counting
