"""Numba kernels of the CPU engine: sort the p relevant scores, stream the n others against them, twice.

A relevant item is one 64-bit word: its score as a 32-bit key that sorts best first, and below it the item's
index, so that sorting words is ranking with ties by index. The rank of the item in slot ``m`` of the sorted words
among the relevant items is ``m + 1``. An irrelevant item j is placed by ``k[j]``, the number of relevant
scores strictly above it (irrelevant items win ties); a histogram of k then gives, by prefix sums, how many
irrelevant items stand at or above each slot.

To find ``k[j]`` without a binary search, the range of the relevant scores is cut into uniform cells with a table
of how many relevant scores lie in better cells; only inside a cell is there anything to compare.

Scores are float32, or 16-bit patterns with a table of their values (``decode``). Functions run over one list, or
over chunk number ``chunk`` of ``chunks`` of its length. They hold no lock of the interpreter: the engine runs
chunks, or rows, in threads of its own. (Not Numba's: its OpenMP would change torch's number of threads.)

Loops that shall become vectors run over slices, from 0 to their length: an index like ``start + i`` might be
negative for all the compiler knows, which Python counts from the end, and it would go item by item.
"""

# mypy: ignore-errors
import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic, overload

INSERTION_SORT = 24  # shorter than this, a plain insertion sort beats counting digits
BLOCK = 1024  # items placed at a time
GLANCE = 32  # items in which a relevant one is looked for at once
CELLS = 64  # per relevant score: where a cell is empty, which is nearly everywhere, there is nothing to compare
FEWER_CELLS = 32  # per relevant score, where the table is larger than the nearest caches anyway
MANY_CELLS, MOST_CELLS = 1 << 20, 1 << 22
TWO_HISTOGRAMS = 1 << 12  # places; with more of them equal neighbours are rare, and memory counts
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


_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def bounds(n, chunk, chunks):
    """Where a chunk of ``n`` items starts and ends."""
    return n * chunk // chunks, n * (chunk + 1) // chunks


# ------------------------------------------------------------------------------------------- sorting


@_compiled
def count_digits(words, shift, counts, chunk):
    """How often each digit occurs in a chunk; ``counts`` is ``[chunks, 256]``."""
    count = counts[chunk]
    count[:] = 0
    low, high = bounds(len(words), chunk, len(counts))
    for i in range(low, high):
        count[(words[i] >> shift) & np.uint64(255)] += 1


@_compiled
def start_digits(counts, n):
    """Turn counts into where each chunk puts its first word of each digit; False if all digits are the same."""
    total, constant = 0, False
    for value in range(256):
        before = total
        for chunk in range(len(counts)):
            counts[chunk, value], total = total, total + counts[chunk, value]
        constant |= total - before == n
    return not constant


@_compiled
def move_by_digit(source, target, shift, starts, chunk):
    """Put the words of a chunk in order of the digit, stable."""
    at = starts[chunk]
    low, high = bounds(len(source), chunk, len(starts))
    for i in range(low, high):
        value = (source[i] >> shift) & np.uint64(255)
        target[at[value]] = source[i]
        at[value] += 1


@_compiled
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


@_compiled
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
    if high - low > LINEAR_SEARCH:  # a crowded cell is often one of equal scores: then the ends say it all
        if not levels[low] > value:
            return low
        if levels[high - 1] > value:
            return high
    while high - low > LINEAR_SEARCH:
        middle = (low + high) // 2
        if levels[middle] > value:
            low = middle + 1
        else:
            high = middle
    while low < high and levels[low] > value:
        low += 1
    return low


@numba.njit(inline="always")
def better_up_to(entry):
    """How many relevant scores lie in better cells than one, from its entry in the table."""
    return entry if entry >= 0 else ~entry


@numba.njit
def make_table(levels, table):
    """Cells over the finite range of sorted scores; returns what is needed to find a cell.

    ``table`` says for each cell how many relevant scores lie in better ones: so many where it is empty, the
    complement (negative) where there is something to compare.
    """
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
        while at < cell:
            table[at] = m
            at += 1
        if at == cell:
            table[at] = ~m
            at += 1
    while at <= cells:
        table[at] = len(levels)
        at += 1
    return best, scale


# ------------------------------------------------------------------------------------- the two streams


@_compiled
def count_items(relevance, mask, masked, counts, chunk):
    """Relevant and existing items of a chunk into ``counts``, ``[chunks, 2]``."""
    relevant, items = 0, 0
    low, high = bounds(len(relevance), chunk, len(counts))
    flags, exist = relevance[low:high], mask[low:high]
    if masked:
        for i in range(len(flags)):
            relevant += flags[i] & exist[i]
        for i in range(len(exist)):
            items += exist[i]
    else:
        for i in range(len(flags)):
            relevant += flags[i]
        items = high - low
    counts[chunk, 0], counts[chunk, 1] = relevant, items


