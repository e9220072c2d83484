"""The GPU engine: launches the Triton kernels.

Nothing here waits for the device, and nothing is sized or chosen by how many items are relevant, which only
the device knows: shapes and the hint ``max_relevant`` decide.
"""

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import dense, reference
from rankgrad.engine.forms import FORMS, weight_tables
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.triton_arguments import as_bytes, bits, half_of

LONGEST_SHORT_LIST = 65_536
FEWEST_SHORT_LISTS = 16  # fewer lists, if long, would leave most of the device idle
DENSE = 8  # one relevant item in so many, or more, is a case for whole sorts
_CHUNKS = 256
_MOST_ROWS = 65_535  # a grid's second axis ends there
_MOST_PAIRS = 16_384  # as in the kernel
_NO_WORD = 2**63 - 1  # as in the kernel
_SORT_BLOCK = 1024
_SORTERS = 2  # programs a processor that wait for each other: all must run at once (an H200 has room for 2)
_sorters: dict[torch.device, int] = {}  # devices that had room for fewer
_STREAM_BLOCK, _STREAM_WARPS = 512, 4
_ROW_BLOCK = 512
_STREAMS = 16  # programs a processor that stream
_ROOM = 1 << 20  # for private copies of the counts
_GIVEN, _EMIT = 5, 6  # what `terms` does besides the named forms


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from rankgrad.engine._kernels import long_lists, short_lists

    return long_lists, short_lists


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs keep the device busy; one where Triton is interpreted (they would wait for each other)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def supports(scores: Tensor) -> bool:
    """Whether the kernels take these scores: a 32-bit key and a 32-bit index make a word."""
    return scores.dtype != torch.float64 and scores.numel() > 0 and scores.shape[-1] < 2**32


