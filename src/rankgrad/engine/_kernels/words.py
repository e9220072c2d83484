"""What all Triton kernels share: how scores are read, and relevant items as sortable 64-bit words.

A word is a score's 32-bit key above the item's 32-bit index: smaller words are better items, ties by index.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

#: Larger than the word of any item.
#: Numbers kept of each long list, int64: relevant items, existing items, NaN seen, programs come to the first and the
#: second sort's barrier.
STATE = tl.constexpr(5)
NO_WORD = tl.constexpr((1 << 63) - 1)


@triton.jit
def span(block, BLOCK: tl.constexpr):
    """The 64-bit offsets of a block of items."""
    return block * tl.full([], BLOCK, tl.int64) + tl.arange(0, BLOCK)


@triton.jit
def as_float64(bits):
    """A float64 argument that came as its bits: Triton would pass it as float32."""
    return (tl.full([], 0, tl.int64) + bits).to(tl.float64, bitcast=True)


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
def read_items(scores, relevance, mask, at, inside, half, MASKED: tl.constexpr):
    """Shifted scores of items, and which are relevant and irrelevant (neither: masked or outside)."""
    exists = inside
    if MASKED:
        exists = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
    relevant = exists & (tl.load(relevance + at, mask=inside, other=0) != 0)
    irrelevant = exists & ~relevant
    value = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
    return value + tl.where(relevant, -half, half), relevant, irrelevant


@triton.jit
def item_terms(form: tl.constexpr, weights, n_weights, above, own):
    """Loss and slope of relevant items in float64; the formulas of ``rankgrad.engine.forms``."""
    c = above.to(tl.float64)
    rank = own.to(tl.float64) + c
    if form == 0:
        value = c / rank
        slope = own.to(tl.float64) / (rank * rank)
    elif form == 1:
        value = tl.log(rank / own.to(tl.float64))
        slope = 1 / rank
    elif form == 2:
        value = tl.log(1 + c)
        slope = 1 / (1 + c)
    elif form == 3:
        inner = tl.log(1 + c)
        value = tl.log(1 + inner)
        slope = 1 / ((1 + c) * (1 + inner))
    else:
        at = tl.minimum(above, n_weights - 1)
        value = tl.load(weights + at)
        slope = tl.load(weights + n_weights + at)
    return value, slope
