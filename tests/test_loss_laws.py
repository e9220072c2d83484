"""Laws that every loss on score lists must obey, and how its gradient depends on lambda and the loss scale."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given

import rankgrad

import oracles
from strategies import forms, lams, lists, margins
from test_losses import SQRT, WEIGHTS, as_torch, loss_of, value_and_grad


@given(lists(masked=False), forms, lams, margins)
def test_masked_is_removed(data, form, lam, margin):
    scores, relevance, _ = data
    keep = np.random.default_rng(0).random(scores.shape[1]) < 0.6
    x, rel = torch.from_numpy(scores), torch.from_numpy(relevance)
    loss, grad = value_and_grad(form, x, rel, lam=lam, margin=margin, mask=torch.from_numpy(keep))
    short, short_grad = value_and_grad(form, x[:, keep], rel[:, keep], lam=lam, margin=margin)
    torch.testing.assert_close(loss, short, rtol=1e-14, atol=0)
    assert torch.equal(grad[:, keep], short_grad)
    assert (grad[:, ~keep] == 0).all()


@given(lists(), forms, lams, margins)
def test_shift_invariance_and_permutation_equivariance(data, form, lam, margin):
    scores, relevance, mask = data
    rng = np.random.default_rng(0)
    scores = scores + rng.integers(0, 8, scores.shape) / 64  # a fine grid: sums below are exact
    order = rng.permutation(scores.shape[1])
    rows = rng.permutation(scores.shape[0])

    def run(s, r, m):
        return value_and_grad(
            form,
            torch.tensor(s),
            torch.tensor(r),
            lam=lam,
            margin=margin,
            mask=None if m is None else torch.tensor(m),
        )

    loss, grad = run(scores, relevance, mask)
    shifted, _ = run(scores + 2.0, relevance, mask)
    assert torch.equal(loss, shifted)
    permuted, permuted_grad = run(scores[rows], relevance[rows], None if mask is None else mask[rows])
    torch.testing.assert_close(permuted, loss)
    assert torch.equal(permuted_grad, grad[rows])
    # with ties, relevant items swap slopes with their order: gradients are compared without ties, further below
    moved, _ = run(scores[:, order], relevance[:, order], None if mask is None else mask[:, order])
    torch.testing.assert_close(moved, loss, rtol=1e-14, atol=0)  # equal terms, summed in another order


@given(lists(), forms, lams)
def test_the_gradient_of_a_list_sums_to_zero(data, form, lam):
    """Ranks before and after are both 1..n."""
    scores, relevance, mask = data
    _, grad = value_and_grad(
        form, torch.from_numpy(scores), torch.from_numpy(relevance), lam=lam, mask=as_torch(mask)
    )
    torch.testing.assert_close(grad.sum(-1), torch.zeros(len(scores), dtype=torch.float64), atol=1e-9, rtol=0)


@given(lists(), forms)
def test_no_gradient_as_lambda_goes_to_zero_without_ties(data, form):
    scores, relevance, mask = data
    scores = scores + np.arange(scores.size).reshape(scores.shape) * 1e-3
    _, grad = value_and_grad(
        form, torch.from_numpy(scores), torch.from_numpy(relevance), lam=1e-12, mask=as_torch(mask)
    )
    assert (grad == 0).all()


def test_margin_breaks_ties_against_the_relevant_and_infinitesimally_changes_nothing():
    scores = torch.tensor([[0.5, 0.5, 0.1, 0.5]], dtype=torch.float64)
    relevance = torch.tensor([[True, False, True, False]])
    for form in ("ap", "log"):
        none, tiny = (value_and_grad(form, scores, relevance, lam=1.0, margin=m) for m in (0.0, 1e-12))
        assert torch.equal(none[0], tiny[0])
    # a list whose scores are all equal has the value of one in reverse order, wherever its positives are
    for where in itertools.permutations([True, True, False, False]):
        flat = rankgrad.average_precision_loss(torch.zeros(4), torch.tensor(where), lam=1.0)
        worst = rankgrad.average_precision_loss(-torch.tensor(where).float(), torch.tensor(where), lam=1.0)
        assert flat == worst


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_huge_and_tiny_scores(scale):
    scores, relevance = torch.randn(3, 20) * scale, torch.rand(3, 20) < 0.3
    expected = oracles.mean_loss_gradient(scores.numpy(), relevance.numpy(), "log", 0.2, 0.0, None, np.float32)
    _, grad = value_and_grad("log", scores, relevance, lam=0.2)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("form", ["ap", "log", WEIGHTS, SQRT])
def test_linear_in_the_upstream_gradient(form):
    scores, relevance = torch.randn(8, 60), torch.rand(8, 60) < 0.3
    _, one = value_and_grad(form, scores, relevance, lam=2.0, margin=0.1)
    for scale in (-1.0, 0.25, 65536.0):
        _, scaled = value_and_grad(form, scores, relevance, scale, lam=2.0, margin=0.1)
        assert torch.equal(scaled, one * scale)
    assert one.abs().sum() > 0


def test_grad_scaler_leaves_lambda_alone():
    """With the scale inside lambda the perturbation would be 65536 times larger and the gradient another."""
    scores, relevance = torch.randn(4, 200), torch.rand(4, 200) < 0.1

    def step(scaler):
        x = torch.nn.Parameter(scores.clone())
        optimizer = torch.optim.SGD([x], lr=1.0)
        loss = rankgrad.average_precision_loss(x, relevance, lam=0.2, margin=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return x.detach()

    scaled = step(torch.amp.GradScaler("cpu", init_scale=65536.0))
    plain = step(torch.amp.GradScaler("cpu", enabled=False))
    assert torch.equal(scaled, plain)
    assert not torch.equal(plain, scores)


def test_a_half_precision_gradient_does_not_underflow_under_a_scaler():
    """At upstream one it is below fp16's range: the factor 1 / (lam n) meets the upstream gradient in fp32."""
    n = 200_000
    torch.manual_seed(0)
    scores, relevance = torch.randn(n).half(), torch.rand(n) < 0.001
    _, plain = value_and_grad("log_ap", scores, relevance, lam=200.0)
    _, scaled = value_and_grad("log_ap", scores, relevance, 65536.0, lam=200.0)
    _, exact = value_and_grad("log_ap", scores.float(), relevance, 65536.0, lam=200.0)
    small = (exact != 0) & (exact.abs() / 65536 < 2**-25)
    assert small.any()
    assert (plain[small] == 0).all()
    assert torch.equal(scaled, exact.half())
    assert (scaled[small] != 0).all()


