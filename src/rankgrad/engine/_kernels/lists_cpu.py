"""Whole lists on the CPU: sort the p relevant scores, stream the n others against them, move, and stream again."""

# mypy: ignore-errors
import math

import numpy as np

from rankgrad.engine._kernels.forms_cpu import slope_of, value_of
from rankgrad.engine._kernels.placing_cpu import (
    CHANGES,
    PLACES,
    SUMS,
    count_items,
    gather_words,
    no_counts,
    prepare,
    stream,
    sum_counts,
)
from rankgrad.engine._kernels.words_cpu import compiled, index_of, read_score, score_of, sort_words, word_of

# ----------------------------------------------------------------------------- between the two streams


@compiled
def list_loss(form, tables, above, p):
    """The loss of a list from the irrelevant items above each of its p slots."""
    total = 0.0
    for m in range(p):
        total += value_of(form, tables, above[m], m + 1.0)
    return total / max(p, 1)


@compiled
def lift(words, above, form, tables, per_list, out):
    """Raise each slot's score by its step, ``per_list`` times its slope; ``out`` keeps the rank it had."""
    for m in range(len(words)):
        index = index_of(words[m])
        out[index] = m + 1 + above[m]
        step = np.float32(per_list * slope_of(form, tables, above[m], m + 1.0))
        words[m] = word_of(score_of(words[m]) + step, index)


@compiled
def settle(words, above, out):
    """Rank changes of the relevant items: the rank they have now, minus the one ``out`` kept."""
    for m in range(len(words)):
        index = index_of(words[m])
        out[index] = m + 1 + above[m] - out[index]


@compiled
def lift_all(words, window):
    """Raise every slot's score by the window. They keep their order."""
    for m in range(len(words)):
        words[m] = word_of(score_of(words[m]) + window, index_of(words[m]))


@compiled
def sum_slopes(above, p, form, tables):
    """Prefix sums of the slopes as integers, in units of a power of two; and that unit.

    See :func:`rankgrad.engine.reference._window_gradient`: so all engines have the same bits.
    """
    top = 0.0
    for m in range(p):
        if above[m] > 0:
            top = max(top, abs(slope_of(form, tables, above[m], m + 1.0)))
    bits = 0
    while p >> bits:
        bits += 1
    exponent = 61 - bits - max(math.frexp(top)[1], -900)
    scale = math.ldexp(1.0, exponent)
    sums = np.empty(p + 1, np.int64)
    total = 0
    for m in range(p):
        sums[m] = total
        if above[m] > 0:
            total += np.int64(slope_of(form, tables, above[m], m + 1.0) * scale)
    sums[p] = total
    return sums, math.ldexp(1.0, -exponent)


@compiled
def settle_all(words, above, after, form, tables, floats):
    """The relevant items' own part: slope times the irrelevant items they passed."""
    p = len(words)
    for m in range(p):
        passed = above[m] - after[m]
        slope = slope_of(form, tables, above[m], m + 1.0) if above[m] > 0 else 0.0
        floats[index_of(words[m])] = np.float32(-(slope * passed) / p)


# -------------------------------------------------------------------------------------- many lists


@compiled
def place_all(row, words, spare, out, moved):
    """Irrelevant items at or above each slot, and whether a NaN was seen; what ``moved`` says is written to ``out``."""
    cells = prepare(words, spare, len(row[2]), out)
    counts = no_counts(1, len(words), cells[1])
    nan = stream(row, cells, out, moved, counts, 0)
    return sum_counts(counts), nan


@compiled
def sorted_words(row):
    """The relevant items of a list as sorted words, room as large, and how many items exist."""
    counts = np.empty((1, 2), np.int64)
    count_items(row[2], row[3], row[4], counts, 0)
    words, spare = np.empty(counts[0, 0], np.uint64), np.empty(max(counts[0, 0], 1), np.uint64)
    gather_words(row, counts, words, 0)
    sort_words(words, spare)
    return words, spare, counts[0, 1]


