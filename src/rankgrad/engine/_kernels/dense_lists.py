"""Triton kernels around the two whole sorts of lists with many relevant items.

In sorted order, running totals of relevant and irrelevant items (in the two halves of an int64) give ranks:
ties are resolved by looking for the end of a run of equal scores, only where there is one.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import as_float64, item_terms, read_items, span


@triton.jit
def shift(scores, relevance, mask, out, n, half, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Scores after the margin."""
    row = tl.program_id(0).to(tl.int64)
    at = span(tl.program_id(1), BLOCK)
    inside = at < n
    value, _, _ = read_items(scores + row * n, relevance + row * n, mask + row * n, at, inside, half, MASKED)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 ties with 0.0
    tl.store(out + row * n + at, value, mask=inside)


@triton.jit
def flag(order, relevance, mask, out, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """For each place of the sorted list: 1 << 32 if a relevant item stands there, 1 if an irrelevant one does."""
    row = tl.program_id(0).to(tl.int64)
    at = span(tl.program_id(1), BLOCK)
    inside = at < n
    item = tl.load(order + row * n + at, mask=inside, other=0)
    exists = inside
    if MASKED:
        exists = inside & (tl.load(mask + row * n + item, mask=inside, other=0) != 0)
    relevant = exists & (tl.load(relevance + row * n + item, mask=inside, other=0) != 0)
    tl.store(out + row * n + at, tl.where(relevant, 1 << 32, exists.to(tl.int64)), mask=inside)


@triton.jit
def _run_end(values, at, n, value, tied):
    """The last place of the run of equal scores at ``at``; only where ``tied``."""
    low = at
    high = tl.where(tied, n - 1, at)
    left = tl.max(high - low)
    while left > 0:
        middle = (low + high + 1) // 2
        equal = (low < high) & (tl.load(values + middle, mask=low < high, other=0.0) == value)
        high = tl.where((low < high) & ~equal, middle - 1, high)
        low = tl.where(equal, middle, low)
        left = left // 2
    return low


@triton.jit
def _run_start(values, at, value, tied):
    low = tl.where(tied, 0, at)
    high = at
    left = tl.max(high - low)
    while left > 0:
        middle = (low + high) // 2
        equal = (low < high) & (tl.load(values + middle, mask=low < high, other=0.0) == value)
        low = tl.where((low < high) & ~equal, middle + 1, low)
        high = tl.where(equal, middle, high)
        left = left // 2
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
    row = tl.program_id(0).to(tl.int64)
    at = span(tl.program_id(1), BLOCK)
    inside = at < n
    value, relevant, irrelevant, above, own, better = _stand(values + row * n, totals + row * n, at, inside, n)
    term, slope = item_terms(FORM, weights, n_weights, above, own)
    loss = tl.sum(tl.where(relevant, term, 0.0))
    tl.store(partial + row * tl.num_programs(1) + tl.program_id(1), loss)
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
    row = tl.program_id(0).to(tl.int64)
    at = span(tl.program_id(1), BLOCK)
    inside = at < n
    _, relevant, irrelevant, above, own, better = _stand(values + row * n, totals + row * n, at, inside, n)
    item = changes + row * n + tl.load(order + row * n + at, mask=inside, other=0)
    rank = tl.where(relevant, above + own, better)
    exists = relevant | irrelevant
    tl.store(item, tl.load(item, mask=exists, other=0) + rank, mask=exists)