def test_no_gradient_work_when_none_is_needed(monkeypatch):
    from rankgrad.engine import reference

    calls = []
    real = reference.evaluate
    monkeypatch.setattr(reference, "evaluate", lambda r: (r.with_gradient and calls.append(1)) or real(r))
    scores, relevance = torch.randn(2, 9), torch.rand(2, 9) < 0.4
    for form in ("ap", "log", SQRT):
        weight = (lambda c: (c + 1).sqrt(),) if form is SQRT else form
        loss_of(weight, scores, relevance, lam=1.0)
        with torch.no_grad():
            loss_of(weight, scores.clone().requires_grad_(), relevance, lam=1.0)
        assert not calls
        loss_of(weight, scores.clone().requires_grad_(), relevance, lam=1.0)
        assert calls
        calls.clear()


def test_same_input_same_output_bit_for_bit():
    scores, relevance = torch.randn(16, 300).round(decimals=1), torch.rand(16, 300) < 0.2
    runs = [value_and_grad("ap", scores, relevance, lam=0.2, margin=0.1) for _ in range(3)]
    for loss, grad in runs[1:]:
        assert torch.equal(loss, runs[0][0])
        assert torch.equal(grad, runs[0][1])


def test_gradients_move_with_permutation_and_shift():
    """Full gradients, on scores without ties, where the order of the items in memory cannot matter."""
    rng = np.random.default_rng(0)
    scores = rng.permutation(400).reshape(4, 100) / 64.0  # a grid on which shifts are exact
    relevance = rng.random((4, 100)) < 0.2
    order = rng.permutation(100)
    for form in ("ap", "log", "loglog", WEIGHTS):
        _, grad = value_and_grad(form, torch.from_numpy(scores), torch.from_numpy(relevance), lam=50.0)
        _, moved = value_and_grad(
            form, torch.from_numpy(scores[:, order]), torch.from_numpy(relevance[:, order]), lam=50.0
        )
        assert torch.equal(moved, grad[:, order])
        _, shifted = value_and_grad(form, torch.from_numpy(scores + 2.0), torch.from_numpy(relevance), lam=50.0)
        torch.testing.assert_close(shifted, grad, rtol=0, atol=1e-3)
        assert grad.abs().sum() > 0


