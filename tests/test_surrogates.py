"""The baseline methods against the loops of oracles_surrogates.py, and against packages where they exist."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad
from rankgrad import surrogates
from rankgrad.surrogates import _pairwise, fastap

import oracles_surrogates as oracles
from strategies import lists

BRUTE = lists(max_lists=2, max_items=8)


def as_torch(mask):
    return None if mask is None else torch.from_numpy(mask)


def rows(scores, relevance, mask):
    """Each list as the oracles want it."""
    return [(scores[k], relevance[k], None if mask is None else mask[k]) for k in range(len(scores))]


def value_and_grad(loss, scores, relevance, upstream=1.0, **kwargs):
    x = scores.clone().requires_grad_()
    out = loss(x, relevance, **kwargs)
    (out * upstream).sum().backward()
    return out.detach(), x.grad


def list_values(loss, data, **kwargs):
    scores, relevance, mask = data
    out = loss(
        torch.from_numpy(scores), torch.from_numpy(relevance), mask=as_torch(mask), reduction="none", **kwargs
    )
    return out.numpy()


# ------------------------------------------------------------------------------------------------ FastAP


@given(lists(), st.sampled_from([1, 2, 5, 10, 40]), st.sampled_from([(-1.0, 1.0), (-2.5, 0.5), (0.0, 10.0)]))
def test_fastap_is_its_definition(data, bins, score_range):
    expected = [oracles.fastap(*row, bins, *score_range) for row in rows(*data)]
    np.testing.assert_allclose(
        list_values(surrogates.fastap_loss, data, bins=bins, score_range=score_range), expected, atol=1e-12
    )
    ranks = surrogates.fastap_rank(
        torch.from_numpy(data[0]), bins=bins, score_range=score_range, mask=as_torch(data[2])
    )
    expected = [oracles.fastap_ranks(s, m, bins, *score_range) for s, _, m in rows(*data)]
    np.testing.assert_allclose(ranks.numpy(), expected, atol=1e-12)


def test_fastap_is_average_precision_when_every_item_has_its_own_edge():
    scores = torch.stack([torch.randperm(21) for _ in range(30)]).double() / 10 - 1
    relevance = torch.rand(30, 21) < 0.4
    loss = surrogates.fastap_loss(scores, relevance, bins=20)
    torch.testing.assert_close(1 - loss, rankgrad.metrics.average_precision(scores, relevance))
    torch.testing.assert_close(surrogates.fastap_rank(scores, bins=20), rankgrad.rank(scores, lam=1.0))


def test_fastap_equals_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    embeddings = torch.randn(24, 6, dtype=torch.float64)
    labels = torch.randint(5, (24,))
    labels[0] = 9  # nothing relevant to it
    for bins in (5, 10, 40):
        theirs, ours = embeddings.clone().requires_grad_(), embeddings.clone().requires_grad_()
        expected = losses.FastAPLoss(num_bins=bins)(theirs, labels)
        pairs = rankgrad.retrieval_pairs(ours, labels)
        loss = surrogates.fastap_loss(pairs.scores, pairs.relevance, bins=bins, mask=pairs.mask)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_fastap_in_blocks_of_bins_is_the_same(monkeypatch):
    scores, relevance = torch.rand(3, 50) * 2 - 1, torch.rand(3, 50) < 0.3
    whole = value_and_grad(surrogates.fastap_loss, scores, relevance)
    monkeypatch.setattr(fastap, "_PULSES_AT_ONCE", 3 * 50 * 4)
    blocks = value_and_grad(surrogates.fastap_loss, scores, relevance)
    torch.testing.assert_close(blocks, whole)


def test_fastap_beyond_the_range_is_its_end_without_gradient():
    relevance = torch.tensor([False, True, False, True])
    inside = surrogates.fastap_loss(torch.tensor([1.0, 0.31, -1.0, -1.0]), relevance)
    outside, grad = value_and_grad(surrogates.fastap_loss, torch.tensor([7.0, 0.31, -1.5, -9.0]), relevance)
    assert torch.equal(inside, outside)
    assert grad[1] != 0
    assert (grad[[0, 2, 3]] == 0).all()


# ---------------------------------------------------------------------------------------- Chen et al. 2019


@given(lists(), st.sampled_from([0.01, 0.25, 1.0, 3.0]), st.booleans())
def test_chen2019_is_its_algorithm(data, delta, interpolated):
    scores, relevance, mask = data
    upstream = torch.linspace(-1, 2, len(scores), dtype=torch.float64)
    loss, grad = value_and_grad(
        surrogates.chen2019_loss,
        torch.from_numpy(scores),
        torch.from_numpy(relevance),
        upstream,
        delta=delta,
        interpolated=interpolated,
        mask=as_torch(mask),
        reduction="none",
    )
    expected = [oracles.chen2019(*row, delta, interpolated) for row in rows(*data)]
    np.testing.assert_allclose(loss.numpy(), [value for value, _ in expected], atol=1e-12)
    gradients = [g * u for (_, g), u in zip(expected, upstream.tolist(), strict=True)]
    np.testing.assert_allclose(grad.numpy(), gradients, atol=1e-12)


def test_chen2019_with_a_narrow_step_is_average_precision_and_still_moves():
    scores, relevance = torch.randn(20, 40, dtype=torch.float64), torch.rand(20, 40) < 0.3
    loss, grad = value_and_grad(surrogates.chen2019_loss, scores, relevance, delta=1e-9)
    torch.testing.assert_close(1 - loss, rankgrad.metrics.average_precision(scores, relevance))
    assert (grad[relevance] <= 0).all() and (grad[~relevance] >= 0).all()
    # error-driven: the update of a list is as large as its loss, on either side
    torch.testing.assert_close(grad.where(~relevance, 0).sum(), loss)
    torch.testing.assert_close(grad.where(relevance, 0).sum(), -loss)


def test_chen2019_interpolated_precision_never_falls_with_the_score():
    scores, relevance = torch.randn(20, 60), torch.rand(20, 60) < 0.3
    plain, raised = (
        surrogates.chen2019_loss(scores, relevance, delta=0.1, interpolated=flag, reduction="none")
        for flag in (False, True)
    )
    assert (raised <= plain + 1e-6).all()
    assert (raised < plain - 1e-3).any()


# ------------------------------------------------------------------------------------------------ SVM-MAP

SVM_MAP = [surrogates.yue2007_loss, surrogates.mohapatra2018_loss]


@pytest.mark.parametrize("loss", SVM_MAP)
@given(BRUTE)
def test_svm_map_is_the_maximum_over_all_interleavings(loss, data):
    scores, relevance, mask = data
    out, grad = value_and_grad(
        loss,
        torch.from_numpy(scores),
        torch.from_numpy(relevance),
        mask=as_torch(mask),
        reduction="none",
    )
    for k, row in enumerate(rows(*data)):
        value, gradients = oracles.svm_map(*row)
        assert math.isclose(out[k], value, abs_tol=1e-12)
        assert any(np.allclose(grad[k].numpy(), g, atol=1e-12) for g in gradients)


def test_svm_map_is_the_maximum_over_all_rankings():
    """Also over those in which a kind is not in the order of its scores."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = rng.integers(1, 7)
        scores, relevance = rng.normal(size=n).round(1), rng.random(n) < 0.5
        expected = oracles.svm_map_all_orders(scores, relevance)
        for loss in SVM_MAP:
            out = loss(torch.from_numpy(scores), torch.from_numpy(relevance))
            assert math.isclose(out, expected, abs_tol=1e-12)


