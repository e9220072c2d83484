"""Few, long lists on the GPU: their workspace, and the order of the launches.

The kernels are in ``long_lists``, ``sorting`` and ``long_terms`` of ``_kernels``.
"""

import functools
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine.launching import Launcher, Plan, processors_of
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.triton_arguments import Arguments, Evaluation, room_for_gradient

_CHUNKS, _TERMS_BLOCK = 256, 512
_SORT_BLOCK, _MERGE_PIECE = 1024, 512
_SORTERS = 2  # programs a processor that wait for each other: all must run at once (an H200 has room for 2)
_SORTED_AT_ONCE = 16  # programs a processor that sort without waiting, of all lists together
_STEPWISE = 1 << 22  # with room for so many words a launch for each merge round pays, though most are empty
_sorters: dict[torch.device, int] = {}  # devices that had room for fewer
_STREAM_BLOCK, _STREAM_WARPS = 512, 4
_STREAMS = 16  # programs a processor that stream
_GATHERERS = 4  # programs a processor that gather, where there are so many items
_ROOM = 1 << 20  # for private copies of the counts
_MOST_SLOTS = 1 << 23  # relevant items that there is room for at once, of all lists: 36 bytes each
_COUNTS_ONLY = -1  # what `terms` does besides the forms


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    from rankgrad.engine._kernels import long_lists, long_terms, sorting

    return long_lists, long_terms, sorting


