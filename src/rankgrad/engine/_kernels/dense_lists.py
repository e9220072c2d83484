"""Triton kernels for lists with many relevant items: one sort of all items, and one of the relevant after the move.

Only relevant scores move, so the irrelevant keep their order. With the list sorted once (by torch, the earlier
index first among equals), in its sorted order

    an irrelevant item's place is the number of relevant items before its run of equal scores,
    a relevant item's rank is its number among the relevant plus the irrelevant items up to the end of its run;

and after the move, with the moved scores sorted by themselves,

    an irrelevant item's place is the number of moved scores above its score (a search between neighbours),
    a moved item's rank is its number among the moved plus the irrelevant items at or above its score.

How many relevant items there are up to some place is asked in two orders, by index and sorted. The answer is
kept as one bit a place and, for each 32 places, the number of bits up to their end (:func:`_up_to`): small
enough to stay in the cache, where what binds otherwise is reading and writing at random.

Ranks of relevant items are kept by their number q in the order of index, so that each is written at random once
and everything else is read and written in order:

    shift         scores after the margin; bits of relevance by index
    (torch sorts)
    flag          bits of relevance in sorted order
    move          loss; of each relevant item its moved score and rank, at q; of each irrelevant its place, in order
    take_moved    the moved scores by themselves
    (torch sorts)
    place_moved   of each moved score its rank, at q
    place_others  of each irrelevant item its change, at its index
    finish        of each relevant item its change
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import as_float64, item_terms, read_items

NOWHERE = tl.constexpr(2**31 - 1)  # beyond any place: torch sorts no longer list


@triton.jit
def _where(n, BLOCK: tl.constexpr):
    """The row and the places of this program: rows and their blocks lie on one axis of the grid."""
    blocks = tl.cdiv(n, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


# -------------------------------------------------------------------------- how many up to a place


@triton.jit
def _ones(word):
    """How many bits of a 32-bit word are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _pack(flags, bits, ones, first, words, BLOCK: tl.constexpr):
    """Write a block of flags as bits, and how many are set in each word."""
    lanes = tl.reshape(flags, [BLOCK // 32, 32]).to(tl.int64) << tl.arange(0, 32)[None, :]
    word = tl.sum(lanes, 1).to(tl.uint32)
    at = first // 32 + tl.arange(0, BLOCK // 32)
    tl.store(bits + at, word.to(tl.int32, bitcast=True), mask=at < words)
    tl.store(ones + at, _ones(word), mask=at < words)


@triton.jit
def _bit(bits, at, inside):
    word = tl.load(bits + at // 32, mask=inside, other=0)
    return inside & (((word >> (at % 32).to(tl.int32)) & 1) != 0)


@triton.jit
def _up_to(bits, totals, at, inside):
    """How many bits are set at the places up to and with ``at`` (0 if it is before the first)."""
    inside = inside & (at >= 0)
    word = tl.load(bits + at // 32, mask=inside, other=0).to(tl.uint32, bitcast=True)
    later = (word >> (at % 32).to(tl.uint32)) >> 1
    return tl.load(totals + at // 32, mask=inside, other=0) - _ones(later)


@triton.jit
def _others_up_to(bits, totals, apart, at, inside, MASKED: tl.constexpr):
    """How many irrelevant items there are up to and with a place: the rest or, if items are missing, as counted."""
    if MASKED:
        return _up_to(bits + apart, totals + apart, at, inside)
    return tl.where(inside, at + 1 - _up_to(bits, totals, at, inside), 0)


@triton.jit
def shift(
    scores, relevance, mask, values, bits, ones, nan, n, words, apart, half, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores after the margin; the bits of relevant (and, MASKED, of irrelevant) items; whether a score is NaN."""
    row, at = _where(n, BLOCK)
    inside = at < n
    value, relevant, irrelevant = read_items(
        scores + row * n, relevance + row * n, mask + row * n, at, inside, half, MASKED
    )
    if tl.max(((value != value) & (relevant | irrelevant)).to(tl.int32)) > 0:
        tl.store(nan + row, 1)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 ties with 0.0
    tl.store(values + row * n + at, value, mask=inside)
    first = tl.min(at)
    _pack(relevant, bits + row * words, ones + row * words, first, words, BLOCK)
    if MASKED:
        _pack(irrelevant, bits + apart + row * words, ones + apart + row * words, first, words, BLOCK)


@triton.jit
def flag(order, source, bits, ones, n, words, apart, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The same bits in sorted order."""
    row, at = _where(n, BLOCK)
    inside = at < n
    item = tl.load(order + row * n + at, mask=inside, other=0)
    first = tl.min(at)
    _pack(_bit(source + row * words, item, inside), bits + row * words, ones + row * words, first, words, BLOCK)
    if MASKED:
        irrelevant = _bit(source + apart + row * words, item, inside)
        _pack(irrelevant, bits + apart + row * words, ones + apart + row * words, first, words, BLOCK)


@triton.jit
def count_lists(
    totals, counts, items, lists, n, words, apart, per_call, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Relevant and existing items of each list, and how many lists of each call have something relevant."""
    call = tl.program_id(0).to(tl.int64)
    counting = tl.full([], 0, tl.int64)
    for start in range(0, per_call, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = call * per_call + at
        inside = at < per_call
        found = tl.load(totals + row * words + words - 1, mask=inside, other=0).to(tl.int64)
        existing = tl.zeros([BLOCK], tl.int64) + n
        if MASKED:
            existing = found + tl.load(totals + apart + row * words + words - 1, mask=inside, other=0)
        tl.store(counts + row, found, mask=inside)
        tl.store(items + row, existing, mask=inside)
        counting += tl.sum((found > 0).to(tl.int64))
    tl.store(lists + call, counting)


# ------------------------------------------------------------------------------ runs of equal scores


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _most(a, b):
    return tl.maximum(a, b)


@triton.jit
def _same(values, at, inside, level):
    return inside & (tl.load(values + at, mask=inside, other=0.0) == level)


@triton.jit
def _run_ends(values, at, inside, value, n):
    """The last place of the run of equal scores that each place is in."""
    last = (at + 1 >= n) | (tl.load(values + at + 1, mask=inside & (at + 1 < n), other=0.0) != value)
    end = tl.associative_scan(tl.where(last, at, NOWHERE), 0, _least, reverse=True)
    if tl.max(end) == NOWHERE:  # the block's last run goes on: doubling steps out, then halves
        low = tl.max(at)
        level = tl.load(values + low)
        step = 1
        while _same(values, low + step, step < n - low, level):
            low += step
            step = tl.minimum(step * 2, 1 << 29)
        while step > 0:
            if _same(values, low + step, step < n - low, level):
                low += step
            step = step // 2
        end = tl.minimum(end, low)
    return end


@triton.jit
def _run_starts(values, at, inside, value):
    """The first place of the run of equal scores that each place is in."""
    first = (at == 0) | (tl.load(values + at - 1, mask=inside & (at > 0), other=0.0) != value)
    start = tl.associative_scan(tl.where(first, at, -1), 0, _most)
    if tl.min(start) == -1:
        high = tl.min(at)
        level = tl.load(values + high)
        step = 1
        while _same(values, high - step, step <= high, level):
            high -= step
            step = tl.minimum(step * 2, 1 << 29)
        while step > 0:
            if _same(values, high - step, step <= high, level):
                high -= step
            step = step // 2
        start = tl.maximum(start, high)
    return start


# --------------------------------------------------------------------------------- before the move


@triton.jit(do_not_specialize=["n_weights", "lam_bits"])
def move(
    values, order, bits, totals, by_index, totals_by_index, counts, items, lists, nan, weights, old, places, partial,
    n, slots, words, apart, n_weights, lam_bits, per_call, FORM: tl.constexpr, WRITE: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss; of each relevant item its moved score and its rank, in one word; of each irrelevant its place."""
    row, at = _where(n, BLOCK)
    inside = at < n
    values += row * n
    bits += row * words
    totals += row * words
    found = tl.load(counts + row)
    p = tl.maximum(found, 1).to(tl.float64)
    value = tl.load(values + at, mask=inside, other=0.0)
    relevant = _bit(bits, at, inside)
    end = tl.minimum(_run_ends(values, at, inside, value, n), n - 1)
    above = _others_up_to(bits, totals, apart, end, relevant, MASKED)
    own = _up_to(bits, totals, at, relevant)
    term, slope = item_terms(FORM, weights, n_weights, above, own)
    loss = tl.sum(tl.where(relevant, term, 0.0)) / p
    # a NaN score, or more relevant items than there is room for (a wrong hint), must not look like a result
    bad = (tl.load(nan + row) != 0) | (found > slots)
    tl.store(partial + tl.program_id(0), tl.where(bad, float("nan"), loss))
    if WRITE:
        counting = tl.maximum(tl.load(lists + row // per_call), 1).to(tl.float64)
        per_list = as_float64(lam_bits) * tl.load(items + row).to(tl.float64) / counting / p
        moved = value + (per_list * slope).to(tl.float32)
        item = tl.load(order + row * n + at, mask=relevant, other=0)
        number = _up_to(by_index + row * words, totals_by_index + row * words, item, relevant) - 1
        word = (moved.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (above + own).to(tl.int64)
        tl.store(old + row * slots + number, word, mask=relevant & (number < slots))
        start = _run_starts(values, at, inside, value)
        tl.store(
            places + row * n + at, _up_to(bits, totals, start - 1, inside & ~relevant), mask=inside & ~relevant
        )


@triton.jit
def take_moved(old, counts, moved, slots, BLOCK: tl.constexpr):
    """The moved scores by themselves, and -inf in the slots that are left over."""
    row, at = _where(slots, BLOCK)
    inside = at < slots
    word = tl.load(old + row * slots + at, mask=inside & (at < tl.load(counts + row)), other=0)
    value = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    value = tl.where(value == 0.0, 0.0, value)
    value = tl.where(at < tl.load(counts + row), value, float("-inf"))
    tl.store(moved + row * slots + at, value, mask=inside)


# ---------------------------------------------------------------------------------- after the move


@triton.jit
def _better(values, level, low, high, steps, TIES: tl.constexpr):
    """How many of sorted values are above (TIES: or at) each ``level``, known to be ``low`` to ``high``."""
    while steps > 0:
        middle = (low + high) // 2
        open_ = low < high
        value = tl.load(values + middle, mask=open_, other=0.0)
        if TIES:
            better = open_ & (value >= level)
        else:
            better = open_ & (value > level)
        low = tl.where(better, middle + 1, low)
        high = tl.where(open_ & ~better, middle, high)
        steps = steps // 2
    return low


@triton.jit
def _better_than_block(values, count, levels, first, end, level, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`_better` for a block of sorted levels: first for its ends, then between them."""
    ends = tl.load(levels + tl.where(tl.arange(0, 2) == 0, first, end - 1))
    zero = tl.zeros([2], tl.int32)
    found = _better(values, ends, zero, zero + count, count, TIES)
    low, high = tl.min(found), tl.max(found)
    zero = tl.zeros([BLOCK], tl.int32)
    return _better(values, level, zero + low, zero + high, high - low, TIES)


@triton.jit
def place_moved(
    moved, moved_order, values, bits, totals, counts, new, n, slots, words, apart, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The rank of each moved item, at its number."""
    row, at = _where(slots, BLOCK)
    p = tl.minimum(tl.load(counts + row), slots).to(tl.int32)
    first = tl.min(at)
    if first < p:
        inside = at < p
        moved += row * slots
        level = tl.load(moved + at, mask=inside, other=float("-inf"))
        end = tl.minimum(first + BLOCK, p)
        better = _better_than_block(values + row * n, n, moved, first, end, level, True, BLOCK)
        bits += row * words
        totals += row * words
        above = _others_up_to(bits, totals, apart, better - 1, inside & (better > 0), MASKED)
        number = tl.load(moved_order + row * slots + at, mask=inside, other=0)
        tl.store(new + row * slots + number, at + 1 + above, mask=inside)


@triton.jit
def place_others(
    values, order, bits, moved, counts, places, changes, n, slots, words, apart, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The change of each irrelevant item; 0 for items that do not exist."""
    row, at = _where(n, BLOCK)
    inside = at < n
    p = tl.minimum(tl.load(counts + row), slots).to(tl.int32)
    values += row * n
    bits += row * words
    first = tl.min(at)
    value = tl.load(values + at, mask=inside, other=0.0)
    end = tl.minimum(first + BLOCK, n)
    better = _better_than_block(moved + row * slots, p, values, first, end, value, False, BLOCK)
    irrelevant = inside & ~_bit(bits, at, inside)
    change = better - tl.load(places + row * n + at, mask=irrelevant, other=0)
    if MASKED:
        change = tl.where(_bit(bits + apart, at, inside), change, 0)
    item = tl.load(order + row * n + at, mask=irrelevant, other=0)
    tl.store(changes + row * n + item, change, mask=irrelevant)


@triton.jit
def finish(bits, totals, old, new, changes, n, slots, words, BLOCK: tl.constexpr):
    """The change of each relevant item."""
    row, at = _where(n, BLOCK)
    relevant = _bit(bits + row * words, at, at < n)
    number = _up_to(bits + row * words, totals + row * words, at, relevant) - 1
    relevant = relevant & (number < slots)
    before = tl.load(old + row * slots + number, mask=relevant, other=0).to(tl.int32)
    after = tl.load(new + row * slots + number, mask=relevant, other=0)
    tl.store(changes + row * n + at, after - before, mask=relevant)
