"""Triton kernels for few, long lists: sort the p relevant items, stream the n items against them, twice.

p is known on the device only. Every kernel reads it there and works in proportion to it; nothing on the
host is sized or chosen by it. One list's pipeline (axis 0 of every grid is the list):

    gather        relevant items -> words, in any order (sorting makes the order unique)
    (sorting.py)  words -> sorted words
    make_table    sorted words -> cells of uniform width with the number of better relevant scores
    stream        every irrelevant item -> its place k, the number of relevant scores strictly above it;
                  counts of items at each place
    (long_terms.py)
    sum_counts, terms
                  counts -> by prefix sums the irrelevant items at or above each slot; loss; and by lambda

    (sort, table and stream again with the moved words: places minus the places before)
    sum_counts, settle
                  the relevant items' own rank changes

or by window, where all relevant scores rise equally far and keep their order,

    sum_units, offset_units
                  prefix sums of the slopes, in units
    (table and stream again with the risen scores: the slopes between the places before and after)
    sum_counts, pull
                  the relevant items' slopes times how many each of them passes

Skew costs little: an item's place is found in its cell by a search of log2(relevant scores in the cell)
steps, and counting goes to private copies of the counts, the fullest place of a block in one addition.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.forms_gpu import pushed
from rankgrad.engine._kernels.words import (
    LAM,
    STATE,
    blocks_of,
    divisor_of,
    half_margin,
    make_word,
    read_items,
    score_of,
    span,
    strength_of,
)

FEW = tl.constexpr(256)  # counts of fewer places fit tl.histogram, with one for items that do not count


@triton.jit(do_not_specialize=["half_bits"])
def gather(
    scores, relevance, mask, words, state, spread, n, slots, per_call, half_bits,
    MASKED: tl.constexpr, MARGIN_SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = half_margin(half_bits, spread, row // per_call, MARGIN_SHARE)
    state += row * STATE
    words += row * slots
    items = 0
    for block in range(tl.program_id(1), blocks_of(n, BLOCK), tl.num_programs(1)):
        at = tl.arange(0, BLOCK)
        first = block * tl.full([], BLOCK, tl.int64)
        start = row * n + first
        inside = at < tl.minimum(n - first, BLOCK).to(tl.int32)
        exists = inside
        if MASKED:
            exists = inside & (tl.load(mask + start + at, mask=inside, other=0) != 0)
            items += tl.sum(exists.to(tl.int32))
        relevant = exists & (tl.load(relevance + start + at, mask=inside, other=0) != 0)
        here = tl.sum(relevant.to(tl.int32))
        if here > 0:
            value = tl.load(scores + start + at, mask=relevant, other=0.0).to(tl.float32) - half
            slot = tl.atomic_add(state, here.to(tl.int64)) + tl.cumsum(relevant.to(tl.int32), 0) - 1
            tl.store(words + slot, make_word(value, first + at), mask=relevant & (slot < slots))
    if MASKED:
        tl.atomic_add(state + 1, items.to(tl.int64))


@triton.jit(do_not_specialize=["reach_bits"])
def count_lists(
    state, lists, divisor, spread, n, per_call, reach_bits,
    MASKED: tl.constexpr, REACH: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many lists of each call count (GIVEN: elsewhere too), and what every list's gradient is divided by."""
    call = tl.program_id(0).to(tl.int64)
    strength = strength_of(reach_bits, spread, call, REACH)
    total = tl.full([], 0, tl.int64)
    if GIVEN:
        total = tl.load(lists + call)
    else:
        for start in range(0, per_call, BLOCK):
            at = start + tl.arange(0, BLOCK)
            found = tl.load(state + (call * per_call + at) * STATE, mask=at < per_call, other=0)
            total += tl.sum((found > 0).to(tl.int64))
        tl.store(lists + call, total)
    for start in range(0, per_call, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = call * per_call + at
        items = tl.zeros([BLOCK], tl.int64) + n
        if MASKED:
            items = tl.load(state + row * STATE + 1, mask=at < per_call, other=0)
        tl.store(divisor + row, divisor_of(strength, items, total, REACH), mask=at < per_call)


@triton.jit
def _cell(value, best, scale, last):
    """Which cell a score lies in; monotone, and 0 for what is not a number."""
    at = (best - value) * scale
    at = tl.where(at > 0, at, 0.0)
    return tl.where(at < last, at, last).to(tl.int32)


@triton.jit
def _cells(p, most_cells):
    """How many cells for p relevant scores: four times as many or more, a power of two."""
    cells = tl.full([], 4096, tl.int64)
    while cells < 4 * p:
        cells *= 2
    return tl.minimum(cells, most_cells)


@triton.jit
def _finite_end(words, p, BEST: tl.constexpr):
    """The best or the worst finite score of sorted words (if there is none, an infinite one)."""
    value = score_of(tl.load(words + (0 if BEST else p - 1)))
    if tl.abs(value) == float("inf"):
        low = tl.full([], 0, tl.int64)
        high = low + p
        while low < high:  # the first slot beyond +inf, or the first of -inf
            middle = (low + high) // 2
            here = score_of(tl.load(words + middle))
            if BEST:
                beyond = here < float("inf")
            else:
                beyond = here == float("-inf")
            low = tl.where(beyond, low, middle + 1)
            high = tl.where(beyond, middle, high)
        value = score_of(tl.load(words + tl.minimum(tl.maximum(low - (0 if BEST else 1), 0), p - 1)))
    return value


@triton.jit
def _copies(p, room, programs):
    """How many private copies of the counts: as there is room, and no more than it takes to keep out of each
    other's way."""
    return tl.minimum(tl.minimum(tl.maximum(room // (p + 1), 1), programs), 512)


@triton.jit
def _in_better_cells(words, rise, cell, best, scale, last, low, high, steps):
    """How many of sorted words (all scores risen) lie in better cells than ``cell``, known to be ``low`` to ``high``."""
    while steps > 0:
        middle = (low + high) // 2
        open_ = low < high
        word = tl.load(words + middle, mask=open_, other=0)
        better = open_ & (_cell(score_of(word) + rise, best, scale, last) < cell)
        low = tl.where(better, middle + 1, low)
        high = tl.where(open_ & ~better, middle, high)
        steps = steps // 2
    return low


@triton.jit(do_not_specialize=["reach_bits"])
def make_table(
    words, levels, table, geometry, counts, state, spread, slots, most_cells, room, per_call, reach_bits,
    REACH: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of sorted words (AGAIN, by window: risen by it); how many lie in better cells, for every cell; where cells lie; zeroed counts.

    ``table`` has two numbers a cell, how many lie in better cells and how many in better ones or itself: one
    64-bit word for :func:`stream`, whose look-ups bind.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    words += row * slots
    table += row * 2 * most_cells
    counts += row * (room + slots + 1)
    cells = _cells(p, most_cells)
    rise = tl.full([], 0.0, tl.float32)
    if AGAIN and REACH != LAM:
        rise = strength_of(reach_bits, spread, row // per_call, REACH).to(tl.float32)
    best = tl.full([], 0.0, tl.float32)
    scale = tl.full([], 0.0, tl.float32)
    if p > 0:
        best = _finite_end(words, p, True) + rise
        width = best - (_finite_end(words, p, False) + rise)
        if (width > 0) & (width < float("inf")):
            scale = cells.to(tl.float32) / width
            scale = tl.where(scale < float("inf"), scale, 0.0)
        best = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    if tl.program_id(1) == 0:
        tl.store(geometry + row * 2, best)
        tl.store(geometry + row * 2 + 1, scale)
    last_cell = (cells - 1).to(tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(cells + 1, BLOCK), tl.num_programs(1)):
        ends = block * BLOCK + tl.arange(0, 2) * (BLOCK - 1)
        zero = tl.zeros([2], tl.int64)
        found = _in_better_cells(words, rise, ends, best, scale, last_cell, zero, zero + p, p)
        low, high = tl.min(found), tl.max(found)
        cell = span(block, BLOCK)
        zero = tl.zeros([BLOCK], tl.int64)
        better = _in_better_cells(words, rise, cell, best, scale, last_cell, zero + low, zero + high, high - low)
        tl.store(table + 2 * cell, better.to(tl.int32), mask=cell < cells)
        tl.store(table + 2 * cell - 1, better.to(tl.int32), mask=(cell > 0) & (cell <= cells))
    for block in range(tl.program_id(1), tl.cdiv(p, BLOCK), tl.num_programs(1)):
        at = span(block, BLOCK)
        level = score_of(tl.load(words + at, mask=at < p, other=0)) + rise
        tl.store(levels + row * slots + at, level, mask=at < p)
    copies = _copies(p, room, tl.num_programs(1))
    for block in range(tl.program_id(1), tl.cdiv(copies * (p + 1), BLOCK), tl.num_programs(1)):
        at = span(block, BLOCK)
        tl.store(counts + at, 0, mask=at < copies * (p + 1))


@triton.jit
def _add(counts, place, active, amount):
    """Count blocks of places: the last one that occurs by one addition, the others one by one."""
    most = tl.max(tl.where(active, place, -1))
    if most >= 0:
        hot = active & (place == most)
        tl.atomic_add(counts + most, amount * tl.sum(hot.to(tl.int32)), sem="relaxed")
        tl.atomic_add(counts + place, amount, mask=active & ~hot, sem="relaxed")


@triton.jit(do_not_specialize=["half_bits"])
def stream(
    scores, relevance, mask, levels, table, geometry, counts, state, spread, sums, unit, changes,
    n, slots, most_cells, room, per_call, half_bits,
    MASKED: tl.constexpr, MARGIN_SHARE: tl.constexpr, WRITE: tl.constexpr, AGAIN: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place every irrelevant item and count the places; AGAIN: what it gets for the difference to the first place.

    By lambda that is the difference itself, and counts hold what changed: minus one at the first place, plus one at
    the second. By window nearly all items change places: counts start anew, and an item gets the slopes of the relevant
    items between its two places, a difference of their prefix sums ``sums``.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    p = tl.minimum(tl.load(state), slots)
    half = half_margin(half_bits, spread, row // per_call, MARGIN_SHARE)
    levels += row * slots
    table += row * most_cells
    counts += row * (room + slots + 1)
    best = tl.load(geometry + row * 2)
    scale = tl.load(geometry + row * 2 + 1)
    last_cell = (_cells(p, most_cells) - 1).to(tl.float32)
    copies = _copies(p, room, tl.num_programs(1))
    counts += (tl.program_id(1) % copies) * (p + 1)
    few = tl.zeros([FEW], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    if AGAIN and WINDOW:
        sums += row * slots
        one = tl.load(unit + row)
        count = p.to(tl.float64)
    at = tl.arange(0, BLOCK)
    for block in range(tl.program_id(1), blocks_of(n, BLOCK), tl.num_programs(1)):
        first = block * tl.full([], BLOCK, tl.int64)
        start = row * n + first  # 64 bits once a block, 32 bits an item
        inside = at < tl.minimum(n - first, BLOCK).to(tl.int32)
        value, relevant, irrelevant = read_items(
            scores + start, relevance + start, mask + start, at, inside, half, MASKED
        )
        if not AGAIN:
            nan = nan | ((value != value) & (relevant | irrelevant)).to(tl.int32)
        cell = _cell(value, best, scale, last_cell)
        bounds = tl.load(table + cell, mask=irrelevant, other=0)
        low = (bounds & 0xFFFFFFFF).to(tl.int32)
        high = (bounds >> 32).to(tl.int32)
        widest = tl.max(high - low)
        while widest > 0:
            middle = (low + high) // 2
            open_ = low < high
            better = open_ & (tl.load(levels + middle, mask=open_, other=0.0) > value)
            low = tl.where(better, middle + 1, low)
            high = tl.where(open_ & ~better, middle, high)
            widest = widest // 2
        if AGAIN:
            before = tl.load(changes + start + at, mask=irrelevant, other=0)
            moved = irrelevant & (low != before)
            if WINDOW:
                up_to = tl.load(sums + low - 1, mask=moved & (low > 0), other=0)
                total = up_to - tl.load(sums + before - 1, mask=moved & (before > 0), other=0)
                gradient = tl.where(moved, pushed(total, one, count), 0)
                tl.store(changes + start + at, gradient, mask=inside & ~relevant)
            else:
                if tl.max(moved.to(tl.int32)) > 0:
                    _add(counts, before.to(tl.int32), moved, -1)
                    _add(counts, low, moved, 1)
                tl.store(changes + start + at, tl.where(irrelevant, low - before, 0), mask=inside & ~relevant)
        elif WRITE:
            tl.store(changes + start + at, low, mask=irrelevant)
        if WINDOW or not AGAIN:
            if p < FEW - 1:
                few += tl.histogram(tl.where(irrelevant, low, FEW - 1), FEW)
            else:
                _add(counts, low, irrelevant, 1)
    if not AGAIN:  # noqa: SIM102 - decided when compiling
        if tl.max(nan) > 0:
            tl.store(state + 2, 1)
    if WINDOW or not AGAIN:  # noqa: SIM102
        if p < FEW - 1:
            place = tl.arange(0, FEW)
            tl.atomic_add(counts + place, few, mask=(place <= p) & (few > 0), sem="relaxed")
