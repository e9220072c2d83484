"""rank, blackbox and rank_loss against SciPy, brute force and the closed-form interpolation."""

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad

import oracles
from strategies import GRID, lams, lists

TIES = ["ordinal", "min", "max", "average"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("ties", TIES)
@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=6), elements=st.sampled_from(GRID)))
def test_ranks_equal_scipy(ties, scores):
    expected = scipy.stats.rankdata(-scores, method=ties, axis=-1)
    assert np.array_equal(rankgrad.rank(torch.from_numpy(scores), lam=1.0, ties=ties).numpy(), expected)


@pytest.mark.parametrize("ties", TIES)
@given(lists(infinities=True), lams, st.data())
def test_ranks_and_gradient_equal_the_oracle(ties, data, lam, draw):
    scores, _, mask = data
    g = draw.draw(hnp.arrays(np.float64, scores.shape, elements=st.floats(-1, 1, width=16)))
    x = torch.from_numpy(scores).requires_grad_()
    out = rankgrad.rank(x, lam=lam, ties=ties, mask=None if mask is None else torch.from_numpy(mask))
    out.backward(torch.from_numpy(g))
    for k in range(len(scores)):
        m = None if mask is None else mask[k]
        assert np.array_equal(out[k].detach().numpy(), oracles.ranks(scores[k], ties, m))
        if m is None or m.any():
            np.testing.assert_allclose(x.grad[k].numpy(), oracles.rank_gradient(scores[k], g[k], lam, ties, m))
        else:
            assert (x.grad[k] == 0).all()


@pytest.mark.parametrize("n", range(1, 8))
def test_proposition_1_by_trying_every_permutation(n):
    y = np.random.default_rng(n).normal(size=n)
    (best,) = oracles.best_permutations(y)
    assert tuple(rankgrad.rank(torch.from_numpy(y), lam=1.0).tolist()) == best
    tied = np.round(y)  # a minimiser still, though not the only one
    assert tuple(rankgrad.rank(torch.from_numpy(tied), lam=1.0).tolist()) in oracles.best_permutations(tied)


def test_lambda_is_in_units_of_ranks_divided_by_n():
    """Algorithm 1 on rank / n with lam (the paper's way) is Algorithm 1 on ranks with lam * n."""
    scores, weights = torch.randn(3, 11, dtype=torch.float64), torch.randn(3, 11, dtype=torch.float64)
    ranker = rankgrad.blackbox(lambda y: rankgrad.rank(y, lam=1.0), lam=0.7 * 11)
    normalised = rankgrad.blackbox(lambda y: rankgrad.rank(y, lam=1.0) / 11, lam=0.7)
    grads = []
    for rank in (
        lambda y: rankgrad.rank(y, lam=0.7),
        ranker,
        lambda y: 11 * normalised(y),
        lambda y: 11 * rankgrad.rank(y, lam=0.7, normalize=True),
    ):
        x = scores.clone().requires_grad_()
        (rank(x) * weights).sum().backward()
        grads.append(x.grad)
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=1e-12, atol=1e-12)
    assert grads[0].abs().sum() > 0


def test_gradient_is_that_of_the_interpolation():
    """gradcheck does not apply; the closed form f_lambda for frozen g does, by finite differences."""
    rng = np.random.default_rng(1)
    checked = 0
    for _ in range(40):
        n, lam = int(rng.integers(2, 8)), float(rng.uniform(0.05, 2))
        y, g = rng.normal(size=n), rng.normal(size=n)
        x = torch.from_numpy(y).requires_grad_()
        rankgrad.rank(x, lam=lam).backward(torch.from_numpy(g))
        eps = 1e-6
        for i in range(n):
            e = eps * np.eye(n)[i]
            # f is linear between jumps of either ranking: skip a point next to one
            near = [oracles.ranks(v + d) for v in (y, y + lam * n * g) for d in (e, -e)]
            if np.array_equal(near[0], near[1]) and np.array_equal(near[2], near[3]):
                slope = (oracles.interpolation(y + e, g, lam * n) - oracles.interpolation(y - e, g, lam * n)) / (
                    2 * eps
                )
                assert math.isclose(slope, x.grad[i].item(), abs_tol=1e-6)
                checked += 1
    assert checked > 100


