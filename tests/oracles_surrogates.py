"""The rivals' definitions in loops over Python numbers, one list at a time. Imports nothing from the package.

``exists`` is a list of bools; items that do not exist are left out before anything else is done.
"""

import itertools

import numpy as np


def kept(scores, relevance, mask):
    """Existing items as (scores, relevance, their indices)."""
    index = [k for k in range(len(scores)) if mask is None or mask[k]]
    return [float(scores[k]) for k in index], [bool(relevance[k]) for k in index], index


def spread(values, index, n):
    """Back into a list of n items, 0 for those that do not exist."""
    out = np.zeros(n)
    for value, k in zip(values, index, strict=True):
        out[k] = value
    return out


# ----------------------------------------------------------------------------------------------- FastAP


def pulses(score, bins, low, high):
    """Share of one score at every edge, from the highest edge down."""
    width = (high - low) / bins
    score = min(max(score, low), high)
    return [max(0.0, 1 - abs(score - (high - j * width)) / width) for j in range(bins + 1)]


def fastap(scores, relevance, mask=None, bins=10, low=-1.0, high=1.0):
    """Loss of one list."""
    s, r, _ = kept(scores, relevance, mask)
    if not any(r):
        return 0.0
    total, positive_sum, all_sum = 0.0, 0.0, 0.0
    for j in range(bins + 1):
        share = [pulses(v, bins, low, high)[j] for v in s]
        positive = sum(d for d, hit in zip(share, r, strict=True) if hit)
        positive_sum, all_sum = positive_sum + positive, all_sum + sum(share)
        if all_sum > 0:
            total += positive * positive_sum / all_sum
    return 1 - total / sum(r)


def fastap_ranks(scores, mask=None, bins=10, low=-1.0, high=1.0):
    s, _, index = kept(scores, scores, mask)
    upto = np.cumsum([sum(pulses(v, bins, low, high)[j] for v in s) for j in range(bins + 1)])
    ranks = [sum(d * h for d, h in zip(pulses(v, bins, low, high), upto, strict=True)) for v in s]
    out = np.full(len(scores), len(s) + 1.0)
    out[index] = ranks
    return out
