"""The losses on score lists against the loops of oracles.py and against formulas, and their edge cases."""

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
        listed = rankgrad.recall_loss(scores, relevance, weight=given_weights.tolist(), reduction="none")
        assert torch.equal(listed, by_weights)


def test_log_form_bounds_the_ap_loss_and_has_a_gradient_where_ap_has_none():
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


def test_weights_have_no_slope_beyond_their_end():
    """20 irrelevant items above: passing one gains nothing when only the first four places are weighted."""
    scores, relevance = torch.arange(21.0).flip(0), torch.zeros(21, dtype=torch.bool)
    relevance[20] = True
    _, grad = value_and_grad(WEIGHTS, scores, relevance, lam=100.0)
    assert (grad == 0).all()


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
