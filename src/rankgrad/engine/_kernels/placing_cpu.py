"""Where the irrelevant items of a list stand among the sorted relevant ones.

An irrelevant item j is placed by ``k[j]``, the number of relevant scores strictly above it (irrelevant items win
ties); a histogram of k then gives, by prefix sums, how many irrelevant items stand at or above each slot.

To find ``k[j]`` without a binary search, the range of the relevant scores is cut into uniform cells with a table
of how many relevant scores lie in better cells; only inside a cell is there anything to compare. A few relevant
scores are compared with every item instead, several items at a time.

Items are placed twice: before and after the relevant scores have moved. ``out`` gets the first places, and then what
becomes of them: the change of an item's rank, or (by a window) the sum of the slopes of the relevant items that
passed it, which is a difference of two of their prefix sums, ``sums``. These are integers, slopes in units of a power
of two: ``unit`` and ``p`` make numbers of them, float32 in ``floats``, the memory of ``out``.
"""

# mypy: ignore-errors
import numba
import numpy as np

from rankgrad.engine._kernels.words_cpu import bounds, compiled, index_of, read_score, score_of, word_of

BLOCK = 1024  # items placed at a time
GLANCE = 32  # items in which a relevant one is looked for at once
CELLS = 64  # per relevant score: where a cell is empty, which is nearly everywhere, there is nothing to compare
FEWER_CELLS = 32  # per relevant score, where the table is larger than the nearest caches anyway
MANY_CELLS, MOST_CELLS = 1 << 20, 1 << 22
TWO_HISTOGRAMS = 1 << 12  # places; with more of them equal neighbours are rare, and memory counts
FEW = 8  # relevant scores that every item is compared with, without cells
LINEAR_SEARCH = 8  # more relevant scores than this in one cell: search it by halves

#: What is written when items are placed: their places, how these changed, or sums of slopes.
PLACES, CHANGES, SUMS = range(3)


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


@compiled
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


@compiled
def gather_words(row, counts, words, chunk):
    """Collect the relevant items of a chunk, in order of index."""
    scores, decode, relevance, mask, masked, half = row
    at = counts[:chunk, 0].sum()
    low, high = bounds(len(relevance), chunk, len(counts))
    if counts[chunk, 0] * 16 > high - low and not masked:  # too many for the branch to be foreseen
        last = at + counts[chunk, 0] - 1
        for j in range(low, high):
            words[min(at, last)] = word_of(read_score(scores, decode, j) - half, j) if at <= last else words[last]
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
                    words[at] = word_of(read_score(scores, decode, j) - half, j)
                    at += 1


@compiled
def stream(row, cells, out, moved, counts, chunk):
    """Place the irrelevant items of a chunk: count them at their place and, if ``out`` is given, write there.

    Args:
        row: One list: scores, decode, relevance, mask, whether there is one, and half of the margin.
        cells: From :func:`prepare`.
        moved: What to write (:data:`PLACES`, ...), and for sums of slopes ``sums, unit, p, floats``.
        counts: From :func:`no_counts`: two histograms in turn, so that equal neighbours do not wait for each other (or
            one, if there are many places), with a last bin for items that do not count.

    Returns whether a NaN was seen.

    In blocks and in stages, because the compiler makes vectors of the plain loops, and the one branch that
    is hard to predict (is there anything to compare in this cell?) stands alone.
    """
    scores, decode, relevance, mask, masked, half = row
    levels, table, best, scale = cells
    mode, sums, unit, p, floats = moved
    nowhere = table.dtype.type(counts.shape[2] - 1)
    last_cell = np.float32(len(table) - 2)
    even, odd = counts[chunk, 0], counts[chunk, counts.shape[1] - 1]
    first, end = bounds(len(relevance), chunk, len(counts))
    room = min(BLOCK, end - first)
    values, places = np.empty(room, np.float32), np.empty(room, table.dtype)
    bad = False
    for start in range(first, end, BLOCK):
        stop = min(start + BLOCK, end)
        size = stop - start
        here, flags, exist, into = scores[start:stop], relevance[start:stop], mask[start:stop], out[start:stop]
        real = floats[start:stop]
        if len(table):
            for i in range(len(here)):
                values[i] = read_score(here, decode, i) + half
                places[i] = cell_of(values[i], best, scale, last_cell)
            for i in range(size):
                cell = np.uint32(places[i])
                place = table[cell]
                if place < 0:
                    place = count_above(values[i], levels, ~place, better_up_to(table[cell + np.uint32(1)]))
                places[i] = place
        else:
            for i in range(len(here)):
                values[i] = read_score(here, decode, i) + half
                places[i] = 0
            for m in range(len(levels)):
                level = levels[m]
                for i in range(size):
                    places[i] += level > values[i]
        if masked:
            for i in range(len(exist)):
                bad |= (values[i] != values[i]) & (exist[i] != 0)
        else:
            for i in range(size):
                bad |= values[i] != values[i]
        if mode == PLACES:
            for i in range(len(into)):
                into[i] = places[i]
        elif mode == CHANGES:
            for i in range(len(into)):
                into[i] = into[i] if flags[i] else places[i] - into[i]
            if masked:
                for i in range(len(into)):
                    into[i] = into[i] if exist[i] else 0
        else:
            for i in range(len(real)):
                passed = sums[np.uint32(places[i])] - sums[np.uint32(into[i])]
                real[i] = np.float32(np.float64(passed) * unit / p)
            if masked:
                for i in range(len(real)):
                    real[i] = real[i] if exist[i] else np.float32(0)
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