class _Long:
    """One evaluation over few long lists: the buffers, and the kernels in order."""

    def __init__(
        self, scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, max_relevant: int | None
    ) -> None:
        self.calls, self.per_call, self.n = scores.shape
        self.rows = self.calls * self.per_call
        self.masked = mask is not None
        self.scores, self.relevance = scores.contiguous(), as_bytes(relevance)
        self.mask = self.relevance if mask is None else as_bytes(mask)
        self.half = half_of(margin)
        self.slots = min(self.n, max_relevant or self.n)
        self.kernels = _kernels()[0]
        cells = 4096
        while cells < min(4 * self.slots, self.n // 8, 1 << 22):
            cells *= 2
        self.cells = cells
        self.processors = _programs(scores.device)
        self.streams = max(1, _STREAMS * self.processors // self.rows)
        new = functools.partial(torch.empty, device=scores.device)
        self.state = torch.zeros(self.rows, 5, dtype=torch.int64, device=scores.device)
        self.hinted = max_relevant is not None
        self.words, self.loose = new(2, self.rows, self.slots, dtype=torch.int64).unbind(0)
        if self.hinted and self.slots > _MOST_PAIRS:
            self.loose.fill_(_NO_WORD)  # sorted by torch, which cannot know where the words end
        self.levels = new(self.rows, self.slots, dtype=torch.float32)
        self.table = new(self.rows, cells + 1, dtype=torch.int32)
        self.geometry = new(self.rows, 2, dtype=torch.float32)
        self.room = max(1, _ROOM // self.rows)
        self.counts = new(self.rows, self.room + self.slots + 1, dtype=torch.int32)
        self.totals = new(self.rows, self.slots + 1, dtype=torch.int64)
        self.chunk_sums = new(self.rows, _CHUNKS, dtype=torch.int64)
        self.partial = new(self.rows, _CHUNKS, dtype=torch.float64)
        self.lists = new(self.calls, dtype=torch.int64)

    def gather(self) -> None:
        self.kernels.gather[(self.streams, self.rows)](
            self.scores, self.relevance, self.mask, self.loose, self.state, self.n, self.half, self.slots,
            MASKED=self.masked, BLOCK=16384, num_warps=8,
        )  # fmt: skip
        self.kernels.count_lists[(self.calls,)](self.state, self.lists, self.per_call, BLOCK=128)

    def _merge(self, second: int) -> None:
        """Sort many words by the merge network, with as many programs as the device runs at once."""
        device = self.scores.device
        alone = self.processors == 1
        options: dict[str, Any] = {} if alone else {"launch_cooperative_grid": True}
        sorters = 1 if alone else max(1, _sorters.get(device, _SORTERS) * self.processors // self.rows)
        try:
            self.kernels.sort_by_merging[(sorters, self.rows)](
                self.loose, self.words, self.state, self.slots, SECOND=second, BLOCK=_SORT_BLOCK, num_warps=8,
                **options,
            )  # fmt: skip
        except RuntimeError as error:  # a device with room for fewer than the one this was measured on
            if "cooperative" not in str(error) or _sorters.get(device) == 1:
                raise
            _sorters[device] = 1
            self._merge(second)

    def place(self, changes: Tensor, write: bool, again: bool) -> None:
        """Sort the loose words and stream the list against them."""
        if self.slots <= _MOST_PAIRS or not self.hinted:
            pairs = min(self.slots, _MOST_PAIRS)
            self.kernels.rank_by_pairs[(min(-(-pairs // 16), 8 * self.processors), self.rows)](
                self.loose, self.words, self.state, self.slots, BLOCK=16, TILE=256, num_warps=4
            )
        if self.slots > _MOST_PAIRS and self.hinted:
            self.words = torch.sort(self.loose, dim=-1).values
        elif self.slots > _MOST_PAIRS:
            self._merge(int(again))
        self.kernels.make_table[(self.streams, self.rows)](
            self.words, self.levels, self.table, self.geometry, self.counts, self.state, self.slots, self.cells,
            self.room, BLOCK=512, num_warps=4,
        )  # fmt: skip
        self.kernels.stream[(self.streams, self.rows)](
            self.scores, self.relevance, self.mask, self.levels, self.table, self.geometry, self.counts,
            self.state, changes, self.n, self.half, self.slots, self.cells, self.room,
            MASKED=self.masked, WRITE=write, AGAIN=again, BLOCK=_STREAM_BLOCK, num_warps=_STREAM_WARPS,
        )  # fmt: skip
        self.kernels.sum_counts[(_CHUNKS, self.rows)](
            self.counts, self.totals, self.chunk_sums, self.state, self.slots, self.room, self.streams,
            AGAIN=again, TILE=64, BLOCK=16, num_warps=4,
        )  # fmt: skip

    def terms(
        self,
        form: int,
        weights: Tensor | None,
        lam: float,
        changes: Tensor,
        move: bool,
        steps: Tensor | None = None,
        above: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        unused = self.partial
        tables = unused if weights is None else torch.stack(weight_tables(weights))
        self.kernels.terms[(_CHUNKS, self.rows)](
            self.words, self.loose, self.totals, self.chunk_sums, self.state, tables, self.lists, self.partial,
            changes, unused if steps is None else steps, unused if above is None else above,
            unused if position is None else position, self.n, self.slots, tables.shape[-1], bits(lam),
            self.per_call, FORM=form, MOVE=move, MASKED=self.masked, CHUNKS=_CHUNKS, BLOCK=128, num_warps=4,
        )  # fmt: skip

    def settle(self, changes: Tensor) -> None:
        self.kernels.settle[(_CHUNKS, self.rows)](
            self.words, self.totals, self.chunk_sums, self.state, changes, self.n, self.slots,
            CHUNKS=_CHUNKS, BLOCK=128, num_warps=4,
        )  # fmt: skip

    def items(self) -> Tensor:
        """Existing items of each list."""
        shape = (self.calls, self.per_call)
        if not self.masked:
            return torch.full(shape, self.n, dtype=torch.int64, device=self.state.device)
        return self.state[:, 1].reshape(shape)

    def poison(self) -> Tensor:
        bad = (self.state[:, 2] != 0) | (self.state[:, 0] > self.slots)
        zero = torch.zeros(self.rows, dtype=torch.float64, device=bad.device)
        return zero.masked_fill_(bad, torch.nan).reshape(self.calls, self.per_call)


def _no_changes(scores: Tensor) -> Tensor:
    return scores.new_empty(*scores.shape[:-1], 0, dtype=count_dtype(scores.shape[-1]))


def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one; see :func:`rankgrad.engine.reference.relevant_ranks`."""
    if scores.shape[0] * scores.shape[1] > _MOST_ROWS:
        return reference.relevant_ranks(scores, relevance, mask, margin)
    run = _Long(scores, relevance, mask, margin, None)
    above = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    position = torch.full_like(above, run.n)
    run.gather()
    run.place(run.words, write=False, again=False)
    run.terms(_EMIT, None, 0.0, run.words, move=False, above=above, position=position)
    return above, position, run.state[:, 0].reshape(run.calls, run.per_call), run.poison()


def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two; see :func:`rankgrad.engine.reference.rank_changes`."""
    if scores.shape[0] * scores.shape[1] > _MOST_ROWS:
        return reference.rank_changes(scores, relevance, mask, margin, position, steps)
    run = _Long(scores, relevance, mask, margin, None)
    changes = scores.new_empty(scores.shape, dtype=count_dtype(run.n))
    run.gather()
    run.place(changes, write=True, again=False)
    run.terms(_GIVEN, None, 0.0, changes, move=True, steps=steps.contiguous())
    run.place(changes, write=True, again=True)
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
    """Both steps and the loss between them; see :func:`rankgrad.engine.stepwise.list_losses`."""
    calls, per_call, n = scores.shape
    arguments = (scores, relevance, mask, weights, form, lam, margin, with_changes)
    if max_relevant is not None and max_relevant * DENSE > n and n > 1024:
        return dense.list_losses(*arguments, lists=lists)
    if n <= LONGEST_SHORT_LIST and calls * per_call >= FEWEST_SHORT_LISTS:
        return _short_list_losses(*arguments, max_relevant, lists)
    run = _Long(scores, relevance, mask, margin, max_relevant)
    changes = scores.new_empty(scores.shape, dtype=count_dtype(n)) if with_changes else _no_changes(scores)
    run.gather()
    run.lists = run.lists if lists is None else lists
    run.place(changes, write=with_changes, again=False)
    run.terms(FORMS.index(form), weights, lam, changes, move=with_changes)
    losses = run.partial.sum(1).reshape(calls, per_call)
    if with_changes:
        run.place(changes, write=True, again=True)
        run.settle(changes)
    return losses, changes, run.items(), run.lists


def _short_list_losses(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    max_relevant: int | None,
    given: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    calls, per_call, n = scores.shape
    kernels = _kernels()[1]
    rows, masked = calls * per_call, mask is not None
    new = functools.partial(torch.empty, device=scores.device)
    counts, items = new(rows, dtype=torch.int32), new(calls, per_call, dtype=torch.int64)
    lists, losses = new(calls, dtype=torch.int64), new(calls, per_call, dtype=torch.float64)
    changes = new(scores.shape, dtype=torch.int32) if with_changes else _no_changes(scores)
    group = 4 if max_relevant is not None and max_relevant <= 4 else 16
    first_group = new(rows, group, dtype=torch.int32)
    several = with_changes and min(n, max_relevant or n) > group
    ranks = new(scores.shape, dtype=torch.uint16) if several else counts
    scores, relevance = scores.contiguous(), as_bytes(relevance)
    exists = relevance if mask is None else as_bytes(mask)
    tables = losses if weights is None else torch.stack(weight_tables(weights))
    kernels.count_items[(rows,)](
        relevance, exists, counts, items, first_group, n, MASKED=masked, ROWS=group, BLOCK=1024, num_warps=4
    )
    lists = lists if given is None else given
    kernels.rank_lists[(rows,)](
        scores, relevance, exists, counts, items, first_group, lists, tables, losses, changes, ranks, n,
        half_of(margin), bits(lam), tables.shape[-1], per_call, FORM=FORMS.index(form), WRITE=with_changes,
        MASKED=masked, FEW=4, ROWS=group, GIVEN=given is not None,
        BLOCK=min(_ROW_BLOCK, max(128, 1 << (n - 1).bit_length())), num_warps=4,
    )  # fmt: skip
    return losses, changes, items, lists


def reduce(losses: Tensor, lists: Tensor, mean: bool, dtype: torch.dtype) -> Tensor:
    """Sum or mean of each call's list losses, ``[calls, lists] -> [calls]``, in one launch."""
    out = torch.empty(lists.shape, dtype=dtype, device=losses.device)
    _kernels()[1].reduce_losses[(len(lists),)](
        losses.contiguous(), lists, out, losses.shape[1], MEAN=mean, BLOCK=1024, num_warps=4
    )
    return out


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
    rows = calls * per_call
    blocks = min(-(-n // 2048), max(1, 16 * _programs(changes.device) // rows))
    _kernels()[1].scale_changes[(rows, blocks)](
        changes, upstream.contiguous(), losses, items, lists, out, n, per_call, bits(lam),
        REDUCTION=("mean", "sum", "none").index(reduction), BLOCK=2048, num_warps=4,
    )  # fmt: skip
