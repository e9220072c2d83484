"""The losses on score lists against the loops of oracles.py, and the laws they must obey."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad

import oracles
from strategies import forms, lams, lists, margins

WEIGHTS = [0.5, 0.3, 0.0, 0.2]


def loss_of(form, scores, relevance, **kwargs):
    """Any form by the oracle's name for it."""
    if form in ("ap", "log_ap"):
        return rankgrad.average_precision_loss(scores, relevance, log=form == "log_ap", **kwargs)
    weight = form
    if isinstance(form, list):
        weight = torch.tensor(form, dtype=torch.float64)
    elif isinstance(form, tuple):
        weight = form[0]
    return rankgrad.recall_loss(scores, relevance, weight=weight, **kwargs)


#: W = sqrt(c + 1) as a callable, and its slope for the oracle
SQRT = (lambda c: (c + 1) ** 0.5, lambda c: 0.5 * (c + 1) ** -0.5)


def as_torch(mask):
    return None if mask is None else torch.from_numpy(mask)


def value_and_grad(form, scores, relevance, upstream=1.0, **kwargs):
    x = scores.clone().requires_grad_()
    weight = (lambda c: (c + 1).sqrt(),) if form is SQRT else form
    loss = loss_of(weight, x, relevance, **kwargs)
    (loss * upstream).sum().backward()
    return loss.detach(), x.grad


@given(lists(infinities=True), st.one_of(forms, st.sampled_from([WEIGHTS, SQRT])), lams, margins)
def test_value_and_gradient_equal_the_oracle(data, form, lam, margin):
    scores, relevance, mask = data
    loss, grad = value_and_grad(
        form,
        torch.from_numpy(scores),
        torch.from_numpy(relevance),
        lam=lam,
        margin=margin,
        mask=as_torch(mask),
    )
    assert math.isclose(loss, oracles.mean_loss(scores, relevance, form, margin, mask), abs_tol=1e-12)
    expected = oracles.mean_loss_gradient(scores, relevance, form, lam, margin, mask)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@given(lists(), forms, lams, margins)
def test_lower_precision_ranks_as_float32_exactly(dtype, data, form, lam, margin):
    scores, relevance, mask = data
    x = torch.from_numpy(scores).to(dtype)
    loss, grad = value_and_grad(form, x, torch.from_numpy(relevance), lam=lam, margin=margin, mask=as_torch(mask))
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    values = x.float().numpy()
    value = oracles.mean_loss(values, relevance, form, margin, mask, np.float32)
    assert math.isclose(loss, value, rel_tol=1e-6, abs_tol=1e-7)
    expected = oracles.mean_loss_gradient(values, relevance, form, lam, margin, mask, np.float32)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-7}[dtype]
    np.testing.assert_allclose(grad.float().numpy(), expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@given(lists(), forms, lams)
def test_reductions(reduction, data, form, lam):
    scores, relevance, mask = data
    x, rel = torch.from_numpy(scores), torch.from_numpy(relevance)
    upstream = 1.0 if reduction == "sum" else torch.linspace(-1, 2, len(scores), dtype=torch.float64)
    loss, grad = value_and_grad(form, x, rel, upstream, lam=lam, mask=as_torch(mask), reduction=reduction)
    per_list = [
        oracles.list_loss(s, r, form, 0.0, None if mask is None else mask[k])
        for k, (s, r) in enumerate(zip(scores, relevance, strict=True))
    ]
    np.testing.assert_allclose(loss.numpy(), sum(per_list) if reduction == "sum" else per_list, atol=1e-12)
    count = oracles.counting_lists(relevance, mask)
    expected = oracles.mean_loss_gradient(scores, relevance, form, lam, 0.0, mask) * count
    expected = expected if reduction == "sum" else expected * upstream.numpy()[:, None]
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["ap", "log_ap", "log", "loglog"])
@pytest.mark.parametrize(("n", "share"), [(50, 0.3), (1000, 0.01), (1000, 0.5)])
def test_longer_lists(form, n, share):
    rng = np.random.default_rng(n)
    scores, relevance = rng.normal(size=(2, n)), rng.random((2, n)) < share
    loss, grad = value_and_grad(form, torch.from_numpy(scores), torch.from_numpy(relevance), lam=0.3, margin=0.1)
    assert math.isclose(loss, oracles.mean_loss(scores, relevance, form, 0.1), rel_tol=1e-12)
    expected = oracles.mean_loss_gradient(scores, relevance, form, 0.3, 0.1)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------ formulas