def test_it_is_not_linear_in_the_arriving_gradient_and_rank_loss_is():
    scores = torch.randn(50, dtype=torch.float64)

    def grads(make, scale):
        x = scores.clone().requires_grad_()
        (scale * make(x)).backward()
        return x.grad / scale

    def raw(x):
        return rankgrad.rank(x, lam=0.01)[0] * 0.1

    def safe(x):
        return rankgrad.rank_loss(lambda r: r[..., 0] * 0.1, x, lam=0.01)

    assert not torch.equal(grads(raw, 1.0), grads(raw, 65536.0))
    assert torch.equal(grads(safe, 1.0), grads(safe, 65536.0))
    torch.testing.assert_close(grads(safe, 1.0), grads(raw, 1.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    scores = torch.randn(4, 30).to(dtype).requires_grad_()
    out = rankgrad.rank(scores, lam=0.5)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    out.backward(torch.randn_like(out))
    assert scores.grad.dtype == dtype
    # the upcast is exact: the same ranks as the float32 values have
    assert torch.equal(out.float(), rankgrad.rank(scores.detach().float(), lam=0.5))


def test_long_lists_rank_in_float64():
    n = 2**23 + 1
    out = rankgrad.rank(torch.arange(n, dtype=torch.float32), lam=1.0)
    assert out.dtype == torch.float64
    assert out[0] == n
    assert rankgrad.rank(torch.zeros(2**10), lam=1.0, ties="average")[0] == (2**10 + 1) / 2


@given(lists(masked=False), lams)
def test_masked_is_removed(data, lam):
    scores, keep, _ = data
    g = np.random.default_rng(0).normal(size=scores.shape)
    x = torch.from_numpy(scores).requires_grad_()
    rankgrad.rank(x, lam=lam, mask=torch.from_numpy(keep)).backward(torch.from_numpy(g))
    for k in range(len(scores)):
        short = torch.from_numpy(scores[k][keep[k]]).requires_grad_()
        out = rankgrad.rank(short, lam=lam)
        out.backward(torch.from_numpy(g[k][keep[k]]))
        assert torch.equal(x.grad[k][keep[k]], short.grad)
        assert (x.grad[k][~keep[k]] == 0).all()


@given(lists(masked=False), lams)
def test_shift_and_permutation(data, lam):
    scores, _, _ = data
    rng = np.random.default_rng(0)
    order = rng.permutation(scores.shape[1])
    scores = scores + rng.normal(size=scores.shape) * 1e-3  # no ties: ordinal ranks then follow any order
    g = rng.normal(size=scores.shape)

    def grad(values, upstream):
        x = torch.from_numpy(values.copy()).requires_grad_()
        rankgrad.rank(x, lam=lam).backward(torch.from_numpy(upstream.copy()))
        return x.grad.numpy()

    np.testing.assert_array_equal(grad(scores[:, order], g[:, order]), grad(scores, g)[:, order])
    np.testing.assert_array_equal(grad(scores + 4.0, g), grad(scores, g))


def test_small_lambda_gives_no_gradient_and_large_one_sorts_by_the_gradient():
    scores = torch.randn(20, dtype=torch.float64, requires_grad=True)
    g = torch.randn(20, dtype=torch.float64)
    (tiny,) = torch.autograd.grad(rankgrad.rank(scores, lam=1e-12), scores, g)
    (huge,) = torch.autograd.grad(rankgrad.rank(scores, lam=1e9), scores, g)
    assert (tiny == 0).all()
    expected = rankgrad.rank(g, lam=1.0) - rankgrad.rank(scores, lam=1.0)
    torch.testing.assert_close(huge * 1e9 * 20, expected, rtol=1e-9, atol=1e-6)


def test_dim_and_non_contiguous_input():
    scores = torch.randn(5, 4, 3)
    for dim in (-3, 0, 1, 2):
        moved = rankgrad.rank(scores.movedim(dim, -1).contiguous(), lam=1.0).movedim(-1, dim)
        assert torch.equal(rankgrad.rank(scores, lam=1.0, dim=dim), moved)


def test_a_non_finite_gradient_stays_non_finite():
    scores = torch.randn(2, 5, requires_grad=True)
    g = torch.ones(2, 5)
    g[0, 1] = torch.inf
    rankgrad.rank(scores, lam=1.0).backward(g)
    assert scores.grad[0].isnan().all()
    assert scores.grad[1].isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (1,)])
def test_empty_and_single(shape):
    scores = torch.randn(shape, requires_grad=True)
    out = rankgrad.rank(scores, lam=1.0, normalize=True)
    assert out.shape == shape
    out.sum().backward()
    assert (scores.grad == 0).all()
    loss = rankgrad.rank_loss(lambda r: r.sum(-1), scores, lam=1.0)
    assert loss.isfinite()


