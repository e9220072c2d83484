"""Slow and plain: what SPEC says, in loops over Python numbers. Imports nothing from the package.

Lists are 1-D NumPy arrays unless said otherwise. ``dtype`` is the compute dtype (float32 or float64); steps are
computed in float64 and rounded once to it.
"""

import itertools
import math

import numpy as np


def ranks(scores, ties="ordinal", mask=None):
    """Rank of every item, best = 1; missing items tie with each other behind all others."""
    n = len(scores)
    exists = [True] * n if mask is None else list(mask)

    def better(j, i):
        if exists[j] != exists[i]:
            return exists[j]
        return bool(exists[j] and scores[j] > scores[i])

    out = []
    for i in range(n):
        above = sum(better(j, i) for j in range(n))
        equal = [j for j in range(n) if not better(j, i) and not better(i, j)]
        if ties == "ordinal":
            out.append(above + 1 + sum(j < i for j in equal))
        elif ties == "min":
            out.append(above + 1)
        elif ties == "max":
            out.append(above + len(equal))
        else:
            out.append(above + (len(equal) + 1) / 2)
    return np.array(out, dtype=np.float64)


def rank_gradient(scores, g, lam, ties="ordinal", mask=None):
    """Algorithm 1 at the ranks of one list, lambda in the paper's units."""
    exists = np.ones(len(scores), bool) if mask is None else np.asarray(mask)
    lam_eff = lam * exists.sum()
    moved = scores + (lam_eff * np.where(exists, g, 0).astype(np.float64)).astype(scores.dtype)
    change = ranks(moved, ties, mask) - ranks(scores, ties, mask)
    return np.where(exists, change, 0) / lam_eff


def best_permutations(y):
    """All permutations pi (as rank vectors) that minimise y . pi, by trying every one."""
    values = {p: float(np.dot(y, p)) for p in itertools.permutations(range(1, len(y) + 1))}
    least = min(values.values())
    return [p for p, v in values.items() if v <= least + 1e-12]


def shift(scores, relevance, margin, dtype):
    half = dtype(margin / 2)
    return [
        dtype(dtype(s) - half) if r else dtype(dtype(s) + half) for s, r in zip(scores, relevance, strict=True)
    ]


def standing(y, relevance, exists, i):
    """(c, r+) of the relevant item i."""
    c = sum(bool(exists[j] and not relevance[j] and y[j] >= y[i]) for j in range(len(y)))
    own = 1 + sum(
        bool(exists[j] and relevance[j] and (y[j] > y[i] or (y[j] == y[i] and j < i))) for j in range(len(y))
    )
    return c, own


def weight_value(weight, c):
    """(W(c), W'(c)); ``weight`` is "log", "loglog", a list of weights, or a pair of functions."""
    if isinstance(weight, tuple):
        return weight[0](c), weight[1](c)
    if weight == "log":
        return math.log(1 + c), 1 / (1 + c)
    if weight == "loglog":
        return math.log(1 + math.log(1 + c)), 1 / ((1 + c) * (1 + math.log(1 + c)))
    return sum(weight[:c]), (weight[c - 1] if 1 <= c <= len(weight) else 0.0)


def item_value(form, c, own):
    """(loss, slope) of one relevant item."""
    r = own + c
    if form == "ap":
        return 1 - own / r, own / r**2
    if form == "log_ap":
        return math.log(r / own), 1 / r
    return weight_value(form, c)


def list_loss(scores, relevance, form, margin=0.0, mask=None, dtype=np.float64):
    """Loss of one list; 0 if nothing is relevant."""
    exists = np.ones(len(scores), bool) if mask is None else np.asarray(mask)
    y = shift(scores, relevance, margin, dtype)
    relevant = [i for i in range(len(y)) if relevance[i] and exists[i]]
    if not relevant:
        return 0.0
    return sum(item_value(form, *standing(y, relevance, exists, i))[0] for i in relevant) / len(relevant)


def counting_lists(relevance, mask=None):
    exists = np.ones(np.shape(relevance), bool) if mask is None else np.asarray(mask)
    return sum(bool((np.asarray(r, bool) & e).any()) for r, e in zip(relevance, exists, strict=True))


def mean_loss(scores, relevance, form, margin=0.0, mask=None, dtype=np.float64):
    """Mean over the rows of a matrix of lists that count."""
    total = sum(
        list_loss(s, r, form, margin, None if mask is None else mask[k], dtype)
        for k, (s, r) in enumerate(zip(scores, relevance, strict=True))
    )
    return total / max(counting_lists(relevance, mask), 1)


