"""Triton kernels for many short lists, where a list has more relevant items than one group: sweeps for each group.

What a list needs for later sweeps stands in its own row of ``changes``, at the relevant items, until their part of
the gradient replaces it: by lambda the moved score; by window what is above, and the rank among the relevant, 16 bits each
(lists are no longer than 65,536). The rest waits in the program's row of ``ranks``, 16-bit numbers too: by lambda the
new ranks, less one, at each index; by window the index of each relevant item, and behind those how many it passes.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.forms_gpu import item_terms, pulled, pushed, units, window_terms
from rankgrad.engine._kernels.words import factor_of, read_items, times

NARROW = tl.constexpr(8)  # sums of 64-bit units: blocks are narrower by this, to leave registers (4: 255 of them)


@triton.jit
def _group(
    scores, relevance, mask, changes, n, half, first, MOVED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores, indices and (MOVED) moved scores of the relevant items ``first`` to ``first + ROWS``."""
    number = first + tl.arange(0, ROWS)
    score = tl.full([ROWS], float("-inf"), tl.float32)
    index = tl.zeros([ROWS], tl.int32)
    moved = tl.full([ROWS], float("-inf"), tl.float32)
    seen = 0
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, _ = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        here = tl.sum(relevant.to(tl.int32))
        if (seen + here > first) & (seen < first + ROWS):
            place = seen + tl.cumsum(relevant.to(tl.int32), 0) - 1
            chosen = relevant[None, :] & (place[None, :] == number[:, None])
            score = tl.maximum(score, tl.max(tl.where(chosen, value[None, :], float("-inf")), 1))
            index += tl.sum(tl.where(chosen, at[None, :].to(tl.int32), 0), 1)
            if MOVED:
                bits = tl.load(changes + at, mask=relevant, other=0).to(tl.float32, bitcast=True)
                moved = tl.maximum(moved, tl.max(tl.where(chosen, bits[None, :], float("-inf")), 1))
        seen += here
    return score, index, moved


