"""The forms of ``rankgrad.engine.forms`` for Triton, by their number there, and slopes as integers.

A window's gradient is made of sums of slopes. In units of a power of two, as fine as p of them leave room for in 64
bits, slopes are integers: their sums have the same bits in any order, on every device.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def item_terms(form: tl.constexpr, tables, n_tables, above, own):
    """Loss and slope of relevant items in float64."""
    c = above.to(tl.float64)
    rank = own.to(tl.float64) + c
    if form == 0:  # ap
        value = c / rank
        slope = own.to(tl.float64) / (rank * rank)
    elif form == 1:  # log_ap
        value = tl.log(rank / own.to(tl.float64))
        slope = 1 / rank
    elif form == 2:  # log
        value = tl.log(1 + c)
        slope = 1 / (1 + c)
    elif form == 3:  # loglog
        inner = tl.log(1 + c)
        value = tl.log(1 + inner)
        slope = 1 / ((1 + c) * (1 + inner))
    else:  # tables
        at = tl.minimum(above, n_tables - 1)
        value = tl.load(tables + at)
        slope = tl.load(tables + n_tables + at)
    return value, slope


@triton.jit
def window_terms(form: tl.constexpr, tables, n_tables, above, own, in_use):
    """:func:`item_terms`, with slope 0 where nothing is above to be passed: it may be infinite there."""
    value, slope = item_terms(form, tables, n_tables, above, own)
    return value, tl.where(in_use & (above > 0), slope, 0.0)


@triton.jit
def _exponent(value):
    """The exponent of frexp: value = m 2^x with 0.5 <= m < 1; for what is no normal number, far out of the way."""
    return ((value.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def units(top, p):
    """How many units a slope of 1 has and the inverse, both powers of two, for p slopes up to ``top``."""
    exponent = 61 - _exponent(p.to(tl.float64)) - tl.maximum(_exponent(top), -900)
    return _power_of_two(exponent), _power_of_two(-exponent)


@triton.jit
def pushed(total, unit, p):
    """Gradient of an irrelevant item from a sum of slopes in units, as the bits of a float32."""
    return (total.to(tl.float64) * unit / p).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def pulled(slope, passed, p):
    """Gradient of a relevant item that passes so many irrelevant ones, as the bits of a float32."""
    return (-(slope * passed.to(tl.float64)) / p).to(tl.float32).to(tl.int32, bitcast=True)
