"""Numba kernels of the CPU engine: sort the p relevant scores, stream the n others against them, twice.

A relevant item is one 64-bit word: its score as a 32-bit key that sorts best first, and below it the item's
index, so that sorting words is ranking with ties by index. The rank of the item in slot ``m`` of the sorted words
among the relevant items is ``m + 1``. An irrelevant item j is placed by ``k[j]``, the number of relevant
scores strictly above it (irrelevant items win ties); a histogram of k then gives, by prefix sums, how many
irrelevant items stand at or above each slot.

To find ``k[j]`` without a binary search, the range of the relevant scores is cut into uniform cells with a table
of how many relevant scores lie in better cells; only inside a cell is there anything to compare.

Scores are float32, or 16-bit patterns with a table of their values (``decode``). Functions run over one list;
``chunks`` cut its length for the threads, and 1 chunk runs without any.
"""

# mypy: ignore-errors
import numba
import numpy as np
from numba import prange
from numba.core import types
from numba.extending import intrinsic, overload

INSERTION_SORT = 24  # shorter than this, a plain insertion sort beats counting digits
BLOCK = 1024  # items placed at a time
CELLS = 64  # per relevant score: where a cell is empty, which is nearly everywhere, there is nothing to compare
MOST_CELLS = 1 << 20  # a larger table would fall out of the cache
LINEAR_SEARCH = 8  # more relevant scores than this in one cell: search it by halves


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


def _read(scores, decode, at):
    """One score as a number of the compute dtype; half precision comes as 16 bits and a table of their values."""
    raise NotImplementedError


@overload(_read, inline="always")
def _read_overload(scores, decode, at):
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


# ------------------------------------------------------------------------------------------- sorting


