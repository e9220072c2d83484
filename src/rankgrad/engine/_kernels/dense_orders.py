"""What the Triton kernels for dense lists compute from sorted lists: how many up to a place, where runs of equal scores
end, and how many of sorted values are above some level.

How many relevant items there are up to some place is kept as one bit a place and, for each 32 places, the number of
bits up to their end: small enough to stay in the cache, where what binds otherwise is reading and writing at random.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**31 - 1)  # beyond any place: torch sorts no longer list


@triton.jit
def block_of(n, BLOCK: tl.constexpr):
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
def pack(flags, bits, ones, first, words, BLOCK: tl.constexpr):
    """Write a block of flags as bits, and how many are set in each word."""
    lanes = tl.reshape(flags, [BLOCK // 32, 32]).to(tl.int64) << tl.arange(0, 32)[None, :]
    word = tl.sum(lanes, 1).to(tl.uint32)
    at = first // 32 + tl.arange(0, BLOCK // 32)
    tl.store(bits + at, word.to(tl.int32, bitcast=True), mask=at < words)
    tl.store(ones + at, _ones(word), mask=at < words)


@triton.jit
def bit(bits, at, inside):
    word = tl.load(bits + at // 32, mask=inside, other=0)
    return inside & (((word >> (at % 32).to(tl.int32)) & 1) != 0)


@triton.jit
def up_to(bits, totals, at, inside):
    """How many bits are set at the places up to and with ``at`` (0 if it is before the first)."""
    inside = inside & (at >= 0)
    word = tl.load(bits + at // 32, mask=inside, other=0).to(tl.uint32, bitcast=True)
    later = (word >> (at % 32).to(tl.uint32)) >> 1
    return tl.load(totals + at // 32, mask=inside, other=0) - _ones(later)


@triton.jit
def others_up_to(bits, totals, apart, at, inside, MASKED: tl.constexpr):
    """How many irrelevant items there are up to and with a place: the rest or, if items are missing, as counted."""
    if MASKED:
        return up_to(bits + apart, totals + apart, at, inside)
    return tl.where(inside, at + 1 - up_to(bits, totals, at, inside), 0)


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
def run_ends(values, at, inside, value, n):
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
def run_starts(values, at, inside, value):
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


# -------------------------------------------------------------------- how many are above a level


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
def better_than_block(values, count, levels, rise, first, end, level, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`_better` for a block of sorted levels, all risen: first for its ends, then between them."""
    ends = tl.load(levels + tl.where(tl.arange(0, 2) == 0, first, end - 1)) + rise
    zero = tl.zeros([2], tl.int32)
    found = _better(values, ends, zero, zero + count, count, TIES)
    low, high = tl.min(found), tl.max(found)
    zero = tl.zeros([BLOCK], tl.int32)
    return _better(values, level, zero + low, zero + high, high - low, TIES)