def rank_changes(scores, relevance, form, lam, lists, margin=0.0, mask=None, dtype=np.float64):
    """Integer rank change of every item of one list, by Algorithm 1 for the mean over ``lists`` lists."""
    n = len(scores)
    exists = np.ones(n, bool) if mask is None else np.asarray(mask)
    y = shift(scores, relevance, margin, dtype)
    relevant = [i for i in range(n) if relevance[i] and exists[i]]
    moved = list(y)
    for i in relevant:
        slope = item_value(form, *standing(y, relevance, exists, i))[1] / len(relevant)
        moved[i] = dtype(y[i] + dtype(lam * int(exists.sum()) / lists * slope))
    change = np.zeros(n, dtype=np.int64)
    for i in range(n):
        if not exists[i]:
            continue
        if relevance[i]:
            change[i] = sum(standing(moved, relevance, exists, i)) - sum(standing(y, relevance, exists, i))
        else:
            change[i] = sum(bool(moved[k] > y[i]) for k in relevant) - sum(bool(y[k] > y[i]) for k in relevant)
    return change


def mean_loss_gradient(scores, relevance, form, lam, margin=0.0, mask=None, dtype=np.float64):
    """Gradient of :func:`mean_loss` with respect to a matrix of scores, float64."""
    lists = counting_lists(relevance, mask)
    out = np.zeros(np.shape(scores))
    for k in range(len(scores)):
        exists = np.ones(len(scores[k]), bool) if mask is None else np.asarray(mask[k])
        if lists and exists.any():
            change = rank_changes(scores[k], relevance[k], form, lam, lists, margin, exists, dtype)
            out[k] = change / (lam * exists.sum())
    return out


def window_gradient(scores, relevance, form, window, margin=0.0, mask=None, dtype=np.float64):
    """Gradient of :func:`mean_loss` with a fixed score window, pair by pair."""
    lists = counting_lists(relevance, mask)
    out = np.zeros(np.shape(scores))
    for k in range(len(scores)):
        n = len(scores[k])
        exists = np.ones(n, bool) if mask is None else np.asarray(mask[k])
        y = shift(scores[k], relevance[k], margin, dtype)
        relevant = [i for i in range(n) if relevance[k][i] and exists[i]]
        for i in relevant:
            slope = item_value(form, *standing(y, relevance[k], exists, i))[1] / len(relevant) / lists
            for j in range(n):
                if exists[j] and not relevance[k][j] and y[i] <= y[j] < dtype(y[i] + dtype(window)):
                    out[k, i] -= slope / window
                    out[k, j] += slope / window
    return out


def spread(scores, mask=None, dtype=np.float64):
    """Standard deviation of the finite existing scores of a whole call, with its floors; 1 where all are equal."""
    exists = np.ones(np.shape(scores), bool) if mask is None else np.asarray(mask)
    values = [float(s) for s, e in zip(np.ravel(scores), np.ravel(exists), strict=True) if e and math.isfinite(s)]
    if len(set(values)) <= 1:
        return 1.0
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    return max(deviation, 1e-6 * max(abs(v) for v in values), float(np.finfo(dtype).tiny))


def windowed_rank_gradient(scores, slopes, window, lists, ties="ordinal", mask=None):
    """Gradient of a loss of all ranks: one raw lambda, window / max |slope|; ``slopes`` of the list's own loss."""
    exists = np.ones(len(scores), bool) if mask is None else np.asarray(mask)
    slopes = np.where(exists, slopes, 0.0)
    top = np.abs(slopes).max()
    if top == 0:
        return np.zeros(len(scores))
    raw = window / top
    change = ranks(scores + raw * slopes, ties, mask) - ranks(scores, ties, mask)
    return np.where(exists, change, 0) / raw / lists


def interpolation(y, g, lam):
    """The function whose gradient Algorithm 1 is, for frozen g, raw lambda and integer ranks."""
    moved = y + lam * g
    before, after = ranks(y), ranks(moved)
    return float(np.dot(g, after) - (np.dot(y, before) - np.dot(y, after)) / lam)


# ---------------------------------------------------------------------------------------------- metrics


def pessimistic_order(scores, gains, mask=None):
    """Indices of existing items, best score first; among ties the smaller gain first, then the index."""
    exists = [True] * len(scores) if mask is None else list(mask)
    return sorted((i for i in range(len(scores)) if exists[i]), key=lambda i: (-scores[i], gains[i], i))


