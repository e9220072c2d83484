"""Triton kernels for the spread of scores: count, mean and squared deviations in one pass, always in the same order."""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import as_float64, blocks_of, span


@triton.jit
def _finite(scores, mask, at, size, MASKED: tl.constexpr):
    """Scores as float64, and which of them count: existing ones that are neither infinite nor NaN."""
    inside = at < size
    value = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    counted = inside & (tl.abs(value) < float("inf"))
    if MASKED:
        counted = counted & (tl.load(mask + at, mask=inside, other=0) != 0)
    return tl.where(counted, value, 0.0).to(tl.float64), counted


@triton.jit
def part_moments(scores, mask, parts, size, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program's share of a call's scores: count, mean, squared deviations from it, largest |score|.

    Every lane adds up by itself: warps do not wait for each other in a step. What is added are deviations from the mean
    of the first block that has any. If blocks are full, n / BLOCK of them, it lies within sqrt(n / BLOCK) standard
    deviations of the mean of all, and float64 has digits enough to take the difference back.
    """
    call = tl.program_id(0).to(tl.int64)
    scores += call * size
    mask += call * size
    first = tl.program_id(1).to(tl.int64)
    value, counted = _finite(scores, mask, span(first, BLOCK), size, MASKED)
    here = tl.sum(counted.to(tl.int32))
    while (here == 0) & (first * BLOCK < size):  # a block of masked or infinite scores says nothing
        first += tl.num_programs(1)
        value, counted = _finite(scores, mask, span(first, BLOCK), size, MASKED)
        here = tl.sum(counted.to(tl.int32))
    middle = tl.sum(value) / tl.maximum(here, 1).to(tl.float64)
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    largest = tl.zeros([BLOCK], tl.float64)
    for block in range(tl.program_id(1), blocks_of(size, BLOCK), tl.num_programs(1)):
        value, counted = _finite(scores, mask, span(block, BLOCK), size, MASKED)
        apart = tl.where(counted, value - middle, 0.0)
        count += counted.to(tl.int32)
        total += apart
        squares += apart * apart
        largest = tl.maximum(largest, tl.abs(value))
    many = tl.sum(count.to(tl.int64)).to(tl.float64)
    mean = tl.sum(total) / tl.maximum(many, 1.0)
    parts += (call * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(parts, many)
    tl.store(parts + 1, middle + mean)
    tl.store(parts + 2, tl.maximum(tl.sum(squares) - many * mean * mean, 0.0))
    tl.store(parts + 3, tl.max(largest))


@triton.jit(do_not_specialize=["least_bits", "tiny_bits", "equal_bits"])
def merge_moments(parts, out, spread, programs, least_bits, tiny_bits, equal_bits, BLOCK: tl.constexpr):
    """The moments of each call from its parts', and its spread with the floors of ``rankgrad.engine.spread``."""
    call = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < programs
    parts += (call * programs + at) * 4
    count = tl.load(parts, mask=inside, other=0.0)
    mean = tl.load(parts + 1, mask=inside, other=0.0)
    total = tl.sum(count)
    together = tl.sum(count * mean) / tl.maximum(total, 1.0)
    apart = mean - together
    squares = tl.sum(tl.load(parts + 2, mask=inside, other=0.0)) + tl.sum(count * apart * apart)
    largest = tl.max(tl.load(parts + 3, mask=inside, other=0.0))
    tl.store(out + call * 4, total)
    tl.store(out + call * 4 + 1, together)
    tl.store(out + call * 4 + 2, squares)
    tl.store(out + call * 4 + 3, largest)
    deviation = tl.sqrt(squares / tl.maximum(total, 1.0))
    least = tl.maximum(as_float64(least_bits) * largest, as_float64(tiny_bits))
    equal = deviation <= as_float64(equal_bits) * largest
    tl.store(spread + call, tl.where(equal, 1.0, tl.maximum(deviation, least)))
