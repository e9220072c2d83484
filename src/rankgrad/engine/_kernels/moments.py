"""Triton kernels for the spread of scores: count, mean and squared deviations in one pass, always in the same order."""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import as_float64, blocks_of, span


@triton.jit
def part_moments(scores, mask, parts, size, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program's share of a call's scores: count, mean, squared deviations from it, largest |score|."""
    call = tl.program_id(0).to(tl.int64)
    count = tl.full([], 0.0, tl.float64)
    mean = tl.full([], 0.0, tl.float64)
    squares = tl.full([], 0.0, tl.float64)
    largest = tl.full([], 0.0, tl.float64)
    for block in range(tl.program_id(1), blocks_of(size, BLOCK), tl.num_programs(1)):
        at = span(block, BLOCK)
        inside = at < size
        value = tl.load(scores + call * size + at, mask=inside, other=0.0).to(tl.float32)
        counted = inside & (tl.abs(value) < float("inf"))  # neither infinite nor NaN
        if MASKED:
            counted = counted & (tl.load(mask + call * size + at, mask=inside, other=0) != 0)
        value = tl.where(counted, value, 0.0).to(tl.float64)
        here = tl.sum(counted.to(tl.int32)).to(tl.float64)
        middle = tl.sum(value) / tl.maximum(here, 1.0)
        apart = tl.where(counted, value - middle, 0.0)
        both = tl.maximum(count + here, 1.0)  # two parts become one as Chan et al. do it
        step = middle - mean
        squares += tl.sum(apart * apart) + step * step * count * here / both
        mean += step * here / both
        count += here
        largest = tl.maximum(largest, tl.max(tl.abs(value)))
    parts += (call * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(parts, count)
    tl.store(parts + 1, mean)
    tl.store(parts + 2, squares)
    tl.store(parts + 3, largest)


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