def metric(name, scores, relevance, k=None, mask=None):
    """One list's metric, by walking down the list. None if nothing is relevant."""
    order = pessimistic_order(scores, relevance, mask)
    hits = [bool(relevance[i]) for i in order]
    p = sum(hits)
    if p == 0:
        return None
    found, precisions, irrelevant_above = 0, [], []
    for place, hit in enumerate(hits, start=1):
        if hit:
            found += 1
            precisions.append((place, found / place))
            irrelevant_above.append(place - found)
    return {
        "average_precision": lambda: sum(v for _, v in precisions) / p,
        "recall_at_k": lambda: float(any(hits[:k])),
        "refined_recall_at_k": lambda: sum(c < k for c in irrelevant_above) / p,
        "precision_at_k": lambda: sum(hits[:k]) / k,
        "map_at_r": lambda: sum(v for place, v in precisions if place <= p) / p,
        "reciprocal_rank": lambda: 1 / precisions[0][0],
    }[name]()


def ndcg(scores, relevance, k=None, gain="linear", mask=None):
    gains = [float(r) if gain == "linear" else 2.0**r - 1 for r in relevance]
    order = pessimistic_order(scores, gains, mask)
    value = sum(gains[i] / math.log2(1 + place) for place, i in enumerate(order[:k], start=1))
    best = sorted((gains[i] for i in order), reverse=True)
    ideal = sum(g / math.log2(1 + place) for place, g in enumerate(best[:k], start=1))
    return None if ideal == 0 else value / ideal


# ------------------------------------------------------------------------------------------- embeddings


def lists_of_a_batch(units, labels, items, memory):
    """Every query's lists: (query, candidates, relevance); a candidate is (row, number in the batch or None).

    ``memory``: rows, labels and items (-1: no item) of what is remembered. ``items`` None: a row is its own item.
    """
    lists = []
    for q in range(len(units)):
        fresh = [
            (units[j], labels[j], j)
            for j in range(len(units))
            if (j != q if items is None else items[j] != items[q])
        ]
        remembered = [
            (row, label, None) for row, label, item in memory if items is None or item == -1 or item != items[q]
        ]
        for kind in (fresh, remembered):
            lists.append((q, [(row, j) for row, _, j in kind], [bool(label == labels[q]) for _, label, _ in kind]))
    return lists


def embedding_loss(units, labels, form, *, lam=None, window=None, margin=0.0, items=None, memory=()):
    """Loss of a batch of rows of length one and its gradient with respect to them, list by list.

    Lists of fresh and of remembered candidates, each with its own n; one mean over all that count.
    """
    lists = [one for one in lists_of_a_batch(units, labels, items, memory) if any(one[2])]
    value, gradient = 0.0, np.zeros_like(units)
    for q, candidates, relevance in lists:
        scores = np.array([sum(a * b for a, b in zip(units[q], row, strict=True)) for row, _ in candidates])
        value += list_loss(scores, relevance, form, margin) / len(lists)
        if window is None:
            change = rank_changes(scores, relevance, form, lam, len(lists), margin)
            grads = change / (lam * len(scores))
        else:
            grads = window_gradient(scores[None], [relevance], form, window, margin)[0] / len(lists)
        for g, (row, j) in zip(grads, candidates, strict=True):
            gradient[q] += g * row
            if j is not None:
                gradient[j] += g * units[q]
    return value, gradient


def proxy_loss(cosines, labels, window, threshold):
    """Loss of proxies that rank a batch between two thresholds, and its gradient with respect to the cosines."""
    classes, items = cosines.shape
    relevance = [[labels[j] == c for j in range(items)] for c in range(classes)]
    value, gradient = mean_loss(cosines, relevance, "log"), window_gradient(cosines, relevance, "log", window)
    present = len(set(labels))
    for c in range(classes):
        own = [j for j in range(items) if relevance[c][j]]
        for j in own:
            if cosines[c, j] < threshold:
                value += (threshold - cosines[c, j]) / window / len(own) / present
                gradient[c, j] -= 1 / window / len(own) / present
        above = [j for j in range(items) if not relevance[c][j] and cosines[c, j] >= -threshold]
        value += math.log(1 + len(above)) / classes
        for j in above:
            gradient[c, j] += 1 / (1 + len(above)) / window / classes
    return value, gradient