@_compiled
def lists_with_relevant(relevance, mask, masked, found):
    """Which rows have a relevant item; a row is read until the first."""
    for row in range(len(found)):
        found[row] = False
        for j in range(relevance.shape[1]):
            if relevance[row, j] and (not masked or mask[row, j]):
                found[row] = True
                break


@_compiled
def gather_words(scores, decode, relevance, mask, masked, half, counts, words, chunk):
    """Collect the relevant items of a chunk, in order of index."""
    at = counts[:chunk, 0].sum()
    low, high = bounds(len(relevance), chunk, len(counts))
    if counts[chunk, 0] * 16 > high - low and not masked:  # too many for the branch to be foreseen
        last = at + counts[chunk, 0] - 1
        for j in range(low, high):
            words[min(at, last)] = word_of(_read(scores, decode, j) - half, j) if at <= last else words[last]
            at += relevance[j]
        return
    for start in range(low, high, GLANCE):
        flags = relevance[start : min(start + GLANCE, high)]
        some = np.uint8(0)
        for i in range(len(flags)):
            some |= flags[i]
        if some:
            for j in range(start, start + len(flags)):
                if relevance[j] and (not masked or mask[j]):
                    words[at] = word_of(_read(scores, decode, j) - half, j)
                    at += 1


@_compiled
def stream(scores, decode, relevance, mask, masked, half, levels, table, best, scale, out, again, counts, chunk):
    """Place the irrelevant items of a chunk: count them at their place and, if ``out`` is given, write it there.

    The second time (``again``) ``out`` holds the first places and gets the difference. Returns whether a NaN was
    seen. ``counts`` is from :func:`no_counts`: two histograms in turn, so that equal neighbours do not wait for
    each other (or one, if there are many places), with a last bin for items that do not count.

    In blocks and in stages, because the compiler makes vectors of the plain loops, and the one branch that
    is hard to predict (is there anything to compare in this cell?) stands alone.
    """
    nowhere = table.dtype.type(counts.shape[2] - 1)
    last_cell = np.float32(len(table) - 2)
    even, odd = counts[chunk, 0], counts[chunk, counts.shape[1] - 1]
    first, end = bounds(len(relevance), chunk, len(counts))
    values, places = np.empty(BLOCK, np.float32), np.empty(BLOCK, table.dtype)
    bad = False
    for start in range(first, end, BLOCK):
        stop = min(start + BLOCK, end)
        size = stop - start
        here, flags, exist, into = scores[start:stop], relevance[start:stop], mask[start:stop], out[start:stop]
        for i in range(len(here)):
            values[i] = _read(here, decode, i) + half
            places[i] = cell_of(values[i], best, scale, last_cell)
        if masked:
            for i in range(len(exist)):
                bad |= (values[i] != values[i]) & (exist[i] != 0)
        else:
            for i in range(size):
                bad |= values[i] != values[i]
        for i in range(size):
            cell = np.uint32(places[i])
            place = table[cell]
            if place < 0:
                place = count_above(values[i], levels, ~place, better_up_to(table[cell + np.uint32(1)]))
            places[i] = place
        if again:
            for i in range(len(into)):
                into[i] = into[i] if flags[i] else places[i] - into[i]
            if masked:
                for i in range(len(into)):
                    into[i] = into[i] if exist[i] else 0
        else:
            for i in range(len(into)):
                into[i] = places[i]
        for i in range(len(flags)):
            places[i] = nowhere if flags[i] else places[i]
        if masked:
            for i in range(len(exist)):
                places[i] = places[i] if exist[i] else nowhere
        for i in range(0, size - 1, 2):
            even[places[i]] += 1
            odd[places[i + 1]] += 1
        if size % 2:
            even[places[size - 1]] += 1
    return bad


@_compiled
def prepare(words, spare, n, out):
    """What :func:`stream` needs of sorted words: their scores, the table of cells and where cells lie."""
    p = len(words)
    levels = spare.view(np.float32)[:p]
    for m in range(p):
        levels[m] = score_of(words[m])
    cells = max(min(CELLS * p, MANY_CELLS), min(FEWER_CELLS * p, MOST_CELLS))
    table = np.empty(max(16, min(cells, max(4 * p, n))) + 1, out.dtype)
    best, scale = make_table(levels, table)
    return levels, table, best, scale


@_compiled
def no_counts(chunks, p, table):
    """Zeroed histograms over p + 1 places and one for what does not count, ``[chunks, 1 or 2, p + 2]``."""
    return np.zeros((chunks, 2 if p < TWO_HISTOGRAMS else 1, p + 2), table.dtype)