def test_the_closed_forms_are_the_infinite_sums_of_the_paper():
    """L_rec = sum_K w_K (1 - r~@K) with the appendix's weights is the mean of log(1 + c), log(1 + log(1 + c))."""
    torch.manual_seed(1)
    scores, relevance = torch.randn(6, 40, dtype=torch.float64), torch.rand(6, 40) < 0.2
    for name, weight in (
        ("log", lambda k: math.log(1 + 1 / k)),
        ("loglog", lambda k: math.log(1 + math.log(1 + 1 / k) / (1 + math.log(k)))),
    ):
        total = torch.zeros(6, dtype=torch.float64)
        for k in range(1, 41):  # r~@K is 1 beyond the number of irrelevant items: the sum is finite
            missed = 1 - rankgrad.metrics.refined_recall_at_k(scores, relevance, k=k, reduction="none")
            total += weight(k) * missed
        closed = rankgrad.recall_loss(scores, relevance, lam=1.0, weight=name, reduction="none")
        given_weights = torch.tensor([weight(k) for k in range(1, 41)], dtype=torch.float64)
        by_weights = rankgrad.recall_loss(scores, relevance, lam=1.0, weight=given_weights, reduction="none")
        torch.testing.assert_close(closed, total)
        torch.testing.assert_close(by_weights, total)


def test_log_form_bounds_the_ap_loss_and_starts_where_ap_stands_still():
    torch.manual_seed(2)
    scores, relevance = torch.randn(20, 2000), torch.rand(20, 2000) < 0.005
    ap = rankgrad.average_precision_loss(scores, relevance, lam=0.5, reduction="none")
    log = rankgrad.average_precision_loss(scores, relevance, lam=0.5, log=True, reduction="none")
    assert (log >= ap).all()
    grads = {}
    for form in ("ap", "log_ap"):
        _, grad = value_and_grad(form, scores[:1], relevance[:1], lam=0.5)
        grads[form] = grad.abs().sum()
    assert grads["log_ap"] > 10 * grads["ap"]


def test_losses_are_one_minus_the_metrics():
    torch.manual_seed(3)
    scores, relevance = torch.randn(7, 30).round(decimals=1), torch.rand(7, 30) < 0.3
    mask = torch.rand(7, 30) < 0.8
    ap = rankgrad.average_precision_loss(scores, relevance, lam=1.0, mask=mask)
    torch.testing.assert_close(1 - ap, rankgrad.metrics.average_precision(scores, relevance, mask=mask))
    m = rankgrad.mean_average_precision_loss(scores, relevance, lam=1.0, mask=mask)
    torch.testing.assert_close(1 - m, rankgrad.metrics.mean_average_precision(scores, relevance, mask=mask))


@pytest.mark.parametrize("log", [False, True])
def test_mean_and_pooled_are_columns_and_one_list(log):
    rng = np.random.default_rng(0)
    scores, relevance = rng.normal(size=(12, 5)).round(1), rng.random((12, 5)) < 0.3
    relevance[:, 2] = False
    mask = rng.random((12, 5)) < 0.8
    form = "log_ap" if log else "ap"
    kwargs = {"lam": 0.4, "margin": 0.3, "log": log, "mask": torch.from_numpy(mask)}
    x = torch.from_numpy(scores).requires_grad_()
    rankgrad.mean_average_precision_loss(x, torch.from_numpy(relevance), **kwargs).backward()
    expected = oracles.mean_loss_gradient(scores.T, relevance.T, form, 0.4, 0.3, mask.T).T
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12)
    x.grad = None
    pooled = rankgrad.pooled_average_precision_loss(x, torch.from_numpy(relevance), **kwargs)
    pooled.backward()
    flat = [a.reshape(1, -1) for a in (scores, relevance, mask)]
    assert math.isclose(pooled.item(), oracles.mean_loss(flat[0], flat[1], form, 0.3, flat[2]), rel_tol=1e-12)
    expected = oracles.mean_loss_gradient(flat[0], flat[1], form, 0.4, 0.3, flat[2]).reshape(12, 5)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12)


# ---------------------------------------------------------------------------------------------- laws


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


