"""Losses beyond the paper: proxies between two thresholds, and average precision with a hinge on pairs."""

import math

import pytest
import torch

import rankgrad
from rankgrad.losses._blocks import GlobalStats
from rankgrad.pairs import Pairs

import oracles


def test_proxies_equal_the_loops():
    torch.manual_seed(3)
    loss = rankgrad.ProxyRankingLoss(5, 6, window=0.7, threshold=0.2, pairs=0).double()
    embeddings = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 4, 4, 4])  # no item of class 3
    value = loss(embeddings, labels)
    (2 * value).backward()
    x, p = embeddings.detach().clone().requires_grad_(), loss.proxies.detach().clone().requires_grad_()
    cosines = torch.nn.functional.normalize(p, dim=1) @ torch.nn.functional.normalize(x, dim=1).T
    expected, by_cosine = oracles.proxy_loss(cosines.detach().numpy(), labels.tolist(), 0.7, 0.2)
    assert math.isclose(value.item(), expected, rel_tol=1e-12)
    cosines.backward(2 * torch.from_numpy(by_cosine))
    torch.testing.assert_close(embeddings.grad, x.grad)
    torch.testing.assert_close(loss.proxies.grad, p.grad)
    assert loss.proxies.grad[3].abs().sum() > 0  # a class that is not in the batch pushes too


def forces(cosine, items=60, classes=20):
    """The forces on a network that has all items at one cosine to all proxies: gradients of all scores, summed."""
    loss = rankgrad.ProxyRankingLoss(classes, 4, pairs=0).double()
    scores = torch.full((classes, items), cosine, dtype=torch.float64, requires_grad=True)
    relevance = torch.arange(classes).unsqueeze(1) == torch.arange(items) % classes
    rankgrad.recall_loss(scores, relevance, window=loss.window).backward()
    pairs = Pairs(scores.detach(), relevance, None)
    _, force = loss.spec().forces_on(pairs, GlobalStats(), torch.tensor(classes), classes)
    return (scores.grad + force).sum().item() * loss.window


def test_moving_all_items_together_gains_nothing():
    """Between the thresholds the forces of a collapsed batch cancel; beyond either of them one remains.

    Items at the lower threshold are pushed, items at the upper one are where they should be.
    """
    n = 60 - 3
    for cosine in (-0.1, -0.09, 0.0, 0.09):
        assert forces(cosine) == pytest.approx(n / (1 + n) - 1)  # of parts that are 1 each
    for cosine in (-0.99, -0.5, -0.11):
        assert forces(cosine) == pytest.approx(-1)  # upwards, however far below
    for cosine in (0.1, 0.11, 0.5, 0.99):
        assert forces(cosine) == pytest.approx(n / (1 + n))  # downwards, however far above


def pair_loss_by_hand(rows, labels, items, weight, pull, push):
    near, far = [], []
    for i, j in ((i, j) for i in range(len(rows)) for j in range(len(rows)) if items[i] != items[j]):
        gap = pull - rows[i] @ rows[j] if labels[i] == labels[j] else rows[i] @ rows[j] - push
        if gap > 0:
            (near if labels[i] == labels[j] else far).append(gap)
    return weight * sum(sum(gaps) / len(gaps) for gaps in (near, far) if gaps)


@pytest.mark.parametrize(("pull", "push"), [(0.9, 0.6), (0.3, -0.2), (-1.0, 1.0)])
def test_pairs_have_ranks_and_a_hinge(pull, push):
    torch.manual_seed(1)
    embeddings = torch.randn(10, 4, dtype=torch.float64)
    labels, items = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3]), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 6, 8])
    x, y = (embeddings.clone().requires_grad_() for _ in range(2))
    loss = rankgrad.PairRankingLoss(hinge=0.7, pull=pull, push=push)
    value = loss(x, labels, items=items)
    (2 * value).backward()
    ranks = rankgrad.AveragePrecisionLoss(window=0.1, margin=0.05)(y, labels, items=items)
    rows = torch.nn.functional.normalize(y, dim=1)
    expected = ranks + pair_loss_by_hand(rows, labels.tolist(), items.tolist(), 0.7, pull, push)
    (2 * expected).backward()
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-15)


def test_pairs_at_a_threshold_have_no_part_in_the_hinge():
    """Neither in the means nor in the gradient; a rectifier makes many similarities of exactly 0."""
    x, labels = torch.eye(5, dtype=torch.float64).requires_grad_(), torch.tensor([0, 0, 1, 1, 2])
    x.data[4, 0] = 1  # one pair of two classes above 0
    rows = torch.nn.functional.normalize(x, dim=1)
    spec = rankgrad.PairRankingLoss(hinge=1, pull=0.0, push=0.0).spec(torch.float64)
    relevance, others = labels.unsqueeze(0) == labels.unsqueeze(1), ~torch.eye(5, dtype=torch.bool)
    value, force = spec.forces_on(Pairs((rows @ rows.T).detach(), relevance, others), GlobalStats(), 5, 5)
    assert value.item() == pytest.approx(0.5**0.5) and force.nonzero().tolist() == [[0, 4], [4, 0]]
    assert force.sum() == 1