@compiled
def one_list(row, form, tables, by_window, strength, lists, out, floats, nothing):
    """Loss of a list; ``out`` (empty, or of the list's length) gets its gradient. NaN if a score is.

    ``nothing`` is an empty int64 array, made once: in short lists that counts. This is the one place where the order
    of the steps stands: for long lists ``rankgrad.engine.cpu`` runs it as Python with steps in chunks.
    """
    words, spare, items = sorted_words(row)
    p = len(words)
    above, nan = place_all(row, words, spare, out, (PLACES, nothing, 1.0, p, floats))
    if nan:
        return np.nan
    loss = list_loss(form, tables, above, p)
    if len(out) == 0:
        return loss
    if p == 0:
        out[:] = 0
    elif by_window:
        sums, unit = sum_slopes(above, p, form, tables)
        lift_all(words, np.float32(strength))
        after, _ = place_all(row, words, spare, out, (SUMS, sums, unit, p, floats))
        settle_all(words, above, after, form, tables, floats)
    else:
        lift(words, above, form, tables, strength * items / max(lists, 1) / p, out)
        sort_words(words, spare)
        after, _ = place_all(row, words, spare, out, (CHANGES, nothing, 1.0, p, floats))
        settle(words, after, out)
    return loss


@compiled
def share_of(offsets, chunk, chunks):
    """Which lists a thread takes: those that begin in its share of the items."""
    total = offsets[-1]
    low = np.searchsorted(offsets[:-1], total * chunk // chunks)
    high = np.searchsorted(offsets[:-1], total * (chunk + 1) // chunks)
    return low, len(offsets) - 1 if chunk == chunks - 1 else high


@compiled
def some_lists(
    lists, offsets, halves, form, tables, by_window, strengths, counting, out, floats, losses, chunk, chunks
):
    """:func:`one_list` over a thread's share of the lists.

    ``lists`` are scores, decode, relevance, mask and whether there is one, list behind list; ``halves``,
    ``strengths`` and ``counting`` (how many lists count) are given for each.
    """
    scores, decode, relevance, mask, masked = lists
    nothing = np.empty(0, np.int64)
    low, high = share_of(offsets, chunk, chunks)
    for at in range(low, high):
        part = slice(offsets[at], offsets[at + 1])
        row = (scores[part], decode, relevance[part], mask[part], masked, halves[at])
        losses[at] = one_list(
            row, form, tables, by_window, strengths[at], counting[at], out[part], floats[part], nothing
        )


@compiled
def some_standings(lists, offsets, halves, above, own, poison, chunk, chunks):
    """Where the relevant items stand, over a thread's share of the lists; see ``reference.standings``."""
    scores, decode, relevance, mask, masked = lists
    nothing = np.empty(0, np.int64)
    low, high = share_of(offsets, chunk, chunks)
    for at in range(low, high):
        start = offsets[at]
        part = slice(start, offsets[at + 1])
        row = (scores[part], decode, relevance[part], mask[part], masked, halves[at])
        words, spare, _ = sorted_words(row)
        moved = (PLACES, nothing, 1.0, len(words), np.empty(0, np.float32))
        found, nan = place_all(row, words, spare, np.empty(0, np.int32), moved)
        for m in range(len(words)):
            above[start + index_of(words[m])] = found[m]
            own[start + index_of(words[m])] = m + 1
        poison[at] = np.nan if nan else 0.0


@compiled
def lists_with_relevant(relevance, mask, masked, offsets, found):
    """Which lists have a relevant item; a list is read until the first."""
    for at in range(len(found)):
        found[at] = False
        for j in range(offsets[at], offsets[at + 1]):
            if relevance[j] and (not masked or mask[j]):
                found[at] = True
                break


# ------------------------------------------------------------------------------------------ spread


@compiled(fastmath={"reassoc", "nsz", "contract"})
def moments(scores, decode, mask, masked):
    """Count, mean, sum of squared deviations and largest absolute value of the finite existing scores."""
    count, total, largest = 0, 0.0, np.float32(0)
    for i in range(len(scores)):
        value = read_score(scores, decode, i)
        there = (value - value == 0) & (not masked or mask[i] != 0)
        value = value if there else np.float32(0)
        count += there
        total += np.float64(value)
        largest = max(largest, abs(value))
    mean = total / max(count, 1)
    squares = 0.0
    for i in range(len(scores)):
        value = read_score(scores, decode, i)
        there = (value - value == 0) & (not masked or mask[i] != 0)
        away = np.float64(value) - mean if there else 0.0
        squares += away * away
    return count, mean, squares, largest
