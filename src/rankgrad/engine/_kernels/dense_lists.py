"""Triton kernels around the two whole sorts of lists with many relevant items.

In sorted order, running totals of relevant and irrelevant items (in the two halves of an int64) give ranks:
ties are resolved by looking for the end of a run of equal scores, only where there is one.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import as_float64, item_terms, read_items, span


@triton.jit
def _where(n, BLOCK: tl.constexpr):
    """The row and the places of this program: rows and their blocks lie on one axis of the grid."""
    blocks = tl.cdiv(n, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), span(tl.program_id(0) % blocks, BLOCK)


@triton.jit
def shift(scores, relevance, mask, out, n, half, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Scores after the margin."""
    row, at = _where(n, BLOCK)
    inside = at < n
    value, _, _ = read_items(scores + row * n, relevance + row * n, mask + row * n, at, inside, half, MASKED)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 ties with 0.0
    tl.store(out + row * n + at, value, mask=inside)


@triton.jit
def flag(order, relevance, mask, out, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """For each place of the sorted list: 1 << 32 if a relevant item stands there, 1 if an irrelevant one does."""
    row, at = _where(n, BLOCK)
    inside = at < n
    item = tl.load(order + row * n + at, mask=inside, other=0)
    exists = inside
    if MASKED:
        exists = inside & (tl.load(mask + row * n + item, mask=inside, other=0) != 0)
    relevant = exists & (tl.load(relevance + row * n + item, mask=inside, other=0) != 0)
    tl.store(out + row * n + at, tl.where(relevant, 1 << 32, exists.to(tl.int64)), mask=inside)


@triton.jit
def _equal(values, at, inside, value):
    return inside & (tl.load(values + at, mask=inside, other=0.0) == value)


@triton.jit
def _run_end(values, at, n, value, tied):
    """The last place of the run of equal scores at ``at``; only where ``tied``. Doubling steps out, then halves."""
    low = at
    step = tl.full([], 1, tl.int64)
    reach = tied
    while tl.max(reach.to(tl.int32)) > 0:
        reach = _equal(values, at + step, reach & (at + step < n), value)
        low = tl.where(reach, at + step, low)
        step *= 2
    step = step // 2
    while step > 0:
        further = _equal(values, low + step, tied & (low + step < n), value)
        low = tl.where(further, low + step, low)
        step = step // 2
    return low


@triton.jit
def _run_start(values, at, value, tied):
    """The first place of the run of equal scores at ``at``; only where ``tied``."""
    high = at
    step = tl.full([], 1, tl.int64)
    reach = tied
    while tl.max(reach.to(tl.int32)) > 0:
        reach = _equal(values, at - step, reach & (at - step >= 0), value)
        high = tl.where(reach, at - step, high)
        step *= 2
    step = step // 2
    while step > 0:
        further = _equal(values, high - step, tied & (high - step >= 0), value)
        high = tl.where(further, high - step, high)
        step = step // 2
    return high


@triton.jit
def _stand(values, totals, at, inside, n):
    """Per place: relevant and irrelevant item or neither; irrelevant items at or above a relevant one and its own
    rank; relevant items strictly above an irrelevant one."""
    value = tl.load(values + at, mask=inside, other=0.0)
    total = tl.load(totals + at, mask=inside, other=0)
    before = tl.load(totals + at - 1, mask=inside & (at > 0), other=0)
    relevant = inside & ((total >> 32) > (before >> 32))
    irrelevant = inside & ((total & 0xFFFFFFFF) > (before & 0xFFFFFFFF))
    tied = relevant & (at + 1 < n) & (tl.load(values + at + 1, mask=inside & (at + 1 < n), other=0.0) == value)
    end = _run_end(values, at, n, value, tied)
    above = tl.load(totals + end, mask=relevant, other=0) & 0xFFFFFFFF
    tied = irrelevant & (at > 0) & (tl.load(values + at - 1, mask=inside & (at > 0), other=0.0) == value)
    start = _run_start(values, at, value, tied)
    better = tl.load(totals + start - 1, mask=irrelevant & (start > 0), other=0) >> 32
    return value, relevant, irrelevant, above, total >> 32, better


@triton.jit(do_not_specialize=["lam_bits"])
def move(
    values, totals, order, counts, items, lists, weights, moved, changes, partial, n, n_weights, lam_bits, per_call,
    FORM: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss terms; the moved scores of relevant items; and minus the rank of every item where its change will be."""
    row, at = _where(n, BLOCK)
    inside = at < n
    value, relevant, irrelevant, above, own, better = _stand(values + row * n, totals + row * n, at, inside, n)
    term, slope = item_terms(FORM, weights, n_weights, above, own)
    loss = tl.sum(tl.where(relevant, term, 0.0))
    tl.store(partial + tl.program_id(0), loss)
    if WRITE:
        counting = tl.maximum(tl.load(lists + row // per_call), 1).to(tl.float64)
        p = tl.maximum(tl.load(counts + row), 1).to(tl.float64)
        per_list = as_float64(lam_bits) * tl.load(items + row).to(tl.float64) / counting / p
        item = tl.load(order + row * n + at, mask=inside, other=0)
        step = (per_list * slope).to(tl.float32)
        tl.store(moved + row * n + item, value + step, mask=relevant)
        rank = tl.where(relevant, above + own, tl.where(irrelevant, better, 0))
        tl.store(changes + row * n + item, -rank, mask=inside)


@triton.jit
def settle(values, totals, order, changes, n, BLOCK: tl.constexpr):
    """Add every item's rank after the move."""
    row, at = _where(n, BLOCK)
    inside = at < n
    _, relevant, irrelevant, above, own, better = _stand(values + row * n, totals + row * n, at, inside, n)
    item = changes + row * n + tl.load(order + row * n + at, mask=inside, other=0)
    rank = tl.where(relevant, above + own, better)
    exists = relevant | irrelevant
    tl.store(item, tl.load(item, mask=exists, other=0) + rank, mask=exists)
