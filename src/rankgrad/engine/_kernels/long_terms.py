"""Triton kernels for few, long lists: what happens slot by slot, between and after the streams of ``long_lists``.

Slots are the relevant items, best first; p + 1 places lie around them. A program of these kernels takes a stretch of
slots, and what comes before it from the sums of the others' stretches.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.forms_gpu import item_terms, pulled, units, window_terms
from rankgrad.engine._kernels.long_lists import _copies
from rankgrad.engine._kernels.words import LAM, STATE, index_of, make_word, score_of, strength_of


@triton.jit
def sum_counts(
    counts, totals, chunk_sums, state, slots, room, programs,
    MORE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add up the private copies (MORE: to the totals there are), and each chunk of places for the prefix sums."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    counts += row * (room + slots + 1)
    totals += row * (slots + 1)
    copies = _copies(p, room, programs)
    chunk = tl.cdiv(p + 1, tl.num_programs(1))
    low = tl.program_id(1) * chunk
    high = tl.minimum(low + chunk, p + 1)
    chunk_sum = tl.full([], 0, tl.int64)
    if copies == 1:  # many places
        for start in range(low, high, WIDE):
            place = start + tl.arange(0, WIDE)
            total = tl.load(counts + place, mask=place < high, other=0).to(tl.int64)
            if MORE:
                total += tl.load(totals + place, mask=place < high, other=0)
            tl.store(totals + place, total, mask=place < high)
            chunk_sum += tl.sum(total)
        low = high
    for start in range(low, high, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < high
        total = tl.zeros([BLOCK], tl.int64)
        if MORE:
            total = tl.load(totals + place, mask=inside, other=0)
        for first in range(0, copies, TILE):
            copy = first + tl.arange(0, TILE)
            both = (copy < copies)[:, None] & inside[None, :]
            part = tl.load(counts + copy[:, None] * (p + 1) + place[None, :], mask=both, other=0)
            total += tl.sum(part.to(tl.int64), 0)
        tl.store(totals + place, total, mask=inside)
        chunk_sum += tl.sum(total)
    tl.store(chunk_sums + row * tl.num_programs(1) + tl.program_id(1), chunk_sum)


@triton.jit
def _stretch(p, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The places of this program, from ``low`` to ``high``, and how many chunks are before them.

    As many chunks as fill a block: of short lists the first programs take all, the others nothing.
    """
    chunk = tl.cdiv(p + 1, CHUNKS)
    many = tl.maximum(tl.full([], BLOCK, tl.int64) // chunk, 1)
    first = tl.program_id(1) * many
    low = tl.minimum(first * chunk, p + 1)
    return low, tl.minimum(low + many * chunk, p + 1), first


@triton.jit
def _sum_before(sums, row, first, CHUNKS: tl.constexpr):
    before = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(sums + row * CHUNKS + before, mask=before < first, other=0))


