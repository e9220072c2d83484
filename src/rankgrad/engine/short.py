"""Many short lists on the GPU: the order of the kernels in ``_kernels.short_lists``."""

import functools
from types import ModuleType
from typing import Any

import torch

from rankgrad.engine.launching import Launcher, Plan, processors_of
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.triton_arguments import Arguments

_FLAGS_BLOCK = 1024  # flags that are counted at a time
_FEW, GROUP = 4, 16  # relevant items that are compared at a time
_BLOCK, _NARROW = 512, 128  # items that few, and a whole group, are compared with at a time
_WIDER = 8  # times as many, with as many more warps, where too few lists keep the device busy
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
        width, processors = max(128, 1 << (n - 1).bit_length()), processors_of(device)
        self.group = _FEW if slots <= _FEW else GROUP
        wider = _WIDER if rows < 2 * processors and n >= 2 * _WIDER * _BLOCK else 1
        self.warps = 4 * wider
        self.block, self.narrow = min(width, wider * _BLOCK), min(width, wider * _NARROW)
        self.flags = min(width, wider * _FLAGS_BLOCK)
        self.counts = self.part(torch.int32, rows)
        self.items = self.part(torch.int64, rows)
        self.first_group = self.part(torch.int32, rows * self.group)
        self.programs = min(rows, _PROGRAMS * processors)
        self.sums = self.part(torch.int32, self.programs * (4 * self.group**2 + 2 * self.group))

        self.others = slots > self.group  # whether a list may have more relevant items than a group
        self.room = (2 * slots if by_window else n) if self.others and with_gradient else 0
        # each needs room of its own, and more than four a processor wait for registers anyway
        most = max(4 * processors, _MOST_RANKS // max(1, self.room))
        self.other_programs = min(self.programs, most) if self.others else 0
        self.ranks = self.part(torch.uint16, self.other_programs * self.room)


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
    assert request.by_window or not request.scaled
    given = Arguments(request)
    plan = _plan(given.device, *given.key)
    launch = Launcher(plan, given.device)
    launch(
        _kernels().count_items, (given.rows, 1), given.relevance, given.mask, plan.counts, plan.items,
        plan.first_group, given.n,
        MASKED=given.masked, ROWS=plan.group, BLOCK=plan.flags, warps=plan.warps,
    )  # fmt: skip
    launch(
        _kernels().rank_sparse_lists, (plan.programs, 1), given.scores, given.relevance, given.mask, plan.counts,
        plan.items, plan.first_group, given.lists, given.divisor, given.spread, given.tables, given.losses,
        given.changes, plan.sums, given.rows, given.n, given.slots, given.per_call, given.n_tables,
        given.half_bits, given.reach_bits,
        FORM=given.form, REACH=given.reach, MARGIN_SHARE=given.margin_share, WRITE=given.with_gradient,
        SCALED=request.scaled, MASKED=given.masked, FEW=_FEW, ROWS=plan.group, GIVEN=given.lists_given,
        BLOCK=plan.block, NARROW=plan.narrow, warps=plan.warps,
    )  # fmt: skip
    if plan.others:
        launch(
            _kernels().rank_other_lists, (plan.other_programs, 1), given.scores, given.relevance, given.mask,
            plan.counts, plan.items, given.lists, given.spread, given.tables, given.losses, given.changes,
            plan.ranks, given.rows, given.n, given.slots, plan.room, given.per_call, given.n_tables,
            given.half_bits, given.reach_bits,
            FORM=given.form, REACH=given.reach, MARGIN_SHARE=given.margin_share, WRITE=given.with_gradient,
            SCALED=request.scaled, MASKED=given.masked, ROWS=plan.group, BLOCK=min(_BLOCK, plan.block),
        )  # fmt: skip
    return given.answer()
