"""Triton kernels for lists with many relevant items: one sort of all items, and by lambda one of the relevant after
the move.

Only relevant scores move, so the irrelevant keep their order. With the list sorted once (by torch, the earlier
index first among equals), in its sorted order

    an irrelevant item's place is the number of relevant items before its run of equal scores,
    a relevant item's rank is its number among the relevant plus the irrelevant items up to the end of its run;

and after the move, with the moved scores sorted by themselves,

    an irrelevant item's place is the number of moved scores above its score (a search between neighbours),
    a moved item's rank is its number among the moved plus the irrelevant items at or above its score.

By window all relevant scores rise equally far: they are sorted already.

How many relevant items there are up to some place is needed in two orders, by index and sorted (``dense_orders``).

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

By window, with what belongs to relevant items kept in slots, best first:

    move          loss; of each relevant item its slope and risen score
    in_units      slopes in units of the list
    (torch sums up)
    reach_up      of each item its gradient, at its index
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.dense_orders import (
    better_than_block,
    bit,
    block_of,
    others_up_to,
    pack,
    run_ends,
    run_starts,
    up_to,
)
from rankgrad.engine._kernels.forms_gpu import item_terms, pulled, pushed, units, window_terms
from rankgrad.engine._kernels.words import LAM, divisor_of, half_margin, read_items, strength_of


@triton.jit(do_not_specialize=["half_bits"])
def shift(
    scores, relevance, mask, spread, values, bits, ones, nan, n, words, apart, per_call, half_bits,
    MARGIN_SHARE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores after the margin; the bits of relevant (and, MASKED, of irrelevant) items; whether a score is NaN."""
    row, at = block_of(n, BLOCK)
    inside = at < n
    half = half_margin(half_bits, spread, row // per_call, MARGIN_SHARE)
    value, relevant, irrelevant = read_items(
        scores + row * n, relevance + row * n, mask + row * n, at, inside, half, MASKED
    )
    if tl.max(((value != value) & (relevant | irrelevant)).to(tl.int32)) > 0:
        tl.store(nan + row, 1)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 ties with 0.0
    if MASKED:  # a missing item's NaN would stand first, where searches pass
        value = tl.where(relevant | irrelevant, value, float("-inf"))
    tl.store(values + row * n + at, value, mask=inside)
    first = tl.min(at)
    pack(relevant, bits + row * words, ones + row * words, first, words, BLOCK)
    if MASKED:
        pack(irrelevant, bits + apart + row * words, ones + apart + row * words, first, words, BLOCK)


@triton.jit
def flag(order, source, bits, ones, n, words, apart, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The same bits in sorted order."""
    row, at = block_of(n, BLOCK)
    inside = at < n
    item = tl.load(order + row * n + at, mask=inside, other=0)
    first = tl.min(at)
    pack(bit(source + row * words, item, inside), bits + row * words, ones + row * words, first, words, BLOCK)
    if MASKED:
        irrelevant = bit(source + apart + row * words, item, inside)
        pack(irrelevant, bits + apart + row * words, ones + apart + row * words, first, words, BLOCK)


@triton.jit(do_not_specialize=["reach_bits"])
def count_lists(
    totals, spread, counts, items, lists, divisor, n, words, apart, per_call, reach_bits,
    REACH: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Relevant and existing items of each list, how many lists of each call count (GIVEN: elsewhere too), and what
    every list's gradient is divided by."""
    call = tl.program_id(0).to(tl.int64)
    strength = strength_of(reach_bits, spread, call, REACH)
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
        if REACH == LAM:
            tl.store(divisor + row, divisor_of(strength, existing, counting, REACH), mask=inside)
        counting += tl.sum((found > 0).to(tl.int64))
    if GIVEN:
        counting = tl.load(lists + call)
    else:
        tl.store(lists + call, counting)
    if REACH != LAM:
        for start in range(0, per_call, BLOCK):
            at = start + tl.arange(0, BLOCK)
            same = tl.zeros([BLOCK], tl.float64) + divisor_of(strength, counting, counting, REACH)
            tl.store(divisor + call * per_call + at, same, mask=at < per_call)


# --------------------------------------------------------------------------------- before the move


@triton.jit(do_not_specialize=["n_tables", "reach_bits"])
def move(
    values, order, bits, totals, by_index, totals_by_index, counts, items, lists, spread, nan, tables, old, places,
    partial, tops, n, slots, words, apart, per_call, n_tables, reach_bits,
    FORM: tl.constexpr, REACH: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss; and (WRITE) by lambda, in ``old`` each relevant item's moved score and rank, in one word, and in
    ``places`` each irrelevant item's place; by window, in ``old`` the slopes, the largest of this block in ``tops``, and in
    ``places`` the risen scores."""
    row, at = block_of(n, BLOCK)
    inside = at < n
    values += row * n
    bits += row * words
    totals += row * words
    found = tl.load(counts + row)
    p = tl.maximum(found, 1).to(tl.float64)
    value = tl.load(values + at, mask=inside, other=0.0)
    relevant = bit(bits, at, inside)
    end = tl.minimum(run_ends(values, at, inside, value, n), n - 1)
    above = others_up_to(bits, totals, apart, end, relevant, MASKED)
    own = up_to(bits, totals, at, relevant)
    term, slope = item_terms(FORM, tables, n_tables, above, own)
    loss = tl.sum(tl.where(relevant, term, 0.0)) / p
    # a NaN score, or more relevant items than there is room for (a wrong hint), must not look like a result
    bad = (tl.load(nan + row) != 0) | (found > slots)
    tl.store(partial + tl.program_id(0), tl.where(bad, float("nan"), loss))
    if WRITE:
        call = row // per_call
        strength = strength_of(reach_bits, spread, call, REACH)
        if REACH == LAM:
            counting = tl.maximum(tl.load(lists + call), 1).to(tl.float64)
            per_list = strength * tl.load(items + row).to(tl.float64) / counting / p
            moved = value + (per_list * slope).to(tl.float32)
            item = tl.load(order + row * n + at, mask=relevant, other=0)
            number = up_to(by_index + row * words, totals_by_index + row * words, item, relevant) - 1
            word = (moved.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (above + own).to(tl.int64)
            tl.store(old + row * slots + number, word, mask=relevant & (number < slots))
            start = run_starts(values, at, inside, value)
            place = up_to(bits, totals, start - 1, inside & ~relevant)
            tl.store(places + row * n + at, place, mask=inside & ~relevant)
        else:
            slope = tl.where(relevant & (above > 0), slope, 0.0)
            tl.store(tops + tl.program_id(0), tl.max(tl.abs(slope)))
            kept = relevant & (own <= slots)
            slot = row * slots + own - 1
            tl.store(old + slot, slope.to(tl.int64, bitcast=True), mask=kept)
            risen = value + strength.to(tl.float32)
            tl.store(places + slot, risen.to(tl.int32, bitcast=True), mask=kept)


@triton.jit
def take_moved(old, counts, moved, slots, BLOCK: tl.constexpr):
    """The moved scores by themselves, and -inf in the slots that are left over."""
    row, at = block_of(slots, BLOCK)
    inside = at < slots
    word = tl.load(old + row * slots + at, mask=inside & (at < tl.load(counts + row)), other=0)
    value = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    value = tl.where(value == 0.0, 0.0, value)
    value = tl.where(at < tl.load(counts + row), value, float("-inf"))
    tl.store(moved + row * slots + at, value, mask=inside)


# ---------------------------------------------------------------------------- after the move, by lambda


@triton.jit
def place_moved(
    moved, moved_order, values, bits, totals, counts, new, n, slots, words, apart, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The rank of each moved item, at its number."""
    row, at = block_of(slots, BLOCK)
    p = tl.minimum(tl.load(counts + row), slots).to(tl.int32)
    first = tl.min(at)
    if first < p:
        inside = at < p
        moved += row * slots
        level = tl.load(moved + at, mask=inside, other=float("-inf"))
        end = tl.minimum(first + BLOCK, p)
        better = better_than_block(values + row * n, n, moved, 0.0, first, end, level, True, BLOCK)
        bits += row * words
        totals += row * words
        above = others_up_to(bits, totals, apart, better - 1, inside & (better > 0), MASKED)
        number = tl.load(moved_order + row * slots + at, mask=inside, other=0)
        tl.store(new + row * slots + number, at + 1 + above, mask=inside)


@triton.jit
def place_others(
    values, order, bits, moved, counts, places, changes, n, slots, words, apart, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The change of each irrelevant item; 0 for items that do not exist."""
    row, at = block_of(n, BLOCK)
    inside = at < n
    p = tl.minimum(tl.load(counts + row), slots).to(tl.int32)
    values += row * n
    bits += row * words
    first = tl.min(at)
    value = tl.load(values + at, mask=inside, other=0.0)
    end = tl.minimum(first + BLOCK, n)
    better = better_than_block(moved + row * slots, p, values, 0.0, first, end, value, False, BLOCK)
    irrelevant = inside & ~bit(bits, at, inside)
    change = better - tl.load(places + row * n + at, mask=irrelevant, other=0)
    if MASKED:
        change = tl.where(bit(bits + apart, at, inside), change, 0)
    item = tl.load(order + row * n + at, mask=irrelevant, other=0)
    tl.store(changes + row * n + item, change, mask=irrelevant)


@triton.jit
def finish(bits, totals, old, new, changes, n, slots, words, BLOCK: tl.constexpr):
    """The change of each relevant item."""
    row, at = block_of(n, BLOCK)
    relevant = bit(bits + row * words, at, at < n)
    number = up_to(bits + row * words, totals + row * words, at, relevant) - 1
    relevant = relevant & (number < slots)
    before = tl.load(old + row * slots + number, mask=relevant, other=0).to(tl.int32)
    after = tl.load(new + row * slots + number, mask=relevant, other=0)
    tl.store(changes + row * n + at, after - before, mask=relevant)


# ---------------------------------------------------------------------------- after the rise, by window


@triton.jit
def in_units(slopes, tops, counts, unit, slots, blocks, BLOCK: tl.constexpr):
    """Slopes in units of their list, in place, and 0 in the slots that are left over; the unit of each list."""
    row, at = block_of(slots, BLOCK)
    p = tl.load(counts + row)
    top = tl.zeros([BLOCK], tl.float64)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(tops + row * blocks + block, mask=block < blocks, other=0.0))
    many, one = units(tl.max(top), tl.maximum(p, 1))
    if tl.min(at) == 0:
        tl.store(unit + row, one)
    inside = at < slots
    slope = tl.load(slopes + row * slots + at, mask=inside & (at < p), other=0).to(tl.float64, bitcast=True)
    tl.store(slopes + row * slots + at, (slope * many).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["n_tables", "reach_bits"])
def reach_up(
    values, order, bits, totals, counts, spread, tables, sums, risen, unit, changes, n, slots, words, apart, per_call,
    n_tables, reach_bits, FORM: tl.constexpr, REACH: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient: of a relevant item its slope times the irrelevant items that it passes, of an irrelevant item the
    slopes of the relevant items that pass it; 0 for items that do not exist."""
    row, at = block_of(n, BLOCK)
    inside = at < n
    values += row * n
    bits += row * words
    totals += row * words
    found = tl.load(counts + row)
    p = tl.minimum(found, slots).to(tl.int32)
    count = tl.maximum(found, 1).to(tl.float64)
    rise = strength_of(reach_bits, spread, row // per_call, REACH).to(tl.float32)
    first = tl.min(at)
    end = tl.minimum(first + BLOCK, n)
    value = tl.load(values + at, mask=inside, other=0.0)
    relevant = bit(bits, at, inside)

    run_end = tl.minimum(run_ends(values, at, inside, value, n), n - 1)
    above = others_up_to(bits, totals, apart, run_end, relevant, MASKED)
    own = up_to(bits, totals, at, relevant)
    _, slope = window_terms(FORM, tables, n_tables, above, own, relevant)
    better = better_than_block(values, n, values, rise, first, end, value + rise, True, BLOCK)
    after = others_up_to(bits, totals, apart, better - 1, relevant & (better > 0), MASKED)
    pulling = pulled(slope, above - after, count)

    irrelevant = inside & ~relevant
    if MASKED:
        irrelevant = bit(bits + apart, at, inside)
    high = better_than_block(risen + row * slots, p, values, 0.0, first, end, value, False, BLOCK)
    low = up_to(bits, totals, run_starts(values, at, inside, value) - 1, irrelevant)
    passed = irrelevant & (low < high)
    sums += row * slots
    total = tl.load(sums + high - 1, mask=passed, other=0)
    total -= tl.load(sums + low - 1, mask=passed & (low > 0), other=0)
    gradient = tl.where(relevant, pulling, tl.where(passed, pushed(total, tl.load(unit + row), count), 0))
    item = tl.load(order + row * n + at, mask=inside, other=0)
    tl.store(changes + row * n + item, gradient, mask=inside)