@_compiled
def sum_counts(counts):
    """Irrelevant items at or above each slot (and, last, how many there are): prefix sums of all counts."""
    total = 0
    for k in range(counts.shape[2] - 1):
        for chunk in range(len(counts)):
            for histogram in range(counts.shape[1]):
                total += counts[chunk, histogram, k]
        counts[0, 0, k] = total
    return counts[0, 0]


@_compiled
def lift(words, above, steps, out):
    """Raise each slot's score by its step; ``out`` keeps the rank it had."""
    for m in range(len(words)):
        index = index_of(words[m])
        out[index] = m + 1 + above[m]
        words[m] = word_of(score_of(words[m]) + steps[m], index)


@_compiled
def settle(words, above, out):
    """Rank changes of the relevant items: the rank they have now, minus the one ``out`` kept."""
    for m in range(len(words)):
        index = index_of(words[m])
        out[index] = m + 1 + above[m] - out[index]


# ------------------------------------------------------------------- many relevant items: merge, do not search


@_compiled
def gather_others(scores, decode, relevance, mask, masked, half, counts, words, out, chunk):
    """Collect the irrelevant items of a chunk as words, in order of index; returns whether a NaN was seen."""
    low, high = bounds(len(relevance), chunk, len(counts))
    at = (counts[:chunk, 1] - counts[:chunk, 0]).sum()
    last = at + counts[chunk, 1] - counts[chunk, 0] - 1
    bad = False
    for j in range(low, high):
        value = _read(scores, decode, j)
        exists = not masked or mask[j] != 0
        bad |= exists and value != value
        if at <= last:
            words[at] = word_of(value + half, j)
        at += exists and not relevance[j]
        if masked and not exists and len(out):
            out[j] = 0
    return bad


@_compiled
def merge(words, others, out, again, above, chunk, chunks):
    """Walk down a chunk of the sorted irrelevant items beside the sorted relevant ones: places and counts.

    ``out`` as in :func:`stream`; ``above`` gets the irrelevant items at or above each slot passed on the way.
    """
    low, high = bounds(len(others), chunk, chunks)
    m, end = 0, len(words)
    if low > 0:  # what the chunk before has passed at its last item
        while m < end:
            middle = (m + end) // 2
            if words[middle] >> np.uint64(32) < others[low - 1] >> np.uint64(32):
                m = middle + 1
            else:
                end = middle
    for i in range(low, high):
        key = others[i] >> np.uint64(32)
        while m < len(words) and words[m] >> np.uint64(32) < key:
            above[m] = i
            m += 1
        if len(out):
            j = index_of(others[i])
            out[j] = m - out[j] if again else m
    if chunk == chunks - 1:
        for slot in range(m, len(words)):
            above[slot] = len(others)


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
def _place_all(scores, decode, relevance, mask, masked, half, words, spare, out, again):
    levels, table, best, scale = prepare(words, spare, len(relevance), out)
    counts = no_counts(1, len(words), table)
    nan = stream(scores, decode, relevance, mask, masked, half, levels, table, best, scale, out, again, counts, 0)
    return sum_counts(counts), nan


@_compiled
def one_list(scores, decode, relevance, mask, masked, half, form, weights, lam, lists, out):
    """Loss of a list; ``out`` (empty, or of the list's length) gets its rank changes. NaN if a score is."""
    counts = np.empty((1, 2), np.int64)
    count_items(relevance, mask, masked, counts, 0)
    p, items = counts[0, 0], counts[0, 1]
    words, spare = np.empty(p, np.uint64), np.empty(max(p, 1), np.uint64)
    gather_words(scores, decode, relevance, mask, masked, half, counts, words, 0)
    sort_words(words, spare)
    above, nan = _place_all(scores, decode, relevance, mask, masked, half, words, spare, out, False)
    steps = np.empty(p, np.float32)
    loss = terms(form, weights, above, lam * items / max(lists, 1) / max(p, 1), steps)
    if nan:
        return np.nan
    if len(out):
        if p == 0:
            out[:] = 0
            return loss
        lift(words, above, steps, out)
        sort_words(words, spare)
        above, _ = _place_all(scores, decode, relevance, mask, masked, half, words, spare, out, True)
        settle(words, above, out)
    return loss


@_compiled
def some_lists(
    scores, decode, relevance, mask, masked, half, form, weights, lam, lists, out, losses, chunk, chunks
):
    """:func:`one_list` over a chunk of the rows; ``lists`` is the number that count for each row."""
    low, high = bounds(len(losses), chunk, chunks)
    for row in range(low, high):
        losses[row] = one_list(
            scores[row], decode, relevance[row], mask[row], masked, half, form, weights, lam, lists[row], out[row]
        )
