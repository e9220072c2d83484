"""Triton kernels that end an evaluation: one number from the lists' losses, and the gradient for what arrives."""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import LARGEST, blocks_of, span


@triton.jit
def reduce_losses(losses, lists, out, per_call, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum (or mean over the lists that count) of each call's list losses, always in the same order."""
    call = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, per_call, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(losses + call * per_call + at, mask=at < per_call, other=0.0)
    result = tl.sum(total)
    if MEAN:
        result = result / tl.maximum(tl.load(lists + call), 1).to(tl.float64)
    tl.store(out + call, result)


@triton.jit
def scale_changes(
    changes, upstream, losses, divisor, lists, out, n, per_call,
    REDUCTION: tl.constexpr, ONES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An answer's gradient times ``upstream / divisor``, rounded once to the dtype of ``out``.

    REDUCTION: 0 mean, 1 sum, 2 none. ONES: ``upstream`` is 1 everywhere. ``out`` may be the memory of ``changes``.
    """
    row = tl.program_id(0).to(tl.int64)
    call = row // per_call
    factor = tl.full([], 1.0, tl.float64)
    if not ONES:
        factor = tl.load(upstream + (row if REDUCTION == 2 else call)).to(tl.float64)
    if REDUCTION != 0:
        factor = factor * tl.load(lists + call).to(tl.float64)
    # Tiny scores have tiny divisors: the factor ends at the largest float32, unless what arrives is infinite already.
    most = tl.where(tl.abs(factor) < float("inf"), LARGEST, float("inf"))
    factor = factor / tl.load(divisor + row)
    factor = tl.where(factor > most, most, tl.where(factor < -most, -most, factor))
    loss = tl.load(losses + row)
    # a list whose loss is NaN must not send a harmless-looking gradient
    factor = tl.where(loss == loss, factor, float("nan")).to(tl.float32)
    for block in range(tl.program_id(1), blocks_of(n, BLOCK), tl.num_programs(1)):
        at = span(block, BLOCK)
        value = tl.load(changes + row * n + at, mask=at < n, other=0).to(tl.float32) * factor
        tl.store(out + row * n + at, value, mask=at < n)
