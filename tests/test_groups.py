"""Ragged lists by ``groups``: each id is a list of its own, whatever the order of the items."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankgrad
from rankgrad import metrics

LOSSES = {
    "ap": lambda s, r, g, **k: rankgrad.average_precision_loss(s, r > 0, **k),
    "recall": lambda s, r, g, **k: rankgrad.recall_loss(s, r > 0, weight=torch.sqrt, **k),
    "ndcg": lambda s, r, g, **k: rankgrad.ndcg_loss(s, r, k=3, **k),
    "spearman": lambda s, r, g, **k: rankgrad.spearman_loss(s, r, **k),
}
METRICS = {
    "ap": lambda s, r, **k: metrics.average_precision(s, r > 0, **k),
    "recall": lambda s, r, **k: metrics.recall_at_k(s, r > 0, k=2, **k),
    "precision": lambda s, r, **k: metrics.precision_at_k(s, r > 0, k=3, **k),
    "map at r": lambda s, r, **k: metrics.map_at_r(s, r > 0, **k),
    "mrr": lambda s, r, **k: metrics.reciprocal_rank(s, r > 0, **k),
    "refined": lambda s, r, **k: metrics.refined_recall_at_k(s, r > 0, k=2, **k),
    "ndcg": lambda s, r, **k: metrics.ndcg(s, r, k=4, **k),
    "spearman": lambda s, r, **k: metrics.spearman(s, r, **k),
}


def ragged(seed, sizes=(5, 1, 0, 12, 3, 40), ties=False):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)])
    groups = groups[torch.randperm(len(groups), generator=generator)]
    scores = torch.randn(len(groups), generator=generator, dtype=torch.float64)
    scores = scores.round(decimals=0) if ties else scores
    grades = torch.randint(0, 4, (len(groups),), generator=generator)
    mask = torch.rand(len(groups), generator=generator) < 0.8
    return scores, grades, groups, mask


def padded(values, groups, number, fill=0):
    width = int(groups.bincount(minlength=number).max())
    out = torch.full((number, width), fill, dtype=values.dtype)
    for k in range(number):
        own = values[groups == k]
        out[k, : len(own)] = own
    return out


def place_of(groups, number):
    """Where each item lies in the padded lists."""
    at = [0] * number
    places = []
    for k in groups.tolist():
        places.append((k, at[k]))
        at[k] += 1
    return tuple(torch.tensor(one) for one in zip(*places, strict=True))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("reach", [{"lam": 2.0}, {"window": 0.7}, {"margin": "auto"}])
def test_groups_are_padded_lists(name, reduction, reach):
    for seed, ties in ((0, False), (1, True)):
        scores, grades, groups, mask = ragged(seed, ties=ties)
        x, y = scores.clone().requires_grad_(), padded(scores, groups, 6).requires_grad_()
        exists = padded(mask, groups, 6, False)
        got = LOSSES[name](x, grades, groups, mask=mask, groups=groups, num_groups=6, reduction=reduction, **reach)
        wanted = LOSSES[name](y, padded(grades, groups, 6), None, mask=exists, reduction=reduction, **reach)
        torch.testing.assert_close(got, wanted)
        upstream = torch.linspace(-1, 2, 6, dtype=torch.float64) if reduction == "none" else torch.tensor(3.0)
        got.backward(upstream.to(got.dtype))
        wanted.backward(upstream.to(got.dtype))
        torch.testing.assert_close(x.grad, y.grad[place_of(groups, 6)], rtol=1e-9, atol=1e-13)
        narrow = name == "spearman" and "margin" in reach  # a fifth of the spread passes none of -2, -1 ... 2
        assert (ties and narrow) or x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", METRICS)
def test_metrics_by_groups(name):
    for seed, ties in ((0, False), (1, True)):
        scores, grades, groups, mask = ragged(seed, ties=ties)
        exists = padded(mask, groups, 6, False)
        for reduction in ("mean", "none"):
            got = METRICS[name](scores, grades, mask=mask, groups=groups, num_groups=6, reduction=reduction)
            lists = padded(scores, groups, 6), padded(grades, groups, 6)
            wanted = METRICS[name](*lists, mask=exists, reduction=reduction)
            torch.testing.assert_close(got, wanted)


@settings(max_examples=20)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.integers(0, 99))
def test_ids_of_any_kind_and_order(ids, seed):
    """Without num_groups: the ids that occur, ascending; the order of the items does not matter."""
    groups = torch.tensor(ids) * 10**15
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(ids), generator=generator).requires_grad_()
    relevance = torch.rand(len(ids), generator=generator) < 0.5
    each = rankgrad.average_precision_loss(scores, relevance, groups=groups, lam=1.0, reduction="none")
    for value, one in zip(each, sorted(set(ids)), strict=True):
        own = torch.tensor(ids) == one
        assert value == rankgrad.average_precision_loss(scores[own], relevance[own], lam=1.0)
    mean = rankgrad.average_precision_loss(scores, relevance, groups=groups)
    (grad,) = torch.autograd.grad(mean, scores)
    order = torch.randperm(len(ids), generator=generator)
    again = rankgrad.average_precision_loss(scores[order], relevance[order], groups=groups[order])
    torch.testing.assert_close(again, mean)
    torch.testing.assert_close(torch.autograd.grad(again, scores)[0], grad)


def test_compiled_and_vmapped():
    scores, grades, groups, _ = ragged(3)

    def loss(s, r, g):
        return rankgrad.average_precision_loss(s, r > 0, groups=g)

    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    loss(x, grades, groups).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(y, grades, groups).backward()
    torch.testing.assert_close(x.grad, y.grad)
    both = torch.stack([scores, scores.flip(0)])
    values = torch.func.vmap(lambda s: loss(s, grades, groups))(both)
    torch.testing.assert_close(values, torch.stack([loss(s, grades, groups) for s in both]))


def test_rank_loss_by_groups():
    scores, _, groups, _ = ragged(4)
    x = scores.clone().requires_grad_()

    def mean_square(ranks):
        return torch.zeros(6, dtype=ranks.dtype).index_add(0, groups, ranks**2)

    loss = rankgrad.rank_loss(mean_square, x, groups=groups, num_groups=6, lam=0.1, reduction="sum")
    loss.backward()
    total = 0.0
    for k in range(6):
        own = scores[groups == k].clone().requires_grad_()
        one = rankgrad.rank_loss(lambda r: (r**2).sum(-1), own, lam=0.1 / 5)  # five lists count
        one.backward()
        total += one.item()
        torch.testing.assert_close(x.grad[groups == k], own.grad, rtol=1e-9, atol=1e-9)
    assert np.isclose(loss.item(), total)


@pytest.mark.parametrize(
    ("groups", "given", "message"),
    [
        (torch.zeros(4), {}, "groups: expected integer ids"),
        (torch.zeros(3, dtype=torch.int64), {}, "groups: expected one id per score"),
        ([0, 0, 1, 1], {}, "groups: expected a tensor"),
        (torch.tensor([0, 1, 2, 3]), {"num_groups": 3}, r"groups: expected ids from 0 to 2 .*received 3"),
        (torch.tensor([0, 1, 2, -1]), {"num_groups": 3}, r"groups: expected ids from 0 to 2 .*received -1"),
        (None, {"num_groups": 3}, "num_groups: expected None without groups"),
    ],
)
def test_wrong_groups(groups, given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rankgrad.recall_loss(torch.rand(4), torch.ones(4), groups=groups, **given)


def test_groups_need_one_dimension_and_nothing_is_allowed():
    with pytest.raises(ValueError, match="scores: expected one dimension"):
        rankgrad.recall_loss(torch.rand(2, 2), torch.ones(2, 2), groups=torch.zeros(2, 2, dtype=torch.int64))
    nothing = torch.zeros(0, requires_grad=True)
    groups = torch.zeros(0, dtype=torch.int64)
    loss = rankgrad.average_precision_loss(nothing, nothing > 0, groups=groups)
    loss.backward()
    assert loss == 0
    each = metrics.ndcg(nothing, nothing, groups=groups, num_groups=3, reduction="none")
    assert each.tolist() == [0, 0, 0]


def test_a_million_short_lists_beside_a_huge_one_in_memory_of_the_items():
    """200,000 items: 2 in each of 50,000 lists and 100,000 in one; padding would need 5 billion."""
    groups = torch.cat([torch.arange(50_000).repeat_interleave(2), torch.full((100_000,), 50_000)])
    order = torch.randperm(len(groups))
    groups = groups[order]
    scores = torch.randn(len(groups)).requires_grad_()
    relevance = torch.rand(len(groups)) < 0.5
    loss = rankgrad.average_precision_loss(scores, relevance, groups=groups)
    loss.backward()
    own = groups == 50_000
    assert scores.grad[own].abs().sum() > 0
    assert scores.grad[~own].abs().sum() > 0