class _Plan(Plan):
    """Sizes and workspace for lists of one shape."""

    def __init__(self, device: torch.device, rows: int, n: int, slots: int) -> None:
        super().__init__()
        self.rows, self.n, self.slots = rows, n, slots
        self.cells = 4096
        while self.cells < min(4 * slots, n // 8, 1 << 22):
            self.cells *= 2
        self.processors = processors_of(device)
        self.streams = max(1, _STREAMS * self.processors // rows)
        self.gathered = 16384  # items in a block; each block adds to one number that all programs share
        while self.gathered > 1024 and rows * -(-n // self.gathered) < _GATHERERS * self.processors:
            self.gathered //= 2
        self.room = max(1, _ROOM // rows)
        self.words, self.loose = (self.part(torch.int64, rows * slots) for _ in range(2))
        self.levels = self.part(torch.float32, rows * slots)
        self.table = self.part(torch.int64, rows * self.cells)
        self.halves = self.table._replace(dtype=torch.int32, length=2 * self.table.length)
        self.geometry = self.part(torch.float32, rows * 2)
        self.counts = self.part(torch.int32, rows * (self.room + slots + 1))
        self.totals = self.part(torch.int64, rows * (slots + 1))
        self.chunk_sums, self.unit_sums = (self.part(torch.int64, rows * _CHUNKS) for _ in range(2))
        self.partial, self.tops = (self.part(torch.float64, rows * _CHUNKS) for _ in range(2))
        self.unit = self.part(torch.float64, rows)


@functools.lru_cache(maxsize=256)
def _plan(device: torch.device, calls: int, per_call: int, n: int, slots: int, *key: Any) -> _Plan:
    """The plan for a kind of evaluation; ``key`` is what its compiled kernels depend on besides."""
    return _Plan(device, calls * per_call, n, slots)


class _LongEvaluation(Evaluation):
    """One evaluation over few long lists, ``[calls, lists, n]``."""

    def __init__(self, request: Request, gradient: Tensor | None = None) -> None:
        self.given = Arguments(request, gradient)
        self.plan = _plan(self.given.device, *self.given.key)
        self.launch = Launcher(self.plan, self.given.device)
        self.lists, self.slotwise, self.sorting = _kernels()
        self.state = torch.zeros(self.given.rows, 5, dtype=torch.int64, device=self.given.device)

    def gather(self) -> None:
        """The relevant items as words in any order, and what is counted of the lists."""
        given, plan = self.given, self.plan
        self.launch(
            self.lists.gather, (plan.rows, plan.streams), given.scores, given.relevance, given.mask, plan.loose,
            self.state, given.spread, plan.n, plan.slots, given.per_call, given.half_bits,
            MASKED=given.masked, MARGIN_SHARE=given.margin_share, BLOCK=plan.gathered, warps=8,
        )  # fmt: skip
        self.launch(
            self.lists.count_lists, (given.calls, 1), self.state, given.lists, given.divisor, given.spread, plan.n,
            given.per_call, given.reach_bits,
            MASKED=given.masked, REACH=given.reach, GIVEN=given.lists_given, BLOCK=128,
        )  # fmt: skip

    def sort(self, *, again: bool) -> None:
        """The loose words, sorted; how many there are decides on the device which of the launches does it."""
        plan = self.plan
        words = plan.loose, plan.words, self.state, plan.slots
        pairs: int = self.sorting.PAIRS.value
        at_once = max(1, _SORTED_AT_ONCE * plan.processors // plan.rows)
        blocks = min(-(-min(plan.slots, pairs) // 16), at_once)
        self.launch(self.sorting.rank_by_pairs, (plan.rows, blocks), *words, BLOCK=16, TILE=256)
        if plan.slots <= pairs:
            return
        stepwise = plan.slots > _STEPWISE
        self._merge(words, most=self.sorting.MANY.value if stepwise else 1 << 62, again=again)
        if stepwise:
            rounds, run = 0, _SORT_BLOCK
            while run < plan.slots:
                rounds, run = rounds + 1, run * int(self.sorting.WAYS.value)
            for step in range(rounds + 1):
                self.launch(
                    self.sorting.sort_step, (plan.rows, at_once), *words, step,
                    BLOCK=_SORT_BLOCK, PIECE=_MERGE_PIECE, warps=8,
                )  # fmt: skip

    def _merge(self, words: tuple[Any, ...], *, most: int, again: bool) -> None:
        """Sort many words by merging in one launch, with as many programs as the device runs at once."""
        device, processors = self.given.device, self.plan.processors
        at_once = 1 if processors == 1 else _sorters.get(device, _SORTERS) * processors
        sorters = max(1, at_once // self.plan.rows)
        try:
            self.launch(
                self.sorting.sort_by_merging, (self.plan.rows, sorters), *words,
                MOST=most, SECOND=int(again), BLOCK=_SORT_BLOCK, PIECE=_MERGE_PIECE, warps=8, together=sorters > 1,
            )  # fmt: skip
        except RuntimeError as error:  # a device with room for fewer than the one this was measured on
            if "cooperative" not in str(error) or sorters == 1:
                raise
            # one a processor, and if there is no room for that either, a single one, which waits for no other
            _sorters[device] = 1 if _sorters.get(device, _SORTERS) > 1 else 0
            self._merge(words, most=most, again=again)

    def place(self, *, again: bool) -> None:
        """Stream the list against the sorted words; the places, or what follows from two, go into the gradient."""
        given, plan = self.given, self.plan
        grid = (plan.rows, plan.streams)
        self.launch(
            self.lists.make_table, grid, plan.words, plan.levels, plan.halves, plan.geometry, plan.counts,
            self.state, given.spread, plan.slots, plan.cells, plan.room, given.per_call, given.reach_bits,
            REACH=given.reach, AGAIN=again, BLOCK=512,
        )  # fmt: skip
        self.launch(
            self.lists.stream, grid, given.scores, given.relevance, given.mask, plan.levels, plan.table,
            plan.geometry, plan.counts, self.state, given.spread, plan.loose, plan.unit, given.changes, plan.n,
            plan.slots, plan.cells, plan.room, given.per_call, given.half_bits,
            MASKED=given.masked, MARGIN_SHARE=given.margin_share, WRITE=given.with_gradient, AGAIN=again,
            WINDOW=given.by_window, BLOCK=_STREAM_BLOCK, warps=_STREAM_WARPS,
        )  # fmt: skip
        self.launch(
            self.slotwise.sum_counts, (plan.rows, _CHUNKS), plan.counts, plan.totals, plan.chunk_sums, self.state,
            plan.slots, plan.room, plan.streams,
            MORE=again and not given.by_window, TILE=64, BLOCK=16, WIDE=1024,
        )  # fmt: skip

    def terms(self, form: int, above: Tensor | None = None) -> None:
        """The loss, in parts, and what moves; or just the counts, into ``above``."""
        given, plan = self.given, self.plan
        self.launch(
            self.slotwise.terms, (plan.rows, _CHUNKS), plan.words, plan.loose, plan.totals, plan.chunk_sums,
            self.state, given.tables, given.lists, given.spread, plan.partial, plan.tops, given.changes,
            self.state if above is None else above, plan.n, plan.slots, given.n_tables, given.per_call,
            given.reach_bits,
            FORM=form, MOVE=given.with_gradient, REACH=given.reach, MASKED=given.masked, CHUNKS=_CHUNKS,
            BLOCK=_TERMS_BLOCK, warps=8,
        )  # fmt: skip

    def sum_losses(self) -> None:
        self.launch(
            self.slotwise.sum_losses, (self.plan.rows, 1), self.plan.partial, self.given.losses, CHUNKS=_CHUNKS
        )

    def by_lambda(self) -> None:
        """Sort and stream the moved words: how far every rank moves."""
        self.sort(again=True)
        self.place(again=True)
        self._settle()

    def by_window(self) -> None:
        """Sum up the slopes and stream against the risen scores, which are in order: the gradient."""
        plan = self.plan
        grid = (plan.rows, _CHUNKS)
        sizes: dict[str, Any] = {"CHUNKS": _CHUNKS, "BLOCK": _TERMS_BLOCK}
        self.launch(
            self.slotwise.sum_units, grid, plan.loose, plan.tops, plan.unit_sums, plan.unit, self.state,
            plan.slots,
            **sizes, warps=8,
        )  # fmt: skip
        self.launch(
            self.slotwise.offset_units, grid, plan.loose, plan.unit_sums, self.state, plan.slots, **sizes, warps=8
        )
        self.place(again=True)
        self._settle()

    def _settle(self) -> None:
        """The relevant items' own part."""
        given, plan = self.given, self.plan
        self.launch(
            self.slotwise.settle, (plan.rows, _CHUNKS), plan.words, plan.totals, plan.chunk_sums, self.state,
            given.tables, given.changes, plan.n, plan.slots, given.n_tables,
            FORM=given.form if given.by_window else 0, WINDOW=given.by_window, CHUNKS=_CHUNKS, BLOCK=_TERMS_BLOCK,
            warps=8,
        )  # fmt: skip


def standings(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand; see :func:`rankgrad.engine.reference.standings`."""
    run = _LongEvaluation(request._replace(with_gradient=False, max_relevant=None))
    above = torch.zeros(request.scores.shape, dtype=torch.int64, device=request.scores.device)
    run.gather()
    run.sort(again=False)
    run.place(again=False)
    run.terms(_COUNTS_ONLY, above)
    run.sum_losses()  # of nothing: 0, or NaN where a score is
    count = run.state[:, 0].reshape(*run.given.losses.shape, 1)
    own = torch.arange(1, run.given.n + 1, device=above.device)
    return above, own.where(own <= count, 0), run.given.losses


def _at_once(request: Request, gradient: Tensor | None = None) -> Answer:
    """:func:`evaluate` with room for all lists; ``gradient`` is where theirs goes."""
    run = _LongEvaluation(request, gradient)
    run.gather()
    run.sort(again=False)
    run.place(again=False)
    run.terms(run.given.form)
    run.sum_losses()
    return run.answer()


def turns(request: Request, items: int) -> Iterator[tuple[tuple[slice, slice], Request]]:
    """Some calls at a time, or some lists of one, that there is room for at once: where they are, and the request.

    ``items`` is how many items of a list need room.
    """
    calls, per_call = request.shape
    some_calls, some_lists = max(1, _MOST_SLOTS // (per_call * items)), max(1, _MOST_SLOTS // items)
    for call, first in itertools.product(range(0, calls, some_calls), range(0, per_call, some_lists)):
        here = slice(call, call + some_calls), slice(first, first + some_lists)
        yield (
            here,
            request._replace(
                scores=request.scores[here],
                relevance=request.relevance[here],
                mask=None if request.mask is None else request.mask[here],
                spread=None if request.spread is None else request.spread[here[0]],
                lists=None if request.lists is None else request.lists[here[0]],
            ),
        )


def _in_turn(request: Request, slots: int) -> Answer:
    """:func:`evaluate` in turns, each of which writes its part of the gradient."""
    gradient = room_for_gradient(request)
    losses, divisor = (request.scores.new_empty(request.shape, dtype=torch.float64) for _ in range(2))
    for here, part in turns(request, slots):
        answer = _at_once(part, gradient[here])
        losses[here], divisor[here] = answer.losses, answer.divisor
    assert request.lists is not None
    return Answer(losses, gradient, divisor, request.lists)


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`.

    There is room for as many relevant items as a list may have. Where that is too much for all lists at once, as
    for queries against a long memory without a hint, they take turns.
    """
    calls, per_call, n = request.scores.shape
    slots = min(n, request.max_relevant or n)
    if calls * per_call * slots <= _MOST_SLOTS or calls * per_call == 1:
        return _at_once(request)
    if request.lists is None:
        found = request.relevance != 0
        found = found if request.mask is None else found & request.mask
        request = request._replace(lists=found.any(-1).sum(-1))
    return _in_turn(request, slots)
