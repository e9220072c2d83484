"""The baselines' definitions in loops over Python numbers, one list at a time. Imports nothing from the package.

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


# ------------------------------------------------------------------------------- AP-loss (Chen et al. 2019)


def chen2019(scores, relevance, mask=None, delta=1.0, interpolated=False):
    """(loss, error-driven gradient) of one list: Algorithm 1 with its loop over the positives."""
    s, r, index = kept(scores, relevance, mask)
    p = sum(r)
    if p == 0:
        return 0.0, np.zeros(len(scores))

    def step(x):
        if x < -delta:
            return 0.0
        return 1.0 if x > delta else x / (2 * delta) + 0.5

    gradient, loss, best = [0.0] * len(s), 0.0, 0.0
    for i in sorted((k for k in range(len(s)) if r[k]), key=lambda k: s[k]):
        rank = 1 + sum(step(s[k] - s[i]) for k in range(len(s)) if k != i)
        terms = {j: step(s[j] - s[i]) / rank for j in range(len(s)) if not r[j]}
        precision = 1 - sum(terms.values())
        if interpolated:
            if precision >= best:
                best = precision
            else:
                terms = {j: term * (1 - best) / (1 - precision) for j, term in terms.items()}
        for j, term in terms.items():
            gradient[i] -= term
            gradient[j] += term
        loss += sum(terms.values())
    return loss / p, spread([g / p for g in gradient], index, len(scores))


# --------------------------------------------------------------------------------------------- Smooth-AP


def sigmoid(x, temperature):
    x = x / temperature
    return 1 / (1 + np.exp(-x)) if x > -700 else 0.0


def smoothap(scores, relevance, mask=None, temperature=0.01):
    s, r, _ = kept(scores, relevance, mask)
    if not any(r):
        return 0.0
    total = 0.0
    for i in (k for k in range(len(s)) if r[k]):
        others = [j for j in range(len(s)) if j != i]
        own = 1 + sum(sigmoid(s[j] - s[i], temperature) for j in others if r[j])
        total += own / (1 + sum(sigmoid(s[j] - s[i], temperature) for j in others))
    return 1 - total / sum(r)


def smoothap_ranks(scores, mask=None, temperature=0.01):
    s, _, index = kept(scores, scores, mask)
    out = np.full(len(scores), len(s) + 1.0)
    for i, k in enumerate(index):
        out[k] = 1 + sum(sigmoid(s[j] - s[i], temperature) for j in range(len(s)) if j != i)
    return out


# ----------------------------------------------------------------------------------------------- SVM-MAP


def svm_map(scores, relevance, mask=None):
    """(hinge, gradients of all rankings that attain it) of one list, by trying every order of its items' kinds.

    Nothing is assumed about the maximum except that each kind is ordered by score; :func:`svm_map_all_orders` does
    without that.
    """
    s, r, index = kept(scores, relevance, mask)
    good = sorted((k for k in range(len(s)) if r[k]), key=lambda k: (-s[k], k))
    bad = sorted((k for k in range(len(s)) if not r[k]), key=lambda k: (-s[k], k))
    if not good or not bad:
        return 0.0, [np.zeros(len(scores))]
    found = []
    for where in itertools.combinations(range(len(s)), len(good)):
        ahead, behind = iter(good), iter(bad)
        order = [next(ahead) if t in where else next(behind) for t in range(len(s))]
        found.append(violation(order, s, r))
    best = max(value for value, _ in found)
    return best, [spread(g, index, len(scores)) for value, g in found if value >= best - 1e-12]


def svm_map_all_orders(scores, relevance):
    """The hinge of a short list over all n! rankings."""
    s, r = [float(v) for v in scores], [bool(v) for v in relevance]
    if not any(r) or all(r):
        return 0.0
    return max(violation(order, s, r)[0] for order in itertools.permutations(range(len(s))))


def violation(order, s, r):
    """1 - AP + F(order) - F(perfect) of one ranking, and its derivative with respect to the scores."""
    p = sum(r)
    pairs = p * (len(s) - p)
    hits, precision = 0, 0.0
    for place, k in enumerate(order, start=1):
        if r[k]:
            hits += 1
            precision += hits / place
    value, gradient = 1 - precision / p, [0.0] * len(s)
    for a, first in enumerate(order):
        for second in order[a + 1 :]:
            if r[second] and not r[first]:  # y_ij = -1 in this ranking, +1 in the perfect one
                value -= 2 * (s[second] - s[first]) / pairs
                gradient[second] -= 2 / pairs
                gradient[first] += 2 / pairs
    return value, gradient


# ------------------------------------------------------------------------------------------ permutahedron


def permutahedron_ranks(scores, mask=None, epsilon=1.0):
    """Blondel et al., Prop. 3: sort, pool adjacent violators with a stack, unsort. In long double."""
    s, _, index = kept(scores, scores, mask)
    n = len(s)
    order = sorted(range(n), key=lambda k: s[k])  # -s / epsilon, largest first
    z = [np.longdouble(-s[k] / epsilon) for k in order]
    blocks = []
    for k in range(n):
        blocks.append([z[k] - (n - k), 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] <= blocks[-1][0] / blocks[-1][1]:
            total, size = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += size
    fit = [total / size for total, size in blocks for _ in range(size)]
    out = np.full(len(scores), n + 1.0)
    for k in range(n):
        out[index[order[k]]] = z[k] - fit[k]
    return out


def ap_of_soft_ranks(scores, relevance, ranks, mask=None):
    """1 - mean of (exact rank among the relevant) / (soft rank)."""
    relevant = [k for k in range(len(scores)) if relevance[k] and (mask is None or mask[k])]
    if not relevant:
        return 0.0
    order = sorted(relevant, key=lambda k: (-scores[k], k))
    return 1 - sum(own / ranks[k] for own, k in enumerate(order, start=1)) / len(relevant)
