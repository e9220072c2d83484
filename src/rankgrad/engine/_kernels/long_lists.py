"""Triton kernels for few, long lists: sort the p relevant items, stream the n items against them, twice.

p is known on the device only. Every kernel reads it there and works in proportion to it; nothing on the
host is sized or chosen by it. One list's pipeline (axis 1 of every grid is the list):

    gather        relevant items -> words, in any order (sorting makes the order unique)
    (sorting.py)  words -> sorted words
    make_table    sorted words -> cells of uniform width with the number of better relevant scores
    stream        every irrelevant item -> its place k, the number of relevant scores strictly above it;
                  counts of items at each place
    sum_counts, terms
                  counts -> by prefix sums the irrelevant items at or above each slot; loss; moved words
    (sort, table and stream again with the moved words: places minus the places before)
    sum_counts, settle
                  the relevant items' own rank changes

Skew costs little: an item's place is found in its cell by a search of log2(relevant scores in the cell)
steps, and counting goes to private copies of the counts, the fullest place of a block in one addition.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import (
    STATE,
    as_float64,
    index_of,
    item_terms,
    make_word,
    read_items,
    score_of,
    span,
)

FEW = tl.constexpr(256)  # counts of fewer places fit tl.histogram, with one for items that do not count


@triton.jit
def gather(scores, relevance, mask, words, state, n, half, slots, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    state += row * STATE
    words += row * slots
    items = 0
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
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


@triton.jit
def count_lists(state, lists, items, n, per_call, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """How many lists of each call have something relevant, and how many items each list has."""
    call = tl.program_id(0).to(tl.int64)
    total = tl.full([], 0, tl.int64)
    for start in range(0, per_call, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = call * per_call + at
        found = tl.load(state + row * STATE, mask=at < per_call, other=0)
        total += tl.sum((found > 0).to(tl.int64))
        existing = tl.zeros([BLOCK], tl.int64) + n
        if MASKED:
            existing = tl.load(state + row * STATE + 1, mask=at < per_call, other=0)
        tl.store(items + row, existing, mask=at < per_call)
    tl.store(lists + call, total)


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
def _in_better_cells(words, cell, best, scale, last, low, high, steps):
    """How many of sorted words lie in better cells than ``cell``, known to be ``low`` to ``high``."""
    while steps > 0:
        middle = (low + high) // 2
        open_ = low < high
        word = tl.load(words + middle, mask=open_, other=0)
        better = open_ & (_cell(score_of(word), best, scale, last) < cell)
        low = tl.where(better, middle + 1, low)
        high = tl.where(open_ & ~better, middle, high)
        steps = steps // 2
    return low


@triton.jit
def make_table(words, levels, table, geometry, counts, state, slots, most_cells, room, BLOCK: tl.constexpr):
    """Scores of sorted words; how many lie in better cells, for every cell; where cells lie; zeroed counts.

    ``table`` has two numbers a cell, how many lie in better cells and how many in better ones or itself: one
    64-bit word for :func:`stream`, whose look-ups bind.
    """
    row = tl.program_id(1).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    words += row * slots
    table += row * 2 * most_cells
    counts += row * (room + slots + 1)
    cells = _cells(p, most_cells)
    best = tl.full([], 0.0, tl.float32)
    scale = tl.full([], 0.0, tl.float32)
    if p > 0:
        best = _finite_end(words, p, True)
        width = best - _finite_end(words, p, False)
        if (width > 0) & (width < float("inf")):
            scale = cells.to(tl.float32) / width
            scale = tl.where(scale < float("inf"), scale, 0.0)
        best = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    if tl.program_id(0) == 0:
        tl.store(geometry + row * 2, best)
        tl.store(geometry + row * 2 + 1, scale)
    last_cell = (cells - 1).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(cells + 1, BLOCK), tl.num_programs(0)):
        ends = block * BLOCK + tl.arange(0, 2) * (BLOCK - 1)
        zero = tl.zeros([2], tl.int64)
        found = _in_better_cells(words, ends, best, scale, last_cell, zero, zero + p, p)
        low, high = tl.min(found), tl.max(found)
        cell = span(block, BLOCK)
        zero = tl.zeros([BLOCK], tl.int64)
        better = _in_better_cells(words, cell, best, scale, last_cell, zero + low, zero + high, high - low)
        tl.store(table + 2 * cell, better.to(tl.int32), mask=cell < cells)
        tl.store(table + 2 * cell - 1, better.to(tl.int32), mask=(cell > 0) & (cell <= cells))
    for block in range(tl.program_id(0), tl.cdiv(p, BLOCK), tl.num_programs(0)):
        at = span(block, BLOCK)
        tl.store(levels + row * slots + at, score_of(tl.load(words + at, mask=at < p, other=0)), mask=at < p)
    copies = _copies(p, room, tl.num_programs(0))
    for block in range(tl.program_id(0), tl.cdiv(copies * (p + 1), BLOCK), tl.num_programs(0)):
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


@triton.jit
def stream(
    scores, relevance, mask, levels, table, geometry, counts, state, changes, n, half, slots, most_cells, room,
    MASKED: tl.constexpr, WRITE: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place every irrelevant item and count the places; ``AGAIN``: the difference to the first places.

    The second time counts hold what changed: minus one at the first place, plus one at the second.
    """
    row = tl.program_id(1).to(tl.int64)
    state += row * STATE
    p = tl.minimum(tl.load(state), slots)
    levels += row * slots
    table += row * most_cells
    counts += row * (room + slots + 1)
    best = tl.load(geometry + row * 2)
    scale = tl.load(geometry + row * 2 + 1)
    last_cell = (_cells(p, most_cells) - 1).to(tl.float32)
    copies = _copies(p, room, tl.num_programs(0))
    counts += (tl.program_id(0) % copies) * (p + 1)
    few = tl.zeros([FEW], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    at = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
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
            if tl.max(moved.to(tl.int32)) > 0:
                _add(counts, before.to(tl.int32), moved, -1)
                _add(counts, low, moved, 1)
            tl.store(changes + start + at, tl.where(irrelevant, low - before, 0), mask=inside & ~relevant)
        else:
            if p < FEW - 1:
                few += tl.histogram(tl.where(irrelevant, low, FEW - 1), FEW)
            else:
                _add(counts, low, irrelevant, 1)
            if WRITE:
                tl.store(changes + start + at, low, mask=irrelevant)
    if not AGAIN:
        if tl.max(nan) > 0:
            tl.store(state + 2, 1)
        if p < FEW - 1:
            place = tl.arange(0, FEW)
            tl.atomic_add(counts + place, few, mask=(place <= p) & (few > 0), sem="relaxed")


@triton.jit
def sum_counts(
    counts, totals, chunk_sums, state, slots, room, programs,
    AGAIN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add up the private copies, and the sum of each chunk of places for the prefix sums."""
    row = tl.program_id(1).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    counts += row * (room + slots + 1)
    totals += row * (slots + 1)
    copies = _copies(p, room, programs)
    chunk = tl.cdiv(p + 1, tl.num_programs(0))
    low = tl.program_id(0) * chunk
    high = tl.minimum(low + chunk, p + 1)
    chunk_sum = tl.full([], 0, tl.int64)
    if copies == 1:  # many places
        for start in range(low, high, WIDE):
            place = start + tl.arange(0, WIDE)
            total = tl.load(counts + place, mask=place < high, other=0).to(tl.int64)
            if AGAIN:
                total += tl.load(totals + place, mask=place < high, other=0)
            tl.store(totals + place, total, mask=place < high)
            chunk_sum += tl.sum(total)
        low = high
    for start in range(low, high, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < high
        total = tl.zeros([BLOCK], tl.int64)
        if AGAIN:
            total = tl.load(totals + place, mask=inside, other=0)
        for first in range(0, copies, TILE):
            copy = first + tl.arange(0, TILE)
            both = (copy < copies)[:, None] & inside[None, :]
            part = tl.load(counts + copy[:, None] * (p + 1) + place[None, :], mask=both, other=0)
            total += tl.sum(part.to(tl.int64), 0)
        tl.store(totals + place, total, mask=inside)
        chunk_sum += tl.sum(total)
    tl.store(chunk_sums + row * tl.num_programs(0) + tl.program_id(0), chunk_sum)


@triton.jit
def _share(chunk_sums, row, p, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The places of this program, from ``low`` to ``high``, and the sum of all before them.

    As many chunks as fill a block: of short lists the first programs take all, the others nothing.
    """
    chunk = tl.cdiv(p + 1, CHUNKS)
    many = tl.maximum(tl.full([], BLOCK, tl.int64) // chunk, 1)
    first = tl.program_id(0) * many
    low = tl.minimum(first * chunk, p + 1)
    high = tl.minimum(low + many * chunk, p + 1)
    before = tl.arange(0, CHUNKS)
    return low, high, tl.sum(tl.load(chunk_sums + row * CHUNKS + before, mask=before < first, other=0))


@triton.jit(do_not_specialize=["n_weights", "lam_bits"])
def terms(
    words, loose, totals, chunk_sums, state, weights, lists, partial, changes, given, above_out, position_out,
    n, slots, n_weights, lam_bits, per_call, FORM: tl.constexpr, MOVE: tl.constexpr, MASKED: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Prefix sums; then, by FORM: a named loss and its steps (0-4), given steps (5), or just the counts (6).

    ``MOVE``: the moved words, and each relevant item's rank where its change will be.
    """
    row = tl.program_id(1).to(tl.int64)
    state += row * STATE
    found = tl.load(state)
    p = tl.minimum(found, slots)
    words += row * slots
    loose += row * slots
    low, high, total = _share(chunk_sums, row, p, CHUNKS, BLOCK)
    lam = as_float64(lam_bits)
    items = tl.full([], 0, tl.int64) + n
    if MASKED:
        items = tl.load(state + 1)
    per_list = (
        lam
        * items.to(tl.float64)
        / tl.maximum(tl.load(lists + row // per_call), 1).to(tl.float64)
        / tl.maximum(p, 1).to(tl.float64)
    )
    loss = tl.full([], 0.0, tl.float64)
    for start in range(low, high, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < high
        count = tl.load(totals + row * (slots + 1) + slot, mask=inside, other=0)
        above = total + tl.cumsum(count, 0)
        total += tl.sum(count)
        inside = inside & (slot < p)
        word = tl.load(words + slot, mask=inside, other=0)
        index = index_of(word)
        if FORM == 6:
            tl.store(above_out + row * slots + slot, above, mask=inside)
            tl.store(position_out + row * slots + slot, index, mask=inside)
        else:
            if FORM == 5:
                step = tl.load(given + row * slots + slot, mask=inside, other=0.0)
            else:
                value, slope = item_terms(FORM, weights, n_weights, above, slot + 1)
                loss += tl.sum(tl.where(inside, value, 0.0))
                step = (per_list * slope).to(tl.float32)
            if MOVE:
                tl.store(changes + row * n + index, slot + 1 + above, mask=inside)
                tl.store(loose + slot, make_word(score_of(word) + step, index), mask=inside)
    loss = loss / tl.maximum(p, 1).to(tl.float64)
    # a NaN score, or more relevant items than there is room for (a wrong hint), must not look like a result
    bad = (tl.load(state + 2) != 0) | (found > slots)
    loss = tl.where(bad, float("nan"), loss)
    tl.store(partial + row * CHUNKS + tl.program_id(0), loss)


@triton.jit
def sum_losses(partial, losses, CHUNKS: tl.constexpr):
    """Loss of each list from its chunks', always in the same order."""
    row = tl.program_id(1).to(tl.int64)
    tl.store(losses + row, tl.sum(tl.load(partial + row * CHUNKS + tl.arange(0, CHUNKS))))


@triton.jit
def settle(words, totals, chunk_sums, state, changes, n, slots, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The relevant items' rank changes: their new rank minus the old one that stands in its place."""
    row = tl.program_id(1).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    low, high, total = _share(chunk_sums, row, p, CHUNKS, BLOCK)
    for start in range(low, high, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < high
        count = tl.load(totals + row * (slots + 1) + slot, mask=inside, other=0)
        above = total + tl.cumsum(count, 0)
        total += tl.sum(count)
        inside = inside & (slot < p)
        at = changes + row * n + index_of(tl.load(words + row * slots + slot, mask=inside, other=0))
        tl.store(at, slot + 1 + above - tl.load(at, mask=inside, other=0), mask=inside)
