"""The losses with a fixed score window, against loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad

import oracles
from strategies import forms, lists, margins
from test_losses import SQRT, WEIGHTS, as_torch, value_and_grad

windows = st.sampled_from([0.1, 0.25, 0.5, 2.0])


@given(lists(infinities=True), st.one_of(forms, st.sampled_from([WEIGHTS, SQRT])), windows, margins)
def test_value_and_gradient_equal_the_oracle(data, form, window, margin):
    scores, relevance, mask = data
    x, rel = torch.from_numpy(scores), torch.from_numpy(relevance)
    loss, grad = value_and_grad(form, x, rel, window=window, margin=margin, mask=as_torch(mask))
    assert math.isclose(loss, oracles.mean_loss(scores, relevance, form, margin, mask), abs_tol=1e-12)
    expected = oracles.window_gradient(scores, relevance, form, window, margin, mask)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@given(lists(), forms, windows, margins)
def test_lower_precision_ranks_as_float32(dtype, data, form, window, margin):
    scores, relevance, mask = data
    x = torch.from_numpy(scores).to(dtype)
    _, grad = value_and_grad(
        form, x, torch.from_numpy(relevance), window=window, margin=margin, mask=as_torch(mask)
    )
    assert grad.dtype == dtype
    expected = oracles.window_gradient(x.float().numpy(), relevance, form, window, margin, mask, np.float32)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype]
    np.testing.assert_allclose(grad.float().numpy(), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@given(lists(), forms, windows)
def test_reductions(reduction, data, form, window):
    scores, relevance, mask = data
    x, rel = torch.from_numpy(scores), torch.from_numpy(relevance)
    upstream = 1.0 if reduction == "sum" else torch.linspace(-1, 2, len(scores), dtype=torch.float64)
    _, grad = value_and_grad(form, x, rel, upstream, window=window, mask=as_torch(mask), reduction=reduction)
    expected = oracles.window_gradient(scores, relevance, form, window, 0.0, mask)
    expected *= oracles.counting_lists(relevance, mask)
    expected = expected if reduction == "sum" else expected * upstream.numpy()[:, None]
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-9, atol=1e-13)


def test_it_is_algorithm_1_where_all_slopes_are_equal():
    """One relevant item: a lambda that makes its step as long as the window gives the same gradient."""
    torch.manual_seed(0)
    scores = torch.randn(1, 40, dtype=torch.float64)
    relevance = torch.zeros(1, 40, dtype=torch.bool)
    relevance[0, 7] = True
    c = int(((scores >= scores[0, 7]) & ~relevance).sum())
    lam = 0.8 * (1 + c) / 40  # step = lam n slope, slope = 1 / (1 + c)
    _, by_lam = value_and_grad("log", scores, relevance, lam=lam)
    _, by_window = value_and_grad("log", scores, relevance, window=0.8)
    assert by_lam.abs().sum() > 0
    torch.testing.assert_close(by_window, by_lam)


def test_the_gradient_sums_to_zero_and_does_not_depend_on_other_lists():
    torch.manual_seed(1)
    scores, relevance = torch.randn(5, 60, dtype=torch.float64), torch.rand(5, 60) < 0.2
    _, together = value_and_grad("ap", scores, relevance, window=0.5, reduction="sum")
    for k in range(5):
        _, alone = value_and_grad("ap", scores[k], relevance[k], window=0.5)
        torch.testing.assert_close(together[k], alone)
    torch.testing.assert_close(together.sum(1), torch.zeros(5, dtype=torch.float64))


def test_compile_vmap_and_nan():
    torch.manual_seed(2)
    scores, relevance = torch.randn(3, 4, 20), torch.rand(3, 4, 20) < 0.3

    def loss(s, r):
        return rankgrad.average_precision_loss(s, r, window=0.3, margin=0.1)

    separate = torch.stack([loss(s, r) for s, r in zip(scores, relevance, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(scores, relevance), separate)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    loss(x, relevance).backward()
    compiled(y, relevance).backward()
    assert torch.equal(x.grad, y.grad)
    scores[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="scores: expected no NaN"):
        loss(scores, relevance)


def test_lam_or_window():
    scores, relevance = torch.randn(5), torch.tensor([True, False, False, True, False])
    with pytest.raises(ValueError, match=r"received lam=0.2 and window=0.1"):
        rankgrad.average_precision_loss(scores, relevance, lam=0.2, window=0.1)
    with pytest.raises(ValueError, match=r"window: expected a finite number > 0, received 0"):
        rankgrad.recall_loss(scores, relevance, window=0)
    with pytest.raises(ValueError, match=r"lam, window: expected one of them, received lam=4 and window=0.1"):
        rankgrad.RecallLoss(lam=4, window=0.1)
    assert "window=0.1" in repr(rankgrad.AveragePrecisionLoss(window=0.1))
    assert "lam=0.2" in repr(rankgrad.AveragePrecisionLoss(lam=0.2))
    assert "margin='auto'" in repr(rankgrad.AveragePrecisionLoss())


def test_class_scores_by_window():
    """Both parts of the detection loss with the window's gradient, the memory's columns without one."""
    torch.manual_seed(7)
    loss = rankgrad.ClassRankingLoss(window=0.5, margin=0.2, memory=1, form="log_ap")
    assert "window=0.5" in repr(loss)
    old, old_relevance = torch.randn(12, 3, dtype=torch.float64), torch.rand(12, 3) < 0.3
    loss(old, old_relevance)
    now = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    relevance = torch.rand(10, 3) < 0.3
    loss(now, relevance).backward()
    scores = torch.cat([now.detach(), old]).numpy()
    all_relevance = torch.cat([relevance, old_relevance]).numpy()
    by_class = oracles.window_gradient(scores.T, all_relevance.T, "log_ap", 0.5, 0.2).T
    pooled = oracles.window_gradient(scores.reshape(1, -1), all_relevance.reshape(1, -1), "log_ap", 0.5, 0.2)
    expected = (2 * by_class + pooled.reshape(scores.shape)) / 3
    np.testing.assert_allclose(now.grad.numpy(), expected[:10], rtol=1e-9, atol=1e-13)