def _sort(words, spare, chunks):
    """Sort words in place (radix by the 32 key bits, stable, then ties by index); ``spare`` is as long."""
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
    counts = np.empty((chunks, 256), np.int64)
    for digit in range(4):
        shift = np.uint64(32 + 8 * digit)
        for chunk in prange(chunks):
            count = counts[chunk]
            count[:] = 0
            for i in range(n * chunk // chunks, n * (chunk + 1) // chunks):
                count[(source[i] >> shift) & np.uint64(255)] += 1
        total, constant = 0, False
        for value in range(256):
            here = 0
            for chunk in range(chunks):
                here += counts[chunk, value]
                counts[chunk, value], total = total, total + counts[chunk, value]
            constant |= here == n
        if constant:
            continue
        for chunk in prange(chunks):
            at = counts[chunk]
            for i in range(n * chunk // chunks, n * (chunk + 1) // chunks):
                value = (source[i] >> shift) & np.uint64(255)
                target[at[value]] = source[i]
                at[value] += 1
        source, target, swapped = target, source, not swapped
    if swapped:
        words[:] = source
    start = 0
    for i in range(1, n + 1):  # equal keys: by index, which the order they came in need not be
        if i == n or (words[i] ^ words[start]) >> np.uint64(32):
            for at in range(start + 1, i):
                if words[at] < words[at - 1]:
                    words[start:i].sort()
                    break
            start = i


# ------------------------------------------------------------------------------------- placing items


@numba.njit(inline="always")
def cell_of(value, best, scale, last):
    """Which cell a score lies in; monotone (a better score never in a later cell), safe for inf and NaN."""
    at = (best - value) * scale
    at = at if at > np.float32(0) else np.float32(0)
    return np.int32(at if at < last else last)


@numba.njit(inline="always")
def count_above(value, levels, low, high):
    """How many of the sorted relevant scores are strictly above ``value``, known to be ``low`` to ``high``."""
    while high - low > LINEAR_SEARCH:
        middle = (low + high) // 2
        if levels[middle] > value:
            low = middle + 1
        else:
            high = middle
    while low < high and levels[low] > value:
        low += 1
    return low


@numba.njit
def make_table(levels, table):
    """Cells over the finite range of sorted scores; returns what :func:`count_above` needs to find a cell."""
    first, last = 0, len(levels) - 1
    while first <= last and np.isinf(levels[first]):
        first += 1
    while last >= first and np.isinf(levels[last]):
        last -= 1
    cells = len(table) - 1
    last_cell = np.float32(cells - 1)
    best, scale = np.float32(0), np.float32(0)
    if first <= last:
        best = levels[first]
        width = best - levels[last]
        if width > 0:
            scale = np.float32(cells) / width
            if np.isinf(scale):
                scale = np.float32(0)
    at = 0
    for m in range(len(levels)):
        cell = cell_of(levels[m], best, scale, last_cell)
        while at <= cell:
            table[at] = m
            at += 1
    while at <= cells:
        table[at] = len(levels)
        at += 1
    return best, scale


# ------------------------------------------------------------------------------------- the two streams


def _count(relevance, mask, masked, chunks):
    """Relevant items and existing items of each chunk."""
    n = len(relevance)
    counts = np.zeros((chunks, 2), np.int64)
    for chunk in prange(chunks):
        relevant, items = 0, 0
        low, high = n * chunk // chunks, n * (chunk + 1) // chunks
        if masked:
            for j in range(low, high):
                relevant += relevance[j] & mask[j]
                items += mask[j]
        else:
            for j in range(low, high):
                relevant += relevance[j]
            items = high - low
        counts[chunk, 0], counts[chunk, 1] = relevant, items
    return counts


def _gather(scores, decode, relevance, mask, masked, half, counts, words):
    """Collect the relevant items in order of index."""
    n, chunks = len(relevance), len(counts)
    for chunk in prange(chunks):
        at = counts[:chunk, 0].sum()
        for j in range(n * chunk // chunks, n * (chunk + 1) // chunks):
            if relevance[j] and (not masked or mask[j]):
                words[at] = word_of(_read(scores, decode, j) - half, j)
                at += 1


def _stream(scores, decode, relevance, mask, masked, half, levels, table, best, scale, out, again, counts):
    """Place every irrelevant item: count it at its place and, if ``out`` is given, write the place there.

    The second time (``again``) ``out`` holds the first places and gets the difference. Returns whether a NaN was
    seen. ``counts`` is ``[chunks, 2, p + 2]``, zeroed: two histograms in turn, so that equal neighbours do not
    wait for each other, with a last bin for items that do not count.

    In blocks and in stages, because the compiler makes vectors of the plain loops, and the one branch that
    is hard to predict (is there anything to compare in this cell?) stands alone.
    """
    n, chunks, nowhere = len(relevance), len(counts), np.int32(counts.shape[2] - 1)
    last_cell = np.float32(len(table) - 2)
    nan = np.zeros(chunks, np.bool_)
    for chunk in prange(chunks):
        even, odd = counts[chunk, 0], counts[chunk, 1]
        end = n * (chunk + 1) // chunks
        values, places = np.empty(BLOCK, np.float32), np.empty(BLOCK, table.dtype)
        bad = False
        for start in range(n * chunk // chunks, end, BLOCK):
            size = min(BLOCK, end - start)
            for i in range(size):
                values[i] = _read(scores, decode, start + i) + half
                places[i] = cell_of(values[i], best, scale, last_cell)
            if masked:
                for i in range(size):
                    bad |= (values[i] != values[i]) & (mask[start + i] != 0)
            else:
                for i in range(size):
                    bad |= values[i] != values[i]
            for i in range(size):
                cell = np.uint32(places[i])
                low, high = table[cell], table[cell + 1]
                if low != high:
                    low = count_above(values[i], levels, low, high)
                places[i] = low
            if len(out):
                if again:
                    for i in range(size):
                        out[start + i] = out[start + i] if relevance[start + i] else places[i] - out[start + i]
                    if masked:
                        for i in range(size):
                            out[start + i] = out[start + i] if mask[start + i] else 0
                else:
                    for i in range(size):
                        out[start + i] = places[i]
            for i in range(size):
                places[i] = nowhere if relevance[start + i] else places[i]
            if masked:
                for i in range(size):
                    places[i] = places[i] if mask[start + i] else nowhere
            for i in range(0, size - 1, 2):
                even[places[i]] += 1
                odd[places[i + 1]] += 1
            if size % 2:
                even[places[size - 1]] += 1
        nan[chunk] = bad
    return nan.any()


# ------------------------------------------------------------------------ sequential and parallel versions

_options = {"cache": True, "nogil": True, "error_model": "numpy"}
_compiled = numba.njit(**_options)
_threaded = numba.njit(parallel=True, **_options)
_sort_in_one, _sort_in_chunks = _compiled(_sort), _threaded(_sort)
_count_in_one, _count_in_chunks = _compiled(_count), _threaded(_count)
_gather_in_one, _gather_in_chunks = _compiled(_gather), _threaded(_gather)
_stream_in_one, _stream_in_chunks = _compiled(_stream), _threaded(_stream)


@_compiled
def place_all(scores, decode, relevance, mask, masked, half, words, spare, out, again, chunks):
    """Stream the list against sorted words.

    Returns how many irrelevant items stand at or above each slot (and, last, how many there are), and
    whether a NaN was seen. ``spare`` is overwritten.
    """
    p = len(words)
    levels = spare.view(np.float32)[:p]
    for m in range(p):
        levels[m] = score_of(words[m])
    cells = max(16, min(CELLS * p, max(4 * p, len(relevance)), MOST_CELLS))
    table = np.empty(cells + 1, out.dtype)
    best, scale = make_table(levels, table)
    counts = np.zeros((chunks, 2, p + 2), table.dtype)
    args = (scores, decode, relevance, mask, masked, half, levels, table, best, scale, out, again, counts)
    nan = _stream_in_one(*args) if chunks == 1 else _stream_in_chunks(*args)
    total = 0
    for k in range(p + 1):
        for chunk in range(chunks):
            total += counts[chunk, 0, k] + counts[chunk, 1, k]
        counts[0, 0, k] = total
    return counts[0, 0], nan


@_compiled
def sort_words(words, spare, chunks):
    """Sort words, best first."""
    if chunks == 1:
        _sort_in_one(words, spare, 1)
    else:
        _sort_in_chunks(words, spare, chunks)


@_compiled
def standing(scores, decode, relevance, mask, masked, half, out, chunks):
    """Step one for a list: its sorted words, the counts above each slot, existing items, whether a NaN was seen.

    ``out`` (empty, or of the list's length) gets the place of every irrelevant item, for step two.
    """
    counts = (
        _count_in_one(relevance, mask, masked, 1)
        if chunks == 1
        else _count_in_chunks(relevance, mask, masked, chunks)
    )
    p, items = counts[:, 0].sum(), counts[:, 1].sum()
    words, spare = np.empty(p, np.uint64), np.empty(max(p, 1), np.uint64)
    if chunks == 1:
        _gather_in_one(scores, decode, relevance, mask, masked, half, counts, words)
    else:
        _gather_in_chunks(scores, decode, relevance, mask, masked, half, counts, words)
    sort_words(words, spare, chunks)
    above, nan = place_all(scores, decode, relevance, mask, masked, half, words, spare, out, False, chunks)
    return words, spare, above, items, nan


@_compiled
def move(scores, decode, relevance, mask, masked, half, words, spare, above, steps, out, chunks):
    """Step two for a list: raise each slot's score by its step; ``out`` turns from places into rank changes."""
    for m in range(len(words)):
        index = index_of(words[m])
        out[index] = m + 1 + above[m]
        words[m] = word_of(score_of(words[m]) + steps[m], index)
    sort_words(words, spare, chunks)
    above, _ = place_all(scores, decode, relevance, mask, masked, half, words, spare, out, True, chunks)
    for m in range(len(words)):
        index = index_of(words[m])
        out[index] = m + 1 + above[m] - out[index]


# -------------------------------------------------------------------------------------- the named losses

AP, LOG_AP, LOG, LOGLOG, WEIGHTS = range(5)


@_compiled
def terms(form, weights, above, per_list, steps):
    """Loss of the list, and the score step of each slot; the formulas of :mod:`rankgrad.engine.forms`.

    ``weights`` are ``[2, K + 2]``: partial sums and weights, 0 before and after.
    """
    total, p = 0.0, len(steps)
    for m in range(p):
        c, own = float(above[m]), m + 1.0
        rank = own + c
        if form == AP:
            value, slope = c / rank, own / (rank * rank)
        elif form == LOG_AP:
            value, slope = np.log(rank / own), 1 / rank
        elif form == LOG:
            value, slope = np.log(1 + c), 1 / (1 + c)
        elif form == LOGLOG:
            inner = np.log(1 + c)
            value, slope = np.log(1 + inner), 1 / ((1 + c) * (1 + inner))
        else:
            at = min(above[m], weights.shape[1] - 1)
            value, slope = weights[0, at], weights[1, at]
        total += value
        steps[m] = per_list * slope
    return total / max(p, 1)


@_compiled
def one_list(scores, decode, relevance, mask, masked, half, form, weights, lam, lists, out, chunks):
    """Loss of a list; ``out`` (empty, or of the list's length) gets its rank changes. NaN if a score is."""
    words, spare, above, items, nan = standing(scores, decode, relevance, mask, masked, half, out, chunks)
    p = len(words)
    steps = np.empty(p, np.float32)
    loss = terms(form, weights, above, lam * items / max(lists, 1) / max(p, 1), steps)
    if nan:
        return np.nan
    if len(out):
        if p:
            move(scores, decode, relevance, mask, masked, half, words, spare, above, steps, out, chunks)
        else:
            out[:] = 0
    return loss


@_threaded
def many_lists(scores, decode, relevance, mask, masked, half, form, weights, lam, lists, out, losses):
    """:func:`one_list` over the rows, one row a thread; ``lists`` is the number that count for each row."""
    for row in prange(len(losses)):
        losses[row] = one_list(
            scores[row],
            decode,
            relevance[row],
            mask[row],
            masked,
            half,
            form,
            weights,
            lam,
            lists[row],
            out[row],
            1,
        )