def test_rank_loss_gives_parameters_of_fn_their_gradient():
    scores = torch.randn(3, 6, requires_grad=True)
    weights = torch.randn(6, requires_grad=True)
    rankgrad.rank_loss(lambda r: (r * weights).sum(-1), scores, lam=1.0).backward()
    expected = rankgrad.rank(scores.detach(), lam=1.0).mean(0)
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rank_loss_is_algorithm_1_for_the_mean(reduction):
    scores = torch.randn(4, 9, dtype=torch.float64)
    mask = torch.rand(4, 9) < 0.7
    mask[2] = False  # does not count

    def fn(ranks):
        return (ranks[..., :3] ** 2).sum(-1)

    x = scores.clone().requires_grad_()
    upstream = torch.tensor([2.0, -1.0, 5.0, 0.5], dtype=torch.float64)
    loss = rankgrad.rank_loss(fn, x, lam=0.3, mask=mask, reduction=reduction)
    (loss @ upstream if reduction == "none" else loss).backward()
    ranks = rankgrad.rank(scores, lam=1.0, mask=mask)
    g = torch.zeros_like(ranks)
    g[:, :3] = 2 * ranks[:, :3] / 3  # three lists count
    for k in (0, 1, 3):
        expected = oracles.rank_gradient(scores[k].numpy(), g[k].numpy(), 0.3, mask=mask[k].numpy())
        factor = {"mean": 1.0, "sum": 3.0, "none": 3 * upstream[k].item()}[reduction]
        np.testing.assert_allclose(x.grad[k].numpy(), factor * expected, rtol=1e-12)
    assert (x.grad[2] == 0).all()


def test_spearman_loss_is_one_minus_scipy():
    scores = torch.randn(5, 8, dtype=torch.float64)
    target = torch.stack([torch.randperm(8) + 1 for _ in range(5)])
    values = rankgrad.spearman_loss(scores, target_ranks=target, lam=1.0, reduction="none")
    for k in range(5):
        rho = scipy.stats.spearmanr(-scores[k], target[k]).statistic
        assert math.isclose(values[k].item(), 1 - rho, abs_tol=1e-12)


@pytest.mark.parametrize("gain", ["linear", "exponential"])
@given(lists())
def test_ndcg_loss_is_one_minus_the_metric_with_a_gradient_of_its_ranks(gain, data):
    scores, relevance, mask = data
    grades = relevance * (1 + np.arange(scores.size).reshape(scores.shape) % 3)
    x = torch.from_numpy(scores).requires_grad_()
    kwargs = {"gain": gain, "mask": None if mask is None else torch.from_numpy(mask), "reduction": "none"}
    values = rankgrad.ndcg_loss(x, torch.from_numpy(grades), lam=1.0, **kwargs)
    counted = 0
    for k in range(len(scores)):
        expected = oracles.ndcg(scores[k], grades[k], None, gain, None if mask is None else mask[k])
        assert math.isclose(values[k].item(), 0 if expected is None else 1 - expected, abs_tol=1e-9)
        counted += expected is not None
    values.sum().backward()
    assert x.grad.isfinite().all()
    assert counted or (x.grad == 0).all()


def test_training_with_ndcg_and_spearman_gets_better():
    """NDCG may have no gradient where its slopes are already in the order of the scores."""
    torch.manual_seed(3)
    grades = torch.randint(0, 4, (6, 12))
    target = torch.stack([torch.randperm(12) + 1 for _ in range(6)])
    for share, loss_of in (
        (0.6, lambda s: rankgrad.ndcg_loss(s, grades, lam=20.0)),
        (0.2, lambda s: rankgrad.spearman_loss(s, target_ranks=target, lam=10.0)),
    ):
        torch.manual_seed(1)
        scores = torch.randn(6, 12, requires_grad=True)
        optimizer = torch.optim.Adam([scores], lr=0.05)
        first = loss_of(scores).item()
        for _ in range(300):
            optimizer.zero_grad()
            loss_of(scores).backward()
            optimizer.step()
        assert loss_of(scores).item() < share * first


def test_normalize_counts_existing_items_and_the_mask_moves_with_dim():
    scores = torch.randn(6, 4, dtype=torch.float64)
    mask = torch.rand(6, 4) < 0.7
    mask[0] = True
    by_column = rankgrad.rank(scores, lam=1.0, dim=0, mask=mask, normalize=True)
    for column in range(4):
        expected = oracles.ranks(scores[:, column].numpy(), mask=mask[:, column].numpy())
        np.testing.assert_allclose(by_column[:, column], expected / mask[:, column].sum().item())