@compiled
def prepare(words, spare, n, out):
    """What :func:`stream` needs of sorted words: their scores, the table of cells and where cells lie."""
    p = len(words)
    levels = spare.view(np.float32)[:p]
    for m in range(p):
        levels[m] = score_of(words[m])
    if p <= FEW:
        return levels, np.empty(0, out.dtype), np.float32(0), np.float32(0)
    cells = max(min(CELLS * p, MANY_CELLS), min(FEWER_CELLS * p, MOST_CELLS))
    table = np.empty(max(16, min(cells, max(4 * p, n))) + 1, out.dtype)
    best, scale = make_table(levels, table)
    return levels, table, np.float32(best), np.float32(scale)


@compiled
def no_counts(chunks, p, table):
    """Zeroed histograms over p + 1 places and one for what does not count, ``[chunks, 1 or 2, p + 2]``."""
    return np.zeros((chunks, 2 if p < TWO_HISTOGRAMS else 1, p + 2), table.dtype)


@compiled
def sum_counts(counts):
    """Irrelevant items at or above each slot (and, last, how many there are): prefix sums of all counts."""
    total = 0
    for k in range(counts.shape[2] - 1):
        for chunk in range(len(counts)):
            for histogram in range(counts.shape[1]):
                total += counts[chunk, histogram, k]
        counts[0, 0, k] = total
    return counts[0, 0]


# ------------------------------------------------------------------- many relevant items: merge, do not search


@compiled
def gather_others(row, counts, words, out, chunk):
    """Collect the irrelevant items of a chunk as words, in order of index; returns whether a NaN was seen."""
    scores, decode, relevance, mask, masked, half = row
    low, high = bounds(len(relevance), chunk, len(counts))
    at = (counts[:chunk, 1] - counts[:chunk, 0]).sum()
    last = at + counts[chunk, 1] - counts[chunk, 0] - 1
    bad = False
    for j in range(low, high):
        value = read_score(scores, decode, j)
        exists = not masked or mask[j] != 0
        bad |= exists and value != value
        if at <= last:
            words[at] = word_of(value + half, j)
        at += exists and not relevance[j]
        if masked and not exists and len(out):
            out[j] = 0
    return bad


@compiled
def merge(words, others, out, moved, above, chunk, chunks):
    """Walk down a chunk of the sorted irrelevant items beside the sorted relevant ones: places and counts.

    ``out`` and ``moved`` as in :func:`stream`; ``above`` gets the irrelevant items at or above each slot passed on the way.
    """
    mode, sums, unit, p, floats = moved
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
            if mode == SUMS:
                floats[j] = np.float32(np.float64(sums[m] - sums[out[j]]) * unit / p)
            else:
                out[j] = m - out[j] if mode == CHANGES else m
    if chunk == chunks - 1:
        for slot in range(m, len(words)):
            above[slot] = len(others)
