"""Few, long lists on the GPU: the order of the kernels in ``_kernels.long_lists`` and ``sorting``, and their
workspace."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine.forms import code
from rankgrad.engine.launching import Launcher, Plan, kinds, programs
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.triton_arguments import as_bytes, bits, half_of

_CHUNKS, _TERMS_BLOCK = 256, 512
_SORT_BLOCK, _MERGE_PIECE = 1024, 512
_SORTERS = 2  # programs a processor that wait for each other: all must run at once (an H200 has room for 2)
_SORTED_AT_ONCE = 16  # programs a processor that compare pairs, of all lists together
_sorters: dict[torch.device, int] = {}  # devices that had room for fewer
_STREAM_BLOCK, _STREAM_WARPS = 512, 4
_STREAMS = 16  # programs a processor that stream
_GATHERERS = 4  # programs a processor that gather, where there are so many items
_ROOM = 1 << 20  # for private copies of the counts
_GIVEN, _EMIT = 5, 6  # what `terms` does besides the named forms


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from rankgrad.engine._kernels import long_lists, sorting

    return long_lists, sorting


class _Plan(Plan):
    """Sizes and workspace for lists of one shape."""

    def __init__(self, device: torch.device, rows: int, n: int, slots: int) -> None:
        super().__init__()
        self.rows, self.n, self.slots = rows, n, slots
        self.cells = 4096
        while self.cells < min(4 * slots, n // 8, 1 << 22):
            self.cells *= 2
        self.processors = programs(device)
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
        self.chunk_sums = self.part(torch.int64, rows * _CHUNKS)
        self.partial = self.part(torch.float64, rows * _CHUNKS)


@functools.lru_cache(maxsize=256)
def _plan(device: torch.device, rows: int, n: int, slots: int, *key: Any) -> _Plan:
    """The plan for a kind of evaluation; ``key`` is what its compiled kernels depend on besides."""
    return _Plan(device, rows, n, slots)


class Long:
    """One evaluation over few long lists, ``[calls, lists, n]``."""

    def __init__(
        self,
        scores: Tensor,
        relevance: Tensor,
        mask: Tensor | None,
        margin: float,
        max_relevant: int | None,
        *others: Tensor | None,
    ) -> None:
        """``others`` are more tensors from outside that kernels will read."""
        self.calls, self.per_call, self.n = scores.shape
        rows, device = self.calls * self.per_call, scores.device
        self.masked = mask is not None
        self.scores, self.relevance = scores.contiguous(), as_bytes(relevance)
        self.mask = self.relevance if mask is None else as_bytes(mask)
        self.half = half_of(margin)
        slots = min(self.n, max_relevant or self.n)
        key = kinds(self.scores, self.relevance, None if mask is None else self.mask, *others)
        self.plan = _plan(device, rows, self.n, slots, self.per_call, *key)
        self.launch = Launcher(self.plan, device)
        self.kernels, self.sorting = _kernels()
        self.state = torch.zeros(rows, 5, dtype=torch.int64, device=device)
        self.items = torch.empty(self.calls, self.per_call, dtype=torch.int64, device=device)
        self.lists = torch.empty(self.calls, dtype=torch.int64, device=device)

    def gather(self) -> None:
        plan = self.plan
        self.launch(
            self.kernels.gather, (plan.streams, plan.rows), self.scores, self.relevance, self.mask, plan.loose,
            self.state, plan.n, self.half, plan.slots, MASKED=self.masked, BLOCK=plan.gathered, warps=8,
        )  # fmt: skip
        self.launch(
            self.kernels.count_lists, (self.calls, 1), self.state, self.lists, self.items, plan.n, self.per_call,
            MASKED=self.masked, BLOCK=128,
        )  # fmt: skip

    def _sort(self, again: bool) -> None:
        plan = self.plan
        words = plan.loose, plan.words, self.state, plan.slots
        pairs: int = self.sorting.PAIRS.value
        blocks = min(-(-min(plan.slots, pairs) // 16), max(1, _SORTED_AT_ONCE * plan.processors // plan.rows))
        self.launch(self.sorting.rank_by_pairs, (blocks, plan.rows), *words, BLOCK=16, TILE=256)
        if plan.slots > pairs:
            self._merge(words, again)

    def _merge(self, words: tuple[Any, ...], again: bool) -> None:
        """Sort many words by merging, with as many programs as the device runs at once."""
        device, processors = self.state.device, self.plan.processors
        at_once = 1 if processors == 1 else _sorters.get(device, _SORTERS) * processors
        sorters = max(1, at_once // self.plan.rows)
        try:
            self.launch(
                self.sorting.sort_by_merging, (sorters, self.plan.rows), *words, SECOND=int(again),
                BLOCK=_SORT_BLOCK, PIECE=_MERGE_PIECE, warps=8, together=sorters > 1,
            )  # fmt: skip
        except RuntimeError as error:  # a device with room for fewer than the one this was measured on
            if "cooperative" not in str(error) or sorters == 1:
                raise
            # one a processor, and if there is no room for that either, one alone, which waits for nobody
            _sorters[device] = 1 if _sorters.get(device, _SORTERS) > 1 else 0
            self._merge(words, again)

    def place(self, changes: Tensor | None, *, again: bool) -> None:
        """Sort the loose words and stream the list against them; ``changes`` gets the places, or theirs."""
        plan = self.plan
        grid = (plan.streams, plan.rows)
        self._sort(again)
        self.launch(
            self.kernels.make_table, grid, plan.words, plan.levels, plan.halves, plan.geometry, plan.counts,
            self.state, plan.slots, plan.cells, plan.room, BLOCK=512,
        )  # fmt: skip
        self.launch(
            self.kernels.stream, grid, self.scores, self.relevance, self.mask, plan.levels, plan.table,
            plan.geometry, plan.counts, self.state, self.state if changes is None else changes, plan.n, self.half,
            plan.slots, plan.cells, plan.room, MASKED=self.masked, WRITE=changes is not None, AGAIN=again,
            BLOCK=_STREAM_BLOCK, warps=_STREAM_WARPS,
        )  # fmt: skip
        self.launch(
            self.kernels.sum_counts, (_CHUNKS, plan.rows), plan.counts, plan.totals, plan.chunk_sums, self.state,
            plan.slots, plan.room, plan.streams, AGAIN=again, TILE=64, BLOCK=16, WIDE=1024,
        )  # fmt: skip

    def terms(
        self,
        form: int,
        tables: Tensor | None,
        lam: float,
        changes: Tensor | None,
        steps: Tensor | None = None,
        above: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        plan = self.plan
        self.launch(
            self.kernels.terms, (_CHUNKS, plan.rows), plan.words, plan.loose, plan.totals, plan.chunk_sums,
            self.state, plan.partial if tables is None else tables, self.lists, plan.partial,
            self.state if changes is None else changes, plan.partial if steps is None else steps,
            plan.partial if above is None else above, plan.partial if position is None else position,
            plan.n, plan.slots, 0 if tables is None else tables.shape[1], bits(lam), self.per_call,
            FORM=form, MOVE=changes is not None, MASKED=self.masked, CHUNKS=_CHUNKS, BLOCK=_TERMS_BLOCK, warps=8,
        )  # fmt: skip

    def losses(self) -> Tensor:
        out = torch.empty(self.calls, self.per_call, dtype=torch.float64, device=self.state.device)
        self.launch(self.kernels.sum_losses, (1, self.plan.rows), self.plan.partial, out, CHUNKS=_CHUNKS)
        return out

    def settle(self, changes: Tensor) -> None:
        plan = self.plan
        self.launch(
            self.kernels.settle, (_CHUNKS, plan.rows), plan.words, plan.totals, plan.chunk_sums, self.state,
            changes, plan.n, plan.slots, CHUNKS=_CHUNKS, BLOCK=_TERMS_BLOCK, warps=8,
        )  # fmt: skip

    def poison(self) -> Tensor:
        bad = (self.state[:, 2] != 0) | (self.state[:, 0] > self.plan.slots)
        zero = torch.zeros(len(bad), dtype=torch.float64, device=bad.device)
        return zero.masked_fill_(bad, torch.nan).reshape(self.calls, self.per_call)


def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one; see :func:`rankgrad.engine.reference.relevant_ranks`."""
    run = Long(scores, relevance, mask, margin, None)
    above = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    position = torch.full_like(above, run.n)
    run.gather()
    run.place(None, again=False)
    run.terms(_EMIT, None, 0.0, None, above=above, position=position)
    return above, position, run.state[:, 0].reshape(run.calls, run.per_call), run.poison()


def rank_changes(scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, steps: Tensor) -> Tensor:
    """Step two; see :func:`rankgrad.engine.reference.rank_changes`."""
    steps = steps.contiguous()
    run = Long(scores, relevance, mask, margin, None, steps)
    changes = scores.new_empty(scores.shape, dtype=count_dtype(run.n))
    run.gather()
    run.place(changes, again=False)
    run.terms(_GIVEN, None, 0.0, changes, steps=steps)
    run.place(changes, again=True)
    run.settle(changes)
    return changes


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
    tables = weights
    run = Long(scores, relevance, mask, margin, max_relevant, tables, lists)
    changes = torch.empty((calls, per_call, n if with_changes else 0), dtype=count_dtype(n), device=scores.device)
    written = changes if with_changes else None
    run.gather()
    run.lists = run.lists if lists is None else lists
    run.place(written, again=False)
    run.terms(code(form), tables, lam, written)
    losses = run.losses()
    if with_changes:
        run.place(changes, again=True)
        run.settle(changes)
    return losses, changes, run.items, run.lists
