"""The losses with a fixed score window against loops, and the proxies that rank with it."""

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


def test_the_gradient_sums_to_zero_and_does_not_hang_on_other_lists():
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


# ------------------------------------------------------------------------------------------ proxies


def bars_by_hand(proxies, embeddings, labels, window, threshold):
    """Value, and gradient with respect to the cosines, of pull + push by the oracle's loops."""
    unit = lambda t: t / np.linalg.norm(t, axis=1, keepdims=True)  # noqa: E731
    cosines = unit(proxies) @ unit(embeddings).T
    relevance = np.arange(len(proxies))[:, None] == labels
    bar = np.full((len(proxies), 1), threshold)
    yes = np.ones_like(bar, dtype=bool)
    pull = (np.hstack([cosines, bar]), np.hstack([relevance, ~yes]), "log")
    push = (np.hstack([cosines, -bar]), np.hstack([relevance, yes]), "log")
    mask = np.hstack([~relevance, yes])
    value = oracles.mean_loss(*pull) + oracles.mean_loss(*push, 0.0, mask)
    gradient = oracles.window_gradient(*pull, window) + oracles.window_gradient(*push, window, 0.0, mask)
    return value, gradient[:, :-1]


def test_proxies_rank_the_batch_between_two_bars():
    torch.manual_seed(3)
    loss = rankgrad.ProxyRankingLoss(5, 6, window=0.7, threshold=0.2, pairs=0, attraction=0).double()
    embeddings = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 4, 4, 4])  # nobody of class 3
    value = loss(embeddings, labels)
    value.backward()
    expected, by_cosine = bars_by_hand(
        loss.proxies.detach().numpy(), embeddings.detach().numpy(), labels.numpy(), 0.7, 0.2
    )
    assert math.isclose(value.item(), expected, rel_tol=1e-12)
    x, p = embeddings.detach().clone().requires_grad_(), loss.proxies.detach().clone().requires_grad_()
    cosines = torch.nn.functional.normalize(p, dim=1) @ torch.nn.functional.normalize(x, dim=1).T
    cosines.backward(torch.from_numpy(by_cosine))
    torch.testing.assert_close(embeddings.grad, x.grad)
    torch.testing.assert_close(loss.proxies.grad, p.grad)
    assert loss.proxies.grad[3].abs().sum() > 0  # a class that is not in the batch pushes too


def test_pairs_add_the_items_average_precision():
    torch.manual_seed(4)
    embeddings, labels = torch.randn(8, 6), torch.arange(8) // 2
    alone, both = (rankgrad.ProxyRankingLoss(4, 6, pairs=weight) for weight in (0.0, 0.5))
    both.load_state_dict(alone.state_dict())
    items = rankgrad.AveragePrecisionLoss(window=0.1, margin=0.05)(embeddings, labels)
    torch.testing.assert_close(both(embeddings, labels), alone(embeddings, labels) + 0.5 * items)


@pytest.mark.parametrize("counts", [[3, 1, 2], [1, 1, 1], [4, 4, 4]])
def test_proxies_attraction_is_the_mean_of_pairs(counts):
    torch.manual_seed(0)
    alone, both = (rankgrad.ProxyRankingLoss(4, 6, attraction=weight).double() for weight in (0.0, 0.7))
    both.load_state_dict(alone.state_dict())
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    embeddings = torch.randn(len(labels), 6, dtype=torch.float64, requires_grad=True)
    rows = torch.nn.functional.normalize(embeddings)
    apart = []
    for i, label in enumerate(labels):
        others = [1 - rows[i] @ rows[j] for j in range(len(labels)) if j != i and labels[j] == label]
        if others:
            apart.append(sum(others) / len(others))
    expected = 0.7 * sum(apart) / max(len(apart), 1)
    value = both(embeddings, labels) - alone(embeddings, labels)
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64))
    if apart:
        gradients = [torch.autograd.grad(part, embeddings, retain_graph=True)[0] for part in (value, expected)]
        torch.testing.assert_close(*gradients)


def test_what_the_bars_ask_for_costs_nothing():
    """Own items above the upper bar, others below the lower one: no loss and no gradient."""
    basis = torch.eye(3)
    loss = rankgrad.ProxyRankingLoss(3, 3, threshold=0.1, pairs=0, attraction=0)
    loss.proxies.data = basis - 0.3  # cosines with the others' axes are negative
    embeddings = basis.repeat(2, 1).requires_grad_()
    value = loss(embeddings, torch.tensor([0, 1, 2, 0, 1, 2]))
    value.backward()
    assert value == 0
    assert not embeddings.grad.any()


def test_proxies_compile():
    torch.manual_seed(6)
    loss = rankgrad.ProxyRankingLoss(4, 6)
    embeddings, labels = torch.randn(8, 6), torch.arange(8) // 2
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(embeddings, labels), loss(embeddings, labels))


def test_proxies_complain_by_name():
    loss = rankgrad.ProxyRankingLoss(3, 4)
    with pytest.raises(ValueError, match=r"labels: expected 0 to 2 \(num_classes - 1\), received 3"):
        loss(torch.randn(2, 4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="embeddings: expected rows of length 4, as the proxies"):
        loss(torch.randn(2, 5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="num_classes: expected an integer >= 1"):
        rankgrad.ProxyRankingLoss(0, 4)


def test_proxies_learn_a_linear_embedding():
    """Six clusters in noise: a linear map trained with proxies retrieves what the raw features do not."""
    torch.manual_seed(5)
    centres = torch.randn(6, 4)
    labels = torch.arange(6).repeat(20)
    features = torch.cat([centres[labels], torch.randn(120, 28)], 1)
    network = torch.nn.Linear(32, 8, bias=False)
    loss = rankgrad.ProxyRankingLoss(6, 8)
    groups = [{"params": network.parameters()}, {"params": loss.parameters(), "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=0.01)

    def precision():
        with torch.no_grad():
            scores, relevance, mask = rankgrad.retrieval_pairs(network(features), labels)
        return rankgrad.metrics.average_precision(scores, relevance, mask=mask)

    before = precision()
    for _ in range(60):
        optimizer.zero_grad()
        loss(network(features), labels).backward()
        optimizer.step()
    assert before < 0.3
    assert precision() > 0.8


def test_a_weight_whose_slope_is_infinite_at_nothing_above():
    """The best item has nobody to pass: however steep, it pulls at nobody."""
    results = []
    for weight in (torch.sqrt, lambda k: (k + 1e-300).sqrt()):
        scores = torch.tensor([3.0, 2, 1, 0], dtype=torch.float64, requires_grad=True)
        loss = rankgrad.recall_loss(scores, torch.tensor([1, 0, 1, 0]), window=1.5, weight=weight)
        loss.backward()
        results.append(scores.grad)
    assert results[0].isfinite().all() and results[0].abs().sum() > 0
    torch.testing.assert_close(*results)