def test_gradient_is_that_of_the_interpolation_for_the_losses_too():
    """Finite differences of f_lambda (SPEC 1) with g the loss's slopes, on whole ranks."""
    rng = np.random.default_rng(3)
    checked = 0
    for _ in range(20):
        n, lam = 8, 4.0
        y, relevance = rng.normal(size=n), rng.random(n) < 0.4
        if not relevance.any():
            continue
        x = torch.from_numpy(y).requires_grad_()
        rankgrad.average_precision_loss(x, torch.from_numpy(relevance), lam=lam).backward()
        exists = np.ones(n, bool)
        g = np.zeros(n)
        for i in np.flatnonzero(relevance):
            g[i] = oracles.item_value("ap", *oracles.standing(y, relevance, exists, i))[1] / relevance.sum()
        for i in range(n):
            e = 1e-6 * np.eye(n)[i]
            near = [oracles.ranks(v + d) for v in (y, y + lam * n * g) for d in (e, -e)]
            if np.array_equal(near[0], near[1]) and np.array_equal(near[2], near[3]):
                slope = oracles.interpolation(y + e, g, lam * n) - oracles.interpolation(y - e, g, lam * n)
                assert math.isclose(slope / 2e-6, x.grad[i].item(), abs_tol=1e-5)
                checked += 1
    assert checked > 80


def test_the_step_is_computed_in_float64_and_rounded_once():
    """A case where float32 arithmetic would land on the other side of a score."""
    found = 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        scores, relevance = torch.randn(1, 3000, generator=g), torch.rand(1, 3000, generator=g) < 0.02
        changes = oracles_steps(scores[0], relevance[0])
        in_single = oracles_steps(scores[0], relevance[0], single=True)
        found += int((changes != in_single).any())
        _, grad = value_and_grad("log_ap", scores, relevance, lam=0.37)
        moved = (grad[0].double() * 0.37 * 3000).round()
        own = scores[0][relevance[0]]
        others = scores[0][~relevance[0]]
        expected = (changes[:, None] > others).sum(0) - (own[:, None] > others).sum(0)
        assert torch.equal(moved[~relevance[0]].long(), expected)
    assert found > 0


def oracles_steps(scores, relevance, single=False):
    """Moved scores of the relevant items, log AP, lam 0.37: steps in float64, or wrongly in float32."""
    own, others = scores[relevance], scores[~relevance]
    p, n = len(own), len(scores)
    c = (others[None] >= own[:, None]).sum(1)
    rank = c + (own[None] > own[:, None]).sum(1) + 1
    dtype = torch.float32 if single else torch.float64
    step = torch.tensor(0.37 * n, dtype=dtype) / p * (1 / rank.to(dtype))
    return own + step.float()


@pytest.mark.parametrize("reach", [{"lam": 2.0}, {"window": 0.5}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_parameters_of_a_weight_get_their_gradient(reach, reduction):
    scores, relevance = torch.randn(3, 40, requires_grad=True), torch.rand(3, 40) < 0.2
    power = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    given = {"reduction": reduction, "margin": 0.3, **reach}

    def loss_at(exponent):
        return (
            rankgrad.recall_loss(scores, relevance, weight=lambda c: (1 + c) ** exponent, **given).double().sum()
        )

    loss = loss_at(power)
    (grad, learned) = torch.autograd.grad(loss, [scores, power])
    fixed = loss_at(0.7)
    assert torch.equal(torch.autograd.grad(fixed, scores)[0], grad)
    torch.testing.assert_close(loss, fixed)
    step = 1e-4
    expected = (loss_at(0.7 + step) - loss_at(0.7 - step)) / (2 * step)
    torch.testing.assert_close(learned, expected.detach(), rtol=1e-2, atol=1e-3)
