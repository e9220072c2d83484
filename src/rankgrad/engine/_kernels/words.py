"""What all Triton kernels share: how arguments and items are read, and relevant items as sortable 64-bit words.

A word is a score's 32-bit key above the item's 32-bit index: smaller words are better items, ties by index.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

#: Numbers kept of each long list, int64: relevant items, existing items, NaN seen, programs come to the first and the
#: second sort's barrier.
STATE = tl.constexpr(5)
#: Larger than the word of any item.
NO_WORD = tl.constexpr((1 << 63) - 1)
#: How a reach is given (``rankgrad.engine.request.REACHES``): a lambda, a window, or a share of the spread.
LAM = tl.constexpr(0)
SHARE = tl.constexpr(2)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def span(block, BLOCK: tl.constexpr):
    """The 64-bit offsets of a block of items."""
    return block * tl.full([], BLOCK, tl.int64) + tl.arange(0, BLOCK)


@triton.jit
def blocks_of(n, BLOCK: tl.constexpr):
    """How many blocks n >= 1 items are; tl.cdiv adds before it divides, which overflows just below 2^31."""
    return (n - 1) // BLOCK + 1


# ------------------------------------------------------------------------------ numbers of a request


@triton.jit
def as_float64(bits):
    """A float64 argument that came as the bits of its negative; see ``triton_arguments.bits``."""
    return -(tl.full([], 0, tl.int64) + bits).to(tl.float64, bitcast=True)


@triton.jit
def half_margin(half_bits, spread, call, MARGIN_SHARE: tl.constexpr):
    """fl(margin / 2); a margin may be a share of the call's spread."""
    half = as_float64(half_bits)
    if MARGIN_SHARE:
        half = half * tl.load(spread + call)
    return half.to(tl.float32)


@triton.jit
def strength_of(reach_bits, spread, call, REACH: tl.constexpr):
    """Lambda or the window, float64; a share of the spread is rounded to float32."""
    strength = as_float64(reach_bits)
    if REACH == SHARE:
        strength = (strength * tl.load(spread + call)).to(tl.float32).to(tl.float64)
    return strength


@triton.jit
def divisor_of(strength, items, lists, REACH: tl.constexpr):
    """What a list's gradient is divided by: lambda times its items, or the window times the lists that count."""
    if REACH == LAM:
        return strength * tl.maximum(items, 1).to(tl.float64)
    else:
        return strength * tl.maximum(lists, 1).to(tl.float64)


@triton.jit
def factor_of(divisor, nan, SCALED: tl.constexpr):
    """What a sweep multiplies a list's gradient by: if SCALED what ``scale_changes`` does for ones, else 1."""
    if SCALED:
        factor = tl.minimum(1.0 / divisor, LARGEST)
        return tl.where(nan, float("nan"), factor).to(tl.float32)
    else:
        return tl.full([], 1.0, tl.float32)


@triton.jit
def times(bits, factor):
    """A float32 given by its bits times a factor, as bits."""
    return (bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)


# ------------------------------------------------------------------------------------------- items


@triton.jit
def make_word(value, index):
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 ties with 0.0
    bits = value.to(tl.int32, bitcast=True)
    ascending = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return ((~ascending).to(tl.int64) << 32) | index.to(tl.int64)


@triton.jit
def score_of(word):
    ascending = ~(word >> 32).to(tl.int32)
    bits = tl.where(ascending >= 0, ascending, ascending ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def index_of(word):
    return word & 0xFFFFFFFF


@triton.jit
def fetch_items(scores, relevance, mask, at, inside, MASKED: tl.constexpr):
    """Scores, relevance and mask of items as they are stored; 0 for those outside."""
    exists = inside.to(tl.int8)
    if MASKED:
        exists = tl.load(mask + at, mask=inside, other=0)
    return tl.load(scores + at, mask=inside, other=0.0), tl.load(relevance + at, mask=inside, other=0), exists


@triton.jit
def split_items(score, grade, exists, half):
    """Shifted scores of items, and which are relevant and irrelevant (neither: masked or outside).

    Relevance that is neither 0 nor 1 makes the score NaN, and so the loss: a GPU does not wait to raise.
    """
    relevant = (exists != 0) & (grade != 0)
    irrelevant = (exists != 0) & (grade == 0)
    value = tl.where((grade != 0) & (grade != 1), float("nan"), score.to(tl.float32))
    return value + tl.where(relevant, -half, half), relevant, irrelevant


@triton.jit
def read_items(scores, relevance, mask, at, inside, half, MASKED: tl.constexpr):
    """:func:`split_items` of items that are fetched here."""
    score, grade, exists = fetch_items(scores, relevance, mask, at, inside, MASKED)
    return split_items(score, grade, exists, half)