# ----------------------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("form", ["ap", "log_ap", "log", "loglog", WEIGHTS, SQRT])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 1), (4,), (2, 3, 4)])
@pytest.mark.parametrize("fill", [False, True])
def test_nothing_and_everything_relevant(form, shape, fill):
    scores = torch.randn(shape)
    loss, grad = value_and_grad(form, scores, torch.full(shape, fill), lam=0.2)
    w0 = 1.0 if form is SQRT and fill and scores.numel() else 0.0  # W(0) = 1 there
    assert loss == w0
    assert (grad == 0).all() or form is SQRT
    none = value_and_grad(form, scores, torch.full(shape, fill), lam=0.2, reduction="none")[0]
    assert none.shape == shape[:-1]


@pytest.mark.parametrize("form", ["ap", "log", WEIGHTS, SQRT])
def test_everything_masked(form):
    scores, relevance = torch.randn(2, 5), torch.ones(2, 5, dtype=torch.bool)
    loss, grad = value_and_grad(form, scores, relevance, lam=0.2, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert loss == 0
    assert (grad == 0).all()


def test_nan_behind_the_mask_is_ignored():
    scores = torch.tensor([[0.5, torch.nan, 0.1]])
    mask = torch.tensor([[True, False, True]])
    loss, grad = value_and_grad("ap", scores, torch.tensor([[False, True, True]]), lam=1.0, mask=mask)
    assert loss == 0.5
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64])
def test_relevance_dtypes(dtype):
    scores, relevance = torch.randn(3, 10), torch.rand(3, 10) < 0.4
    expected = value_and_grad("ap", scores, relevance, lam=1.0)
    got = value_and_grad("ap", scores, relevance.to(dtype), lam=1.0)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_non_contiguous_and_expanded_inputs():
    scores, relevance = torch.randn(10, 6), torch.rand(10, 6) < 0.4
    a = value_and_grad("ap", scores.T, relevance.T, lam=1.0)
    b = value_and_grad("ap", scores.T.contiguous(), relevance.T.contiguous(), lam=1.0)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    row = torch.randn(6, requires_grad=True)
    rankgrad.average_precision_loss(row.expand(4, 6), relevance[:4], lam=1.0).backward()
    assert row.grad.shape == (6,)


def test_memory_of_the_same_items_is_a_longer_list():
    """Candidates without gradient change neither the value nor the others' gradient."""
    scores, relevance = torch.randn(3, 20, dtype=torch.float64), torch.rand(3, 20) < 0.3
    whole, grad = value_and_grad("ap", scores, relevance, lam=0.5)
    part = scores[:, :8].clone().requires_grad_()
    loss = rankgrad.average_precision_loss(torch.cat([part, scores[:, 8:]], 1), relevance, lam=0.5)
    loss.backward()
    assert torch.equal(loss.detach(), whole)
    assert torch.equal(part.grad, grad[:, :8])


# ------------------------------------------------------------------------- lambda and the loss scale


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


def test_weights_have_no_slope_beyond_their_end():
    """20 irrelevant items above: passing one gains nothing when only the first four places are weighted."""
    scores, relevance = torch.arange(21.0).flip(0), torch.zeros(21, dtype=torch.bool)
    relevance[20] = True
    _, grad = value_and_grad(WEIGHTS, scores, relevance, lam=100.0)
    assert (grad == 0).all()


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


def test_relevance_behind_the_mask_may_be_anything_and_may_need_a_gradient():
    scores = torch.randn(6, requires_grad=True)
    relevance = torch.tensor([1, -1, 0, 1, -1, 0])
    masked = rankgrad.average_precision_loss(scores, relevance, lam=1.0, mask=relevance >= 0)
    expected = rankgrad.average_precision_loss(scores[relevance >= 0], relevance[relevance >= 0], lam=1.0)
    assert masked == expected
    soft = (relevance == 1).float().requires_grad_()
    rankgrad.average_precision_loss(scores, soft, lam=1.0).backward()
    assert soft.grad is None


def test_a_weight_without_a_slope_gives_no_harmless_looking_gradient():
    scores, relevance = torch.randn(2, 9, requires_grad=True), torch.rand(2, 9) < 0.5
    relevance[:, scores.argmax(-1)] = True  # something has c = 0, where this W has slope 0/0
    for reach in ({"lam": 1.0}, {}):
        weight = (lambda c: torch.where(c > 0, c.log() + 1, 0 * c)) if reach else (lambda c: (c - 1).sqrt())
        with pytest.raises(ValueError, match="weight: expected numbers, received NaN"):
            rankgrad.recall_loss(scores, relevance, weight=weight, **reach)


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
