"""Many short lists on the GPU: the order of the kernels in ``_kernels.short_lists``."""

import functools
from types import ModuleType
from typing import Any

import torch

from rankgrad.engine.launching import Launcher, Plan, programs
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.triton_arguments import Arguments

_ROW_BLOCK = 512
_PROGRAMS = 16  # a processor; each takes a list, and then another
_MOST_RANKS = 1 << 24  # 16-bit numbers that all programs keep together


@functools.cache
def _kernels() -> ModuleType:
    from rankgrad.engine._kernels import short_lists

    return short_lists


class _Plan(Plan):
    """Sizes and workspace for lists of one shape."""

    def __init__(self, device: torch.device, rows: int, n: int, slots: int, with_gradient: bool, by_window: bool):
        super().__init__()
        self.group = 4 if slots <= 4 else 16
        self.block = min(_ROW_BLOCK, max(128, 1 << (n - 1).bit_length()))
        self.counts = self.part(torch.int32, rows)
        self.items = self.part(torch.int64, rows)
        self.first_group = self.part(torch.int32, rows * self.group)
        several = with_gradient and slots > self.group
        self.room = (2 * slots if by_window else n) if several else 0
        self.programs = min(rows, _PROGRAMS * programs(device))
        if several:  # each needs room of its own, and more than four a processor wait for registers anyway
            self.programs = min(self.programs, max(4 * programs(device), _MOST_RANKS // self.room))
        self.ranks = self.part(torch.uint16, self.programs * self.room)
        self.sums = self.part(torch.int64, self.programs * self.group if by_window else 0)


@functools.lru_cache(maxsize=256)
def _plan(
    device: torch.device,
    calls: int,
    per_call: int,
    n: int,
    slots: int,
    with_gradient: bool,
    by_window: bool,
    *key: Any,
) -> _Plan:
    """The plan for a kind of evaluation; ``key`` is what its compiled kernels depend on besides."""
    return _Plan(device, calls * per_call, n, slots, with_gradient, by_window)


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    given = Arguments(request)
    plan = _plan(given.device, *given.key)
    launch = Launcher(plan, given.device)
    launch(
        _kernels().count_items, (given.rows, 1), given.relevance, given.mask, plan.counts, plan.items,
        plan.first_group,
        given.n, MASKED=given.masked, ROWS=plan.group, BLOCK=1024,
    )  # fmt: skip
    launch(
        _kernels().rank_lists, (plan.programs, 1), given.scores, given.relevance, given.mask, plan.counts,
        plan.items,
        plan.first_group, given.lists, given.divisor, given.spread, given.tables, given.losses, given.changes,
        plan.ranks, plan.sums, given.rows, given.n, given.slots, plan.room, given.per_call, given.n_tables,
        given.half_bits, given.reach_bits,
        FORM=given.form, REACH=given.reach, MARGIN_SHARE=given.margin_share, WRITE=given.with_gradient,
        MASKED=given.masked, FEW=4, ROWS=plan.group, GIVEN=given.given, BLOCK=plan.block,
    )  # fmt: skip
    return given.answer()