@pytest.mark.parametrize("decimals", [None, 2, 1, 0])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_two_ways_to_the_maximum_agree_to_the_bit(decimals, share, scale):
    """With ties too: they compare the same integers and break ties alike."""
    scores = torch.randn(4, 500, dtype=torch.float64)
    scores = scale * (scores if decimals is None else scores.round(decimals=decimals))
    relevance, mask = torch.rand(4, 500) < share, torch.rand(4, 500) < 0.9
    greedy, divided = (value_and_grad(f, scores, relevance, mask=mask, reduction="none") for f in SVM_MAP)
    assert torch.equal(greedy[0], divided[0])
    assert torch.equal(greedy[1], divided[1])
    assert (greedy[0] > 0).all()


def test_the_divide_and_conquer_takes_few_rounds(monkeypatch):
    """O(log p) rounds, and after them only few items are left: what makes it O(n log p)."""
    from rankgrad.surrogates import mohapatra2018

    sizes = []
    real = mohapatra2018._divide
    monkeypatch.setattr(
        mohapatra2018, "_divide", lambda p, items, *a: sizes.append(len(items)) or real(p, items, *a)
    )
    n, p = 20_000, 200
    for scores in (torch.randn(n), torch.arange(n) / n, torch.arange(n).flip(0) / n, torch.zeros(n)):
        sizes.clear()
        surrogates.mohapatra2018_loss(scores, torch.arange(n) % (n // p) == 0)
        assert sum(sizes) < 2 * n * math.log2(p)
        assert len(sizes) < 5 * math.log2(p)


def test_svm_map_hinge_bounds_the_ap_loss():
    """The ranking by score is one of those compared, and F is largest there: hinge >= 1 - AP."""
    scores, relevance = torch.randn(50, 30, dtype=torch.float64), torch.rand(50, 30) < 0.3
    hinge = surrogates.mohapatra2018_loss(scores, relevance, reduction="none")
    ap = rankgrad.average_precision_loss(scores, relevance, lam=1.0, reduction="none")
    assert (hinge >= ap - 1e-12).all()
    perfect = surrogates.mohapatra2018_loss(relevance * 1000.0, relevance)
    assert perfect == 0


# ---------------------------------------------------------------------------------------------- Smooth-AP


@given(lists(), st.sampled_from([0.01, 0.1, 1.0]))
def test_smoothap_is_its_definition(data, temperature):
    expected = [oracles.smoothap(*row, temperature) for row in rows(*data)]
    got = list_values(surrogates.smoothap_loss, data, temperature=temperature)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    ranks = surrogates.smoothap_rank(torch.from_numpy(data[0]), temperature=temperature, mask=as_torch(data[2]))
    expected = [oracles.smoothap_ranks(s, m, temperature) for s, _, m in rows(*data)]
    np.testing.assert_allclose(ranks.numpy(), expected, atol=1e-12)


def test_smoothap_equals_pytorch_metric_learning():
    """As many classes as items a class: elsewhere their reshape mixes classes up (2.9.0)."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    embeddings, labels = torch.randn(16, 8), torch.arange(4).repeat_interleave(4)
    theirs, ours = embeddings.clone().requires_grad_(), embeddings.clone().requires_grad_()
    expected = losses.SmoothAPLoss(temperature=0.05)(theirs, labels)
    # theirs counts the query itself as a relevant item: references without query_index do the same
    pairs = rankgrad.retrieval_pairs(ours, labels, ours, labels)
    loss = surrogates.smoothap_loss(pairs.scores, pairs.relevance, temperature=0.05)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


# ------------------------------------------------------------------------------------------ permutahedron


@given(lists(), st.sampled_from([0.01, 0.3, 1.0, 10.0]))
def test_permutahedron_is_its_definition(data, epsilon):
    scores, _, mask = data
    ranks = surrogates.permutahedron_rank(torch.from_numpy(scores), epsilon=epsilon, mask=as_torch(mask))
    expected = [oracles.permutahedron_ranks(s, m, epsilon) for s, _, m in rows(*data)]
    np.testing.assert_allclose(ranks.numpy(), expected, atol=1e-9)
    loss = list_values(surrogates.permutahedron_loss, data, epsilon=epsilon)
    by_hand = [oracles.ap_of_soft_ranks(s, r, t, m) for (s, r, m), t in zip(rows(*data), expected, strict=True)]
    np.testing.assert_allclose(loss, by_hand, atol=1e-9)


def test_permutahedron_rank_is_the_nearest_point():
    """No vertex lies on the far side: (z - mu) . (vertex - mu) <= 0, and mu is majorised by (n, ..., 1)."""
    for seed in range(20):
        z = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
        mu = surrogates.permutahedron_rank(-z)
        for vertex in itertools.permutations(range(1, 7)):
            assert (z - mu) @ (torch.tensor(vertex, dtype=torch.float64) - mu) <= 1e-9
        largest = mu.sort(descending=True).values.cumsum(0)
        assert (largest <= torch.arange(6, 0, -1).cumsum(0) + torch.tensor(1e-9, dtype=torch.float64)).all()
        assert math.isclose(mu.sum(), 21.0)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
@pytest.mark.parametrize("shape", ["noise", "ties", "walk", "cluster"])
def test_isotonic_blocks_equal_scikit_learn(n, shape):
    from sklearn.isotonic import isotonic_regression

    from rankgrad.surrogates.permutahedron import _block_means, isotonic_blocks

    rng = np.random.default_rng(n)
    y = rng.normal(size=(3, n))
    if shape == "ties":
        y = y.round()
    elif shape == "walk":
        y = np.cumsum(y, axis=1)
    elif shape == "cluster":  # slowly falling, then a long rise: pooled one item at a time by sequential merging
        y = np.where(np.arange(n) < n // 2, -np.arange(n) * 1e-3, np.arange(n) - n // 2 + 0.0) + 0 * y
    start, end = isotonic_blocks(torch.from_numpy(y))
    fit = _block_means(torch.from_numpy(y), start, end).numpy()
    expected = [isotonic_regression(row, increasing=False) for row in y]
    np.testing.assert_allclose(fit, expected, atol=1e-9 * n)


def test_permutahedron_from_hard_to_flat_and_with_huge_scores():
    scores = torch.randn(5, 40, dtype=torch.float64)
    hard = surrogates.permutahedron_rank(scores, epsilon=1e-6)
    torch.testing.assert_close(hard, rankgrad.rank(scores, lam=1.0))
    flat = surrogates.permutahedron_rank(scores, epsilon=1e9)
    torch.testing.assert_close(flat, torch.full_like(flat, 20.5), atol=1e-6, rtol=0)
    huge = surrogates.permutahedron_rank(torch.tensor([1e30, 0.3, 0.1, 1e30, -1e30]))
    torch.testing.assert_close(huge, torch.tensor([1.5, 3.4, 3.6, 1.5, 5.0]))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="the oracle needs more than float64")
def test_permutahedron_is_accurate_in_long_lists_of_many_blocks():
    scores = np.random.default_rng(0).normal(size=30_000)
    ranks = surrogates.permutahedron_rank(torch.from_numpy(scores), epsilon=1e-4)
    np.testing.assert_allclose(ranks.numpy(), oracles.permutahedron_ranks(scores, epsilon=1e-4), rtol=0, atol=1e-9)


# ----------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("call", "kwargs"),
    [
        (surrogates.fastap_loss, {"bins": 7}),
        (surrogates.smoothap_loss, {"temperature": 0.3}),
        (surrogates.permutahedron_loss, {"epsilon": 0.5}),
        (surrogates.yue2007_loss, {}),
        (surrogates.mohapatra2018_loss, {}),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_of_losses(call, kwargs, reduction):
    """All but Chen et al.'s, whose gradient is no derivative. A random point is inside a smooth piece."""
    scores = (torch.rand(3, 9, dtype=torch.float64) * 1.8 - 0.9).requires_grad_()
    relevance, mask = torch.rand(3, 9) < 0.4, torch.rand(3, 9) < 0.8
    assert torch.autograd.gradcheck(
        lambda x: call(x, relevance, mask=mask, reduction=reduction, **kwargs), scores, atol=1e-6
    )


@pytest.mark.parametrize(
    ("call", "kwargs"),
    [
        (surrogates.fastap_rank, {"bins": 7}),
        (surrogates.smoothap_rank, {"temperature": 0.3}),
        (surrogates.permutahedron_rank, {"epsilon": 0.5}),
    ],
)
def test_gradcheck_of_soft_ranks(call, kwargs):
    scores = (torch.rand(3, 9, dtype=torch.float64) * 1.8 - 0.9).requires_grad_()
    mask = torch.rand(3, 9) < 0.8
    assert torch.autograd.gradcheck(lambda x: call(x, mask=mask, **kwargs), scores, atol=1e-6)


@pytest.mark.parametrize("call", [surrogates.chen2019_loss, surrogates.smoothap_loss, surrogates.yue2007_loss])
def test_pairs_in_blocks_are_the_same(call, monkeypatch):
    scores, relevance = torch.randn(3, 40, dtype=torch.float64), torch.rand(3, 40) < 0.4
    kwargs = {"interpolated": True} if call is surrogates.chen2019_loss else {}
    whole = value_and_grad(call, scores, relevance, **kwargs)
    ranks = value_and_grad(lambda s, _: surrogates.smoothap_rank(s), scores, None, scores)
    for pairs in (1, 3 * 40 * 5):
        monkeypatch.setitem(_pairwise._PAIRS_AT_ONCE, "cpu", pairs)
        torch.testing.assert_close(value_and_grad(call, scores, relevance, **kwargs), whole)
        blocks = value_and_grad(lambda s, _: surrogates.smoothap_rank(s), scores, None, scores)
        torch.testing.assert_close(blocks, ranks)


def test_relevance_behind_the_mask_may_be_anything():
    scores, mask = torch.tensor([[0.5, 0.1, 0.9, 0.3]]), torch.tensor([[True, True, False, True]])
    for hidden in (-1, 2):
        given = torch.tensor([[1, 0, hidden, 0]])
        found = surrogates.smoothap_loss(scores, given, mask=mask)
        assert torch.equal(found, surrogates.smoothap_loss(scores, given.clamp(0, 1), mask=mask))
        with pytest.raises(ValueError, match="relevance: expected only 0 and 1"):
            surrogates.smoothap_loss(scores, given)
