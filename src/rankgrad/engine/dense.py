"""Lists with many relevant items on the GPU: sorts by torch, and the kernels of ``_kernels.dense_lists``."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine.launching import Launcher, Plan
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.triton_arguments import Arguments, Evaluation

_BLOCK = 1024


@functools.cache
def _kernels() -> ModuleType:
    from rankgrad.engine._kernels import dense_lists

    return dense_lists


@functools.lru_cache(maxsize=256)
def _plan(*key: Any) -> Plan:
    return Plan()


class _DenseEvaluation(Evaluation):
    """One evaluation over dense lists, ``[calls, lists, n]``."""

    def __init__(self, request: Request) -> None:
        given = self.given = Arguments(request)
        self.launch = Launcher(_plan(given.device, *given.key), given.device)
        self.kernels = _kernels()
        self.words = -(-given.n // 32)
        self.apart = given.rows * self.words  # irrelevant items' bits lie behind those of all lists' relevant ones
        self.blocks, slot_blocks = -(-given.n // _BLOCK), -(-given.slots // _BLOCK)
        self.grid, self.slot_grid = (given.rows * self.blocks, 1), (given.rows * slot_blocks, 1)
        self.sizes: dict[str, Any] = {"MASKED": given.masked, "BLOCK": _BLOCK}

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.given.device)

    def sort(self) -> None:
        """Scores after the margin, sorted; and which of them are relevant, in both orders."""
        given, launch, kernels = self.given, self.launch, self.kernels
        n, words, apart = given.n, self.words, self.apart
        values = self.new(given.rows, n, dtype=torch.float32)
        kinds_of_bits = 2 if given.masked else 1
        self.by_index, ones = self.new(2, kinds_of_bits, given.rows, words, dtype=torch.int32).unbind(0)
        self.nan = torch.zeros(given.rows, dtype=torch.int32, device=given.device)
        launch(
            kernels.shift, self.grid, given.scores, given.relevance, given.mask, given.spread, values,
            self.by_index, ones, self.nan, n, words, apart, given.per_call, given.half_bits,
            MARGIN_SHARE=given.margin_share, **self.sizes,
        )  # fmt: skip
        self.totals_by_index = ones.cumsum(-1, dtype=torch.int32)
        self.counts, self.items = self.new(2, given.rows, dtype=torch.int64).unbind(0)
        launch(
            kernels.count_lists, (given.calls, 1), self.totals_by_index, given.spread, self.counts, self.items,
            given.lists, given.divisor, n, words, apart, given.per_call, given.reach_bits,
            REACH=given.reach, GIVEN=given.lists_given, MASKED=given.masked, BLOCK=128,
        )  # fmt: skip
        self.values, self.order = torch.sort(values, dim=-1, descending=True, stable=True)
        self.room = values.view(torch.int32)  # free again
        self.bits = torch.empty_like(self.by_index)
        launch(kernels.flag, self.grid, self.order, self.by_index, self.bits, ones, n, words, apart, **self.sizes)
        self.totals = ones.cumsum(-1, dtype=torch.int32)

    def move(self) -> None:
        """The losses; by lambda where relevant items move to, by window their slopes."""
        given, write = self.given, self.given.with_gradient
        self.old = self.new(given.rows, given.slots if write else 1, dtype=torch.int64)
        partial = self.new(given.calls, given.per_call, self.blocks, dtype=torch.float64)
        self.tops = torch.empty_like(partial) if write and given.by_window else partial
        self.launch(
            self.kernels.move, self.grid, self.values, self.order, self.bits, self.totals, self.by_index,
            self.totals_by_index, self.counts, self.items, given.lists, given.spread, self.nan, given.tables,
            self.old, self.room, partial, self.tops, given.n, given.slots, self.words, self.apart, given.per_call,
            given.n_tables, given.reach_bits,
            FORM=given.form, REACH=given.reach, WRITE=write, **self.sizes, warps=8,
        )  # fmt: skip
        torch.sum(partial, -1, out=given.losses)

    def by_lambda(self) -> None:
        """Sort the moved scores: how far every rank moves."""
        given, launch, kernels = self.given, self.launch, self.kernels
        n, slots, words, apart = given.n, given.slots, self.words, self.apart
        moved = self.new(given.rows, slots, dtype=torch.float32)
        launch(kernels.take_moved, self.slot_grid, self.old, self.counts, moved, slots, BLOCK=_BLOCK)
        moved, moved_order = torch.sort(moved, dim=-1, descending=True, stable=True)
        ranks = self.new(given.rows, slots, dtype=torch.int32)
        launch(
            kernels.place_moved, self.slot_grid, moved, moved_order, self.values, self.bits, self.totals,
            self.counts, ranks, n, slots, words, apart,
            **self.sizes,
        )  # fmt: skip
        launch(
            kernels.place_others, self.grid, self.values, self.order, self.bits, moved, self.counts, self.room,
            given.changes, n, slots, words, apart,
            **self.sizes,
        )  # fmt: skip
        launch(
            kernels.finish, self.grid, self.by_index, self.totals_by_index, self.old, ranks, given.changes, n,
            slots, words,
            BLOCK=_BLOCK,
        )  # fmt: skip

    def by_window(self) -> None:
        """Sum up the slopes; the risen scores are in order: the gradient."""
        given = self.given
        unit = self.new(given.rows, dtype=torch.float64)
        self.launch(
            self.kernels.in_units, self.slot_grid, self.old, self.tops, self.counts, unit, given.slots,
            self.blocks,
            BLOCK=_BLOCK,
        )  # fmt: skip
        sums = self.old.cumsum(-1)
        self.launch(
            self.kernels.reach_up, self.grid, self.values, self.order, self.bits, self.totals, self.counts,
            given.spread, given.tables, sums, self.room.view(torch.float32), unit, given.changes, given.n,
            given.slots, self.words, self.apart, given.per_call, given.n_tables, given.reach_bits,
            FORM=given.form, REACH=given.reach, **self.sizes, warps=8,
        )  # fmt: skip


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    run = _DenseEvaluation(request)
    run.sort()
    run.move()
    return run.answer()