@pytest.mark.parametrize("ties", TIES)
def test_rank_loss_ranks_again_with_the_same_ties(ties):
    scores = torch.randn(3, 9, dtype=torch.float64).round(decimals=0)
    x = scores.clone().requires_grad_()
    rankgrad.rank_loss(lambda r: (r * torch.arange(9)).sum(-1), x, lam=0.5, ties=ties).backward()
    for k in range(3):
        expected = oracles.rank_gradient(scores[k].numpy(), np.arange(9) / 3, 0.5, ties)
        np.testing.assert_allclose(x.grad[k].numpy(), expected, rtol=1e-12)


def test_rank_loss_parameters_with_sum_and_with_scores_that_need_no_gradient():
    scores = torch.randn(3, 6)
    for reduction, factor in (("mean", 1 / 3), ("sum", 1.0)):
        weights = torch.randn(6, requires_grad=True)
        rankgrad.rank_loss(lambda r, w=weights: (r * w).sum(-1), scores, lam=1.0, reduction=reduction).backward()
        torch.testing.assert_close(weights.grad, factor * rankgrad.rank(scores, lam=1.0).sum(0))


@given(lists(max_items=7))
def test_spearman_loss_equals_its_formula_masked_and_tied(data):
    """Value and gradient from the oracle's ranks; lists of one item do not count."""
    lam = 2.9371  # scores on a grid: with a round number moved items meet, and rounding decides
    scores, _, mask = data
    exists = np.ones(scores.shape, bool) if mask is None else mask
    target = np.stack(
        [
            oracles.ranks(np.random.default_rng(k).normal(size=len(s)), mask=m)
            for k, (s, m) in enumerate(zip(scores, exists, strict=True))
        ]
    )
    x = torch.from_numpy(scores).requires_grad_()
    loss = rankgrad.spearman_loss(x, target_ranks=torch.from_numpy(target), lam=lam, mask=torch.from_numpy(exists))
    loss.backward()
    counting = [k for k in range(len(scores)) if exists[k].sum() > 1]
    total = 0.0
    for k in range(len(scores)):
        n = exists[k].sum()
        if k not in counting:
            assert (x.grad[k] == 0).all()
            continue
        ranks = oracles.ranks(scores[k], "average", exists[k])
        distance = np.where(exists[k], ranks - target[k], 0)
        total += 6 * (distance**2).sum() / (n * (n * n - 1))
        g = 12 * distance / (n * (n * n - 1)) / len(counting)
        expected = oracles.rank_gradient(scores[k], g, lam, "average", exists[k])
        np.testing.assert_allclose(x.grad[k].numpy(), expected, rtol=1e-9, atol=1e-12)
    assert math.isclose(loss.item(), total / max(len(counting), 1), abs_tol=1e-12)


def test_spearman_loss_counts_items_exactly_in_half_precision():
    scores, target = torch.randn(301).bfloat16(), torch.randperm(301) + 1
    full = rankgrad.spearman_loss(scores.float(), target_ranks=target, lam=1.0)
    torch.testing.assert_close(rankgrad.spearman_loss(scores, target_ranks=target, lam=1.0), full)


def test_ndcg_gradient_equals_algorithm_1_on_its_own_slopes():
    rng = np.random.default_rng(5)
    scores, grades = rng.normal(size=(2, 8)), rng.integers(0, 4, (2, 8))
    x = torch.from_numpy(scores).requires_grad_()
    rankgrad.ndcg_loss(x, torch.from_numpy(grades), lam=300.0).backward()
    for k in range(2):
        ranks = oracles.ranks(scores[k])
        ideal = sum(g / math.log2(1 + i) for i, g in enumerate(sorted(grades[k], reverse=True), start=1))
        slope = grades[k] / ((1 + ranks) * np.log(2) * np.log2(1 + ranks) ** 2) / ideal / 2
        np.testing.assert_allclose(x.grad[k].numpy(), oracles.rank_gradient(scores[k], slope, 300.0), rtol=1e-9)
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, r, m: rankgrad.ndcg_loss(s, r, lam=50.0, mask=m),
        lambda s, r, m: rankgrad.spearman_loss(s, r, lam=50.0, mask=m),
        lambda s, r, m: rankgrad.rank_loss(lambda k: (k * r).sum(-1), s, lam=0.5, mask=m),
    ],
)
def test_nan_behind_the_mask_of_a_rank_loss(loss):
    results = []
    for hidden in (torch.nan, 0.0):
        scores = torch.tensor([[1.0, hidden, 0.5, 0.2]], requires_grad=True)
        value = loss(scores, torch.tensor([[0.0, 0, 2, 1]]), torch.tensor([[True, False, True, True]]))
        value.backward()
        results.append((value.detach(), scores.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert results[0][1].isfinite().all() and results[0][1].abs().sum() > 0
