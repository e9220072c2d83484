"""Relevant items as 64-bit words, and how words are sorted: what all Numba kernels of the CPU engine share.

A relevant item is one 64-bit word: its score as a 32-bit key that sorts best first, and below it the item's
index, so that sorting words is ranking with ties by index.

Scores are float32, or 16-bit patterns with a table of their values (``decode``). Functions run over one list, or
over chunk number ``chunk`` of ``chunks`` of its length. They hold no lock of the interpreter: the engine runs
chunks, or lists, in threads of its own. (Not Numba's: its OpenMP would change torch's number of threads.)

Loops that shall become vectors run over slices, from 0 to their length: an index like ``start + i`` might be
negative for all the compiler knows, which Python counts from the end, and it would go item by item.
"""

# mypy: ignore-errors
import hashlib
from pathlib import Path

import numba
import numpy as np
from numba.core import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload

INSERTION_SORT = 24  # shorter than this, a plain insertion sort beats counting digits

#: Numba keys what it keeps compiled by the file of a function, and would not see a change of what it calls elsewhere.
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*_cpu.py"))))


class _Cache(FunctionCache):
    def _index_key(self, sig, codegen):
        return (*super()._index_key(sig, codegen), _SOURCES.hexdigest())


def compiled(fn=None, **options):
    """Compile when first called, and keep it for other processes."""
    if fn is None:
        return lambda fn: compiled(fn, **options)
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(fn)
    dispatcher._cache = _Cache(fn)
    return dispatcher


@intrinsic
def _bits32(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), codegen


@intrinsic
def _float32(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), codegen


def read_score(scores, decode, at):
    """One score as a number of the compute dtype; half precision comes as 16 bits and a table of their values."""
    raise NotImplementedError


@overload(read_score, inline="always")
def _read_score(scores, decode, at):
    if scores.dtype == types.uint16:
        return lambda scores, decode, at: decode[scores[at]]
    return lambda scores, decode, at: scores[at]


@numba.njit(inline="always")
def word_of(value, index):
    """A float32 score and an index as one word; smaller words are better items."""
    bits = _bits32(np.float32(value) + np.float32(0.0))  # -0.0 becomes 0.0
    key = bits if bits & np.uint32(0x80000000) else ~bits & np.uint32(0x7FFFFFFF)
    return (np.uint64(key) << np.uint64(32)) | np.uint64(index)


@numba.njit(inline="always")
def score_of(word):
    key = np.uint32(word >> np.uint64(32))
    return _float32(key if key & np.uint32(0x80000000) else ~key & np.uint32(0x7FFFFFFF))


@numba.njit(inline="always")
def index_of(word):
    return np.int64(word & np.uint64(0xFFFFFFFF))


@compiled
def bounds(n, chunk, chunks):
    """Where a chunk of ``n`` items starts and ends."""
    return n * chunk // chunks, n * (chunk + 1) // chunks


# ------------------------------------------------------------------------------------------- sorting


@compiled
def count_digits(words, shift, counts, chunk):
    """How often each digit occurs in a chunk; ``counts`` is ``[chunks, 256]``."""
    count = counts[chunk]
    count[:] = 0
    low, high = bounds(len(words), chunk, len(counts))
    for i in range(low, high):
        count[(words[i] >> shift) & np.uint64(255)] += 1


@compiled
def start_digits(counts, n):
    """Turn counts into where each chunk puts its first word of each digit; False if all digits are the same."""
    total, constant = 0, False
    for value in range(256):
        before = total
        for chunk in range(len(counts)):
            counts[chunk, value], total = total, total + counts[chunk, value]
        constant |= total - before == n
    return not constant


@compiled
def move_by_digit(source, target, shift, starts, chunk):
    """Put the words of a chunk in order of the digit, stable."""
    at = starts[chunk]
    low, high = bounds(len(source), chunk, len(starts))
    for i in range(low, high):
        value = (source[i] >> shift) & np.uint64(255)
        target[at[value]] = source[i]
        at[value] += 1


@compiled
def order_ties(words):
    """Equal keys by index, which the order they came in need not be."""
    start = 0
    for i in range(1, len(words) + 1):
        if i == len(words) or (words[i] ^ words[start]) >> np.uint64(32):
            for at in range(start + 1, i):
                if words[at] < words[at - 1]:
                    words[start:i].sort()
                    break
            start = i


@compiled
def sort_words(words, spare):
    """Sort words, best first; ``spare`` is as long and is overwritten."""
    n = len(words)
    if n <= INSERTION_SORT:
        for i in range(1, n):
            word, at = words[i], i
            while at > 0 and words[at - 1] > word:
                words[at] = words[at - 1]
                at -= 1
            words[at] = word
        return
    source, target, swapped = words, spare, False
    counts = np.empty((1, 256), np.int64)
    for digit in range(4):
        shift = np.uint64(32 + 8 * digit)
        count_digits(source, shift, counts, 0)
        if start_digits(counts, n):
            move_by_digit(source, target, shift, counts, 0)
            source, target, swapped = target, source, not swapped
    if swapped:
        words[:] = source
    order_ties(words)