@triton.jit(do_not_specialize=["n_tables", "reach_bits"])
def terms(
    words, loose, totals, chunk_sums, state, tables, lists, spread, partial, tops, changes, above_out,
    n, slots, n_tables, per_call, reach_bits,
    FORM: tl.constexpr, MOVE: tl.constexpr, REACH: tl.constexpr, MASKED: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Prefix sums of the counts: the irrelevant items above each slot; a form's loss, or (FORM 5) just the counts.

    MOVE, by lambda: the moved words in ``loose``, and each relevant item's rank where its change will be; by window:
    the slopes in ``loose``, the largest of this program in ``tops``, and each relevant item's count in ``changes``.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    found = tl.load(state)
    p = tl.minimum(found, slots)
    words += row * slots
    loose += row * slots
    low, high, first = _stretch(p, CHUNKS, BLOCK)
    total = _sum_before(chunk_sums, row, first, CHUNKS)
    if MOVE and REACH == LAM:
        items = tl.full([], 0, tl.int64) + n
        if MASKED:
            items = tl.load(state + 1)
        call = row // per_call
        lam = strength_of(reach_bits, spread, call, REACH)
        lam_list = lam * items.to(tl.float64) / tl.maximum(tl.load(lists + call), 1).to(tl.float64)
        per_list = lam_list / tl.maximum(p, 1).to(tl.float64)
    loss = tl.full([], 0.0, tl.float64)
    top = tl.full([], 0.0, tl.float64)
    for start in range(low, high, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < high
        count = tl.load(totals + row * (slots + 1) + slot, mask=inside, other=0)
        above = total + tl.cumsum(count, 0)
        total += tl.sum(count)
        inside = inside & (slot < p)
        if FORM < 0:
            tl.store(above_out + row * slots + slot, above, mask=inside)
        else:
            value, slope = item_terms(FORM, tables, n_tables, above, slot + 1)
            loss += tl.sum(tl.where(inside, value, 0.0))
            if MOVE:
                word = tl.load(words + slot, mask=inside, other=0)
                index = index_of(word)
                if REACH == LAM:
                    moved = score_of(word) + (per_list * slope).to(tl.float32)
                    tl.store(loose + slot, make_word(moved, index), mask=inside)
                    tl.store(changes + row * n + index, slot + 1 + above, mask=inside)
                else:
                    slope = tl.where(inside & (above > 0), slope, 0.0)
                    top = tl.maximum(top, tl.max(tl.abs(slope)))
                    tl.store(loose + slot, slope.to(tl.int64, bitcast=True), mask=inside)
                    tl.store(changes + row * n + index, above.to(tl.int32), mask=inside)
    loss = loss / tl.maximum(p, 1).to(tl.float64)
    # a NaN score, or more relevant items than there is room for (a wrong hint), must not look like a result
    bad = (tl.load(state + 2) != 0) | (found > slots)
    loss = tl.where(bad, float("nan"), loss)
    tl.store(partial + row * CHUNKS + tl.program_id(1), loss)
    if MOVE and REACH != LAM:
        tl.store(tops + row * CHUNKS + tl.program_id(1), top)


@triton.jit
def sum_losses(partial, losses, CHUNKS: tl.constexpr):
    """Loss of each list from its stretches', always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(losses + row, tl.sum(tl.load(partial + row * CHUNKS + tl.arange(0, CHUNKS))))


# --------------------------------------------------------------------------------------- by window


@triton.jit
def sum_units(loose, tops, unit_sums, unit, state, slots, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Slopes in units, summed up in place within this program's stretch; its sum; and the unit of the list."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    loose += row * slots
    many, one = units(tl.max(tl.load(tops + row * CHUNKS + tl.arange(0, CHUNKS))), tl.maximum(p, 1))
    if tl.program_id(1) == 0:
        tl.store(unit + row, one)
    low, high, _ = _stretch(p, CHUNKS, BLOCK)
    total = tl.full([], 0, tl.int64)
    for start in range(low, tl.minimum(high, p), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < tl.minimum(high, p)
        slope = tl.load(loose + slot, mask=inside, other=0).to(tl.float64, bitcast=True)
        here = (slope * many).to(tl.int64)
        tl.store(loose + slot, total + tl.cumsum(here, 0), mask=inside)
        total += tl.sum(here)
    tl.store(unit_sums + row * CHUNKS + tl.program_id(1), total)


@triton.jit
def offset_units(loose, unit_sums, state, slots, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of all slots before each stretch, added to it."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    low, high, _ = _stretch(p, CHUNKS, BLOCK)
    if low > 0:
        before = _sum_before(unit_sums, row, tl.program_id(1), CHUNKS)
        for start in range(low, tl.minimum(high, p), BLOCK):
            slot = start + tl.arange(0, BLOCK)
            inside = slot < tl.minimum(high, p)
            at = loose + row * slots + slot
            tl.store(at, tl.load(at, mask=inside, other=0) + before, mask=inside)


# ------------------------------------------------------------------------------------ after the move


@triton.jit(do_not_specialize=["n_tables"])
def settle(
    words, totals, chunk_sums, state, tables, changes, n, slots, n_tables,
    FORM: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The relevant items' own part, in place of what ``terms`` has left there.

    By lambda their rank changes: the new rank minus the old one. By window their gradient: slope times the irrelevant
    items that stand above before but not after.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    low, high, first = _stretch(p, CHUNKS, BLOCK)
    total = _sum_before(chunk_sums, row, first, CHUNKS)
    for start in range(low, high, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < high
        count = tl.load(totals + row * (slots + 1) + slot, mask=inside, other=0)
        after = total + tl.cumsum(count, 0)
        total += tl.sum(count)
        inside = inside & (slot < p)
        at = changes + row * n + index_of(tl.load(words + row * slots + slot, mask=inside, other=0))
        left = tl.load(at, mask=inside, other=0)
        if WINDOW:
            above = left.to(tl.int64) & 0xFFFFFFFF
            _, slope = window_terms(FORM, tables, n_tables, above, slot + 1, inside)
            tl.store(at, pulled(slope, above - after, p.to(tl.float64)), mask=inside)
        else:
            tl.store(at, slot + 1 + after - left, mask=inside)
