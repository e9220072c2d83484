"""Metrics against loops, and against scikit-learn and SciPy where there are no ties."""

import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad
from rankgrad import metrics

import oracles
from strategies import lists

AT_K = ["recall_at_k", "refined_recall_at_k", "precision_at_k"]
PLAIN = ["average_precision", "map_at_r", "reciprocal_rank"]


@given(lists(infinities=True), st.sampled_from([*AT_K, *PLAIN]), st.integers(1, 12))
def test_equal_the_oracle(data, name, k):
    scores, relevance, mask = data
    kwargs = {"mask": None if mask is None else torch.from_numpy(mask)}
    if name in AT_K:
        kwargs["k"] = k
    function = getattr(metrics, name)
    got = function(torch.from_numpy(scores), torch.from_numpy(relevance), reduction="none", **kwargs)
    expected = [
        oracles.metric(name, scores[i], relevance[i], k, None if mask is None else mask[i])
        for i in range(len(scores))
    ]
    np.testing.assert_allclose(got.numpy(), [e or 0.0 for e in expected], atol=1e-12)
    mean = function(torch.from_numpy(scores), torch.from_numpy(relevance), **kwargs)
    counted = [e for e in expected if e is not None]
    assert math.isclose(mean, sum(counted) / max(len(counted), 1), abs_tol=1e-12)


@given(lists(infinities=True), st.one_of(st.none(), st.integers(1, 12)), st.sampled_from(metrics.lists.GAINS))
def test_ndcg_equals_the_oracle(data, k, gain):
    scores, relevance, mask = data
    grades = relevance * (1 + np.arange(scores.size).reshape(scores.shape) % 3)
    got = metrics.ndcg(
        torch.from_numpy(scores),
        torch.from_numpy(grades),
        k=k,
        gain=gain,
        mask=None if mask is None else torch.from_numpy(mask),
        reduction="none",
    )
    for i in range(len(scores)):
        expected = oracles.ndcg(scores[i], grades[i], k, gain, None if mask is None else mask[i])
        assert math.isclose(got[i], expected or 0.0, abs_tol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_equal_scikit_learn_and_scipy_without_ties(seed):
    rng = np.random.default_rng(seed)
    scores, relevance = rng.normal(size=50), rng.random(50) < 0.3
    s, r = torch.from_numpy(scores), torch.from_numpy(relevance)
    assert math.isclose(
        metrics.average_precision(s, r), sklearn.metrics.average_precision_score(relevance, scores)
    )
    grades = rng.integers(0, 4, 50)
    for k in (None, 5):
        expected = sklearn.metrics.ndcg_score(grades[None], scores[None], k=k)
        assert math.isclose(metrics.ndcg(s, torch.from_numpy(grades), k=k), expected)
    # Spearman has ties in the target, by average ranks
    expected = scipy.stats.spearmanr(scores, grades).statistic
    assert math.isclose(metrics.spearman(s, torch.from_numpy(grades)), expected)
    class_scores, class_relevance = rng.normal(size=(50, 4)), rng.random((50, 4)) < 0.3
    expected = sklearn.metrics.average_precision_score(class_relevance, class_scores)
    got = metrics.mean_average_precision(torch.from_numpy(class_scores), torch.from_numpy(class_relevance))
    assert math.isclose(got, expected)


def test_spearman_masked_and_degenerate():
    scores = torch.tensor([[3.0, 1.0, 2.0, 9.0], [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    target = torch.tensor(
        [[30.0, 10.0, 20.0, -5.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    mask = torch.tensor([[True, True, True, False]] + [[True] * 4] * 2)
    torch.testing.assert_close(
        metrics.spearman(scores, target, mask=mask, reduction="none"),
        torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
    )


def test_a_constant_scorer_gets_the_worst_value_wherever_its_positives_are():
    for relevance in ([True, True, False, False], [False, False, True, True]):
        r = torch.tensor(relevance)
        assert metrics.recall_at_k(torch.zeros(4), r, k=2) == 0
        assert metrics.average_precision(torch.zeros(4), r) == pytest.approx((1 / 3 + 2 / 4) / 2)
        assert metrics.ndcg(torch.zeros(4), r) < 0.6


def test_float32_results_and_negative_scores():
    """torchmetrics drops items with scores <= 0; cosine similarities are often negative."""
    value = metrics.average_precision(torch.tensor([-0.9, -0.1, -0.5]), torch.tensor([True, False, True]))
    assert value.dtype == torch.float32
    assert value == pytest.approx((1 / 2 + 2 / 3) / 2)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty(shape):
    scores, relevance = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for name in PLAIN:
        assert getattr(metrics, name)(scores, relevance) == 0
    assert metrics.recall_at_k(scores, relevance, k=1) == 0
    assert metrics.ndcg(scores, relevance) == 0
    assert metrics.spearman(scores, scores) == 0


def test_means_are_over_the_lists_that_count():
    scores = torch.randn(3, 5, dtype=torch.float64)
    grades = torch.tensor([[0, 1, 2, 0, 0], [0, 0, 0, 0, 0], [3, 0, 0, 0, 1]])
    each = metrics.ndcg(scores, grades, reduction="none")
    assert math.isclose(metrics.ndcg(scores, grades), each[[0, 2]].mean())
    mask = torch.tensor([[True] * 5, [True] + [False] * 4, [True] * 5])
    each = metrics.spearman(scores, grades, mask=mask, reduction="none")
    assert math.isclose(metrics.spearman(scores, grades, mask=mask), each[[0, 2]].mean())
    per_class = metrics.mean_average_precision(scores, grades > 0, reduction="none")
    assert per_class.shape == (5,)


@pytest.mark.parametrize("function", [metrics.ndcg, rankgrad.ndcg_loss])
@pytest.mark.parametrize("wrong", [-1.0, torch.nan, torch.inf])
def test_what_is_no_grade_is_named(function, wrong):
    """An error on the CPU; where values cannot be read, as on a GPU, the result is NaN."""
    scores, grades = torch.tensor([0.3, 0.1, 0.2], requires_grad=True), torch.tensor([wrong, 1.0, 2.0])
    with pytest.raises(ValueError, match=f"^relevance: expected finite numbers >= 0, received {wrong}"):
        function(scores, grades)
    with pytest.raises(ValueError, match=r"^relevance: expected"):
        function(scores, grades, groups=torch.tensor([5, 5, 7]))
    fine = function(scores, grades, mask=torch.tensor([False, True, True]))
    assert torch.equal(fine, function(scores[1:], grades[1:]))
    batched = torch.func.vmap(lambda s, g: function(s, g))
    assert batched(scores.detach()[None], grades[None]).isnan().all()


@pytest.mark.parametrize("function", [metrics.spearman, rankgrad.spearman_loss])
def test_a_target_that_is_nan_is_named(function):
    scores, target = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, torch.nan, -torch.inf])
    with pytest.raises(ValueError, match=r"^target: expected numbers, received nan"):
        function(scores, target)
    assert function(scores, target, mask=torch.tensor([True, False, True])).isfinite()
    with pytest.raises(ValueError, match=r"^target_ranks: expected numbers, received nan"):
        rankgrad.spearman_loss(scores, target_ranks=target)
