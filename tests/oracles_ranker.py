"""Ranker baselines in plain loops, from the papers' definitions; nothing of the package is imported."""

import math


def _queries(scores, grades, groups):
    """(scores, grades) of each query with something relevant, as lists of numbers."""
    found = {}
    for s, g, q in zip(scores.tolist(), grades.tolist(), groups.tolist(), strict=True):
        found.setdefault(q, ([], []))
        found[q][0].append(s)
        found[q][1].append(g)
    return [(s, g) for s, g in found.values() if max(g) > 0]


def _mean(values):
    return sum(values) / len(values) if values else 0.0


def _softplus(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def ranknet(scores, grades, groups, sigma=1.0):
    losses = []
    for s, g in _queries(scores, grades, groups):
        pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if g[i] > g[j]]
        losses.append(_mean([_softplus(-sigma * (s[i] - s[j])) for i, j in pairs]))
    return _mean(losses)


def _dcg(grades, k):
    return sum((2**g - 1) / math.log2(place + 1) for place, g in enumerate(grades[:k], 1))


def lambdarank(scores, grades, groups, sigma=1.0, k=None):
    """The change of NDCG by really exchanging the two items."""
    losses = []
    for s, g in _queries(scores, grades, groups):
        order = sorted(range(len(s)), key=lambda i: (-s[i], i))
        ideal = _dcg(sorted(g, reverse=True), k)
        total = 0.0
        for i in range(len(s)):
            for j in range(len(s)):
                if g[i] > g[j]:
                    changed = [{i: j, j: i}.get(item, item) for item in order]
                    change = abs(_dcg([g[x] for x in changed], k) - _dcg([g[x] for x in order], k)) / ideal
                    total += change * _softplus(-sigma * (s[i] - s[j]))
        losses.append(total)
    return _mean(losses)


def listnet(scores, grades, groups):
    losses = []
    for s, g in _queries(scores, grades, groups):
        wanted, given = sum(map(math.exp, g)), sum(map(math.exp, s))
        losses.append(
            -sum(math.exp(b) / wanted * math.log(math.exp(a) / given) for a, b in zip(s, g, strict=True))
        )
    return _mean(losses)


def approx_ndcg(scores, grades, groups, temperature=0.1):
    losses = []
    for s, g in _queries(scores, grades, groups):
        value = 0.0
        for i in range(len(s)):
            rank = 1.0
            for j in range(len(s)):
                if i != j:
                    rank += 1 / (1 + math.exp(-(s[j] - s[i]) / temperature))
            value += (2 ** g[i] - 1) / math.log2(1 + rank)
        losses.append(1 - value / _dcg(sorted(g, reverse=True), None))
    return _mean(losses)