@triton.jit
def _rank(
    scores, relevance, mask, n, half, score, index, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Irrelevant items at or above each of a group, and its rank among the relevant items."""
    above = tl.zeros([ROWS], tl.int32)
    own = tl.full([ROWS], 1, tl.int32)
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        above += tl.sum((irrelevant[None, :] & (value[None, :] >= score[:, None])).to(tl.int32), 1)
        better = (value[None, :] > score[:, None]) | (
            (value[None, :] == score[:, None]) & (at[None, :] < index[:, None])
        )
        own += tl.sum((relevant[None, :] & better).to(tl.int32), 1)
    return above, own


@triton.jit
def several_groups(
    scores, relevance, mask, tables, losses, changes, ranks, row, n, half, n_tables, p, per_list,
    FORM: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A list with more relevant items than a group has: sweeps over the row for each group, three times."""
    loss = tl.full([], 0.0, tl.float64)
    for first in range(0, p, ROWS):
        score, index, _ = _group(scores, relevance, mask, changes, n, half, first, False, MASKED, ROWS, BLOCK)
        above, own = _rank(scores, relevance, mask, n, half, score, index, MASKED, ROWS, BLOCK)
        in_use = first + tl.arange(0, ROWS) < p
        value, slope = item_terms(FORM, tables, n_tables, above, own)
        loss += tl.sum(tl.where(in_use, value, 0.0))
        if WRITE:
            moved = score + (per_list * slope).to(tl.float32)
            tl.store(changes + index, moved.to(tl.int32, bitcast=True), mask=in_use)
    nan = 0
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        nan += tl.sum(((value != value) & (relevant | irrelevant)).to(tl.int32))
        if WRITE:
            tl.store(changes + at, 0, mask=(at < n) & ~relevant)
    loss = loss / tl.maximum(p, 1).to(tl.float64)
    loss = tl.where(nan > 0, float("nan"), loss)
    tl.store(losses + row, loss)

    if WRITE:
        tl.debug_barrier()
        for first in range(0, p, ROWS):
            score, index, moved = _group(
                scores, relevance, mask, changes, n, half, first, True, MASKED, ROWS, BLOCK
            )
            in_use = first + tl.arange(0, ROWS) < p
            new = tl.full([ROWS], 1, tl.int32)
            for block in range(0, tl.cdiv(n, BLOCK)):
                at = block * BLOCK + tl.arange(0, BLOCK)
                value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
                change = tl.load(changes + at, mask=relevant | irrelevant, other=0)
                other_moved = change.to(tl.float32, bitcast=True)
                passed = (moved[:, None] > value[None, :]).to(tl.int32) - (score[:, None] > value[None, :]).to(
                    tl.int32
                )
                passed = tl.sum(tl.where(in_use[:, None], passed, 0), 0)
                tl.store(changes + at, change + passed, mask=irrelevant)
                before = at[None, :] < index[:, None]
                new += tl.sum(
                    (
                        (irrelevant[None, :] & (value[None, :] >= moved[:, None]))
                        | (relevant[None, :] & (other_moved[None, :] > moved[:, None]))
                        | (relevant[None, :] & (other_moved[None, :] == moved[:, None]) & before)
                    ).to(tl.int32),
                    1,
                )
            tl.store(ranks + index, (new - 1).to(tl.uint16), mask=in_use)
        tl.debug_barrier()
        for first in range(0, p, ROWS):
            score, index, _ = _group(scores, relevance, mask, changes, n, half, first, False, MASKED, ROWS, BLOCK)
            above, own = _rank(scores, relevance, mask, n, half, score, index, MASKED, ROWS, BLOCK)
            in_use = first + tl.arange(0, ROWS) < p
            new = tl.load(ranks + index, mask=in_use, other=0).to(tl.int32) + 1
            tl.store(changes + index, new - above - own, mask=in_use)
        tl.debug_barrier()  # the program's next list writes to the same ranks


@triton.jit
def _list_relevant(scores, relevance, mask, ranks, n, half, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The indices of the relevant items into ``ranks``; returns how many scores are NaN."""
    nan = 0
    seen = 0
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        nan += tl.sum(((value != value) & (relevant | irrelevant)).to(tl.int32))
        place = seen + tl.cumsum(relevant.to(tl.int32), 0) - 1
        tl.store(ranks + place, at.to(tl.uint16), mask=relevant)
        seen += tl.sum(relevant.to(tl.int32))
    tl.debug_barrier()
    return nan


@triton.jit
def _terms_again(changes, tables, n_tables, index, in_use, FORM: tl.constexpr):
    """Slopes of a group from what stands at its items."""
    packed = tl.load(changes + index, mask=in_use, other=0)
    above = packed & 0xFFFF
    own = ((packed >> 16) & 0xFFFF) + 1
    _, slope = window_terms(FORM, tables, n_tables, above, own, in_use)
    return slope


@triton.jit
def several_groups_by_window(
    scores, relevance, mask, tables, losses, changes, ranks, row, n, slots, half, window, divisor, n_tables, p,
    FORM: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A list whose relevant items all rise by the window: one sweep for each group, then sums of slopes by block."""
    nan = _list_relevant(scores, relevance, mask, ranks, n, half, MASKED, BLOCK)
    loss = tl.full([], 0.0, tl.float64)
    top = tl.full([], 0.0, tl.float64)
    for first in range(0, p, ROWS):
        number = first + tl.arange(0, ROWS)
        in_use = number < p
        index = tl.load(ranks + number, mask=in_use, other=0).to(tl.int32)
        score = tl.load(scores + index, mask=in_use, other=0.0).to(tl.float32) - half
        risen = score + window
        above = tl.zeros([ROWS], tl.int32)
        after = tl.zeros([ROWS], tl.int32)
        own = tl.full([ROWS], 1, tl.int32)
        for block in range(0, tl.cdiv(n, BLOCK)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
            above += tl.sum((irrelevant[None, :] & (value[None, :] >= score[:, None])).to(tl.int32), 1)
            after += tl.sum((irrelevant[None, :] & (value[None, :] >= risen[:, None])).to(tl.int32), 1)
            better = (value[None, :] > score[:, None]) | (
                (value[None, :] == score[:, None]) & (at[None, :] < index[:, None])
            )
            own += tl.sum((relevant[None, :] & better).to(tl.int32), 1)
        value, slope = window_terms(FORM, tables, n_tables, above, own, in_use)
        loss += tl.sum(tl.where(in_use, value, 0.0))
        top = tl.maximum(top, tl.max(tl.abs(slope)))
        tl.store(changes + index, ((own - 1) << 16) | above, mask=in_use)
        tl.store(ranks + slots + number, (above - after).to(tl.uint16), mask=in_use)
    count = p.to(tl.float64)
    loss = tl.where(nan > 0, float("nan"), loss / count)
    tl.store(losses + row, loss)
    tl.debug_barrier()

    many, one = units(top, p)
    factor = factor_of(divisor, loss != loss, SCALED)
    for block in range(0, tl.cdiv(n, BLOCK // NARROW)):
        at = block * (BLOCK // NARROW) + tl.arange(0, BLOCK // NARROW)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        total = tl.zeros([BLOCK // NARROW], tl.int64)
        for first in range(0, p, ROWS):
            number = first + tl.arange(0, ROWS)
            in_use = number < p
            index = tl.load(ranks + number, mask=in_use, other=0).to(tl.int32)
            score = tl.load(scores + index, mask=in_use, other=0.0).to(tl.float32) - half
            slope = (_terms_again(changes, tables, n_tables, index, in_use, FORM) * many).to(tl.int64)
            passed = (value[None, :] >= score[:, None]) & (value[None, :] < (score + window)[:, None])
            total += tl.sum(tl.where(passed, slope[:, None], 0), 0)
        gradient = tl.where(irrelevant, pushed(total, one, count), 0)
        tl.store(changes + at, times(gradient, factor), mask=(at < n) & ~relevant)
    tl.debug_barrier()
    for first in range(0, p, ROWS):
        number = first + tl.arange(0, ROWS)
        in_use = number < p
        index = tl.load(ranks + number, mask=in_use, other=0).to(tl.int32)
        passed = tl.load(ranks + slots + number, mask=in_use, other=0)
        slope = _terms_again(changes, tables, n_tables, index, in_use, FORM)
        tl.store(changes + index, times(pulled(slope, passed, count), factor), mask=in_use)
    tl.debug_barrier()  # the program's next list writes to the same ranks