def test_a_collapsed_batch_is_driven_apart_by_the_hinge():
    """All embeddings nearly equal: ranks have no force along the common direction, the hinge has."""
    torch.manual_seed(0)
    x = (torch.tensor([1.0, 0.0, 0.0]) + 0.05 * torch.randn(12, 3)).requires_grad_()
    labels = torch.arange(12) // 3
    loss = rankgrad.PairRankingLoss()
    spread = [1 - torch.nn.functional.normalize(x, dim=1).mean(0).norm().item()]
    for _ in range(50):
        (grad,) = torch.autograd.grad(loss(x, labels), x)
        with torch.no_grad():
            x -= 0.1 * grad / grad.norm().clamp(min=1e-6)
        spread.append(1 - torch.nn.functional.normalize(x, dim=1).mean(0).norm().item())
    assert spread[0] < 0.01 and spread[-1] > 0.2


def test_pairs_remember_in_lists_of_their_own():
    torch.manual_seed(2)
    with_hinge, ranks = (
        rankgrad.PairRankingLoss(memory=1),
        rankgrad.AveragePrecisionLoss(window=0.1, margin=0.05, memory=1),
    )
    for _ in range(2):
        x = torch.randn(10, 4, dtype=torch.float64)
        x, y, labels = x.clone().requires_grad_(), x.requires_grad_(), torch.arange(10) // 2
        rows = torch.nn.functional.normalize(y, dim=1)
        value = with_hinge(x, labels)
        expected = ranks(y, labels) + pair_loss_by_hand(rows, labels.tolist(), range(10), 0.3, 0.9, 0.6)
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
        value.backward()
        expected.backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-16)


def test_pairs_add_the_items_average_precision():
    torch.manual_seed(4)
    embeddings, labels = torch.randn(8, 6), torch.arange(8) // 2
    alone, both = (rankgrad.ProxyRankingLoss(4, 6, pairs=weight) for weight in (0.0, 0.5))
    both.load_state_dict(alone.state_dict())
    items = rankgrad.AveragePrecisionLoss(window=0.1, margin=0.05)(embeddings, labels)
    torch.testing.assert_close(both(embeddings, labels), alone(embeddings, labels) + 0.5 * items)


@pytest.mark.parametrize(("classes", "weight"), [(4, 1), (12, 1), (13, 13 / 12), (24, 2), (48, 4), (100, 4)])
def test_pairs_weigh_more_where_a_batch_shows_few_classes(classes, weight):
    """Four classes in the batch, in any order: the weight is classes / 12, from 1 to 4."""
    torch.manual_seed(5)
    embeddings, labels = torch.randn(8, 6), (torch.arange(8) % 4)[torch.randperm(8)] * (classes // 4)
    by_rule = rankgrad.ProxyRankingLoss(classes, 6)
    by_number = rankgrad.ProxyRankingLoss(classes, 6, pairs=weight)
    by_number.load_state_dict(by_rule.state_dict())
    torch.testing.assert_close(by_rule(embeddings, labels), by_number(embeddings, labels))


def test_what_the_thresholds_ask_for_costs_nothing():
    """Own items above the upper threshold, others below the lower one: no loss and no gradient."""
    basis = torch.eye(3)
    loss = rankgrad.ProxyRankingLoss(3, 3, threshold=0.1, pairs=0)
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
    with pytest.raises(ValueError, match="pairs: expected a number >= 0 or 'auto', received 'Auto'"):
        rankgrad.ProxyRankingLoss(3, 4, pairs="Auto")
    with pytest.raises(ValueError, match=r"pairs: expected a .*number >= 0, received -1"):
        rankgrad.ProxyRankingLoss(3, 4, pairs=-1)


def test_proxies_learn_a_linear_embedding():
    """Six clusters in noise: a linear map trained with proxies retrieves what the raw features do not."""
    torch.manual_seed(5)
    centres = torch.randn(6, 4)
    labels = torch.arange(6).repeat(20)
    features = torch.cat([centres[labels], torch.randn(120, 28)], 1)
    network = torch.nn.Linear(32, 8, bias=False)
    loss = rankgrad.ProxyRankingLoss(6, 8)
    optimizer = torch.optim.Adam(rankgrad.parameter_groups(network, loss, lr=0.01))

    def precision():
        with torch.no_grad():
            scores, relevance, mask = rankgrad.retrieval_pairs(network(features), labels)
        return rankgrad.metrics.average_precision(scores, relevance, mask=mask)

    before = precision()
    for _ in range(100):
        optimizer.zero_grad()
        loss(network(features), labels).backward()
        optimizer.step()
    assert before < 0.3
    assert precision() > 0.8


def test_a_weight_whose_slope_is_infinite_at_nothing_above():
    """The best item has no other to pass: however steep its slope, it has no gradient."""
    results = []
    for weight in (torch.sqrt, lambda k: (k + 1e-300).sqrt()):
        scores = torch.tensor([3.0, 2, 1, 0], dtype=torch.float64, requires_grad=True)
        loss = rankgrad.recall_loss(scores, torch.tensor([1, 0, 1, 0]), window=1.5, weight=weight)
        loss.backward()
        results.append(scores.grad)
    assert results[0].isfinite().all() and results[0].abs().sum() > 0
    torch.testing.assert_close(*results)
