"""Solvers of linear problems made differentiable."""

import pytest
import torch

import rankgrad


def test_blackbox_shortest_path():
    """Another solver: the cheapest way through a grid, from SciPy; its gradient teaches the costs."""
    from examples.shortest_path import learn, shortest_path

    costs = torch.tensor([[1.0, 9.0, 9.0], [1.0, 1.0, 9.0], [9.0, 1.0, 1.0]], requires_grad=True)
    path = rankgrad.blackbox(shortest_path, lam=20.0)(costs)
    assert path.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    path[1, 0].backward()  # avoid this cell: make it dearer
    assert costs.grad[1, 0] < 0
    before, after = learn()
    assert before > 0
    assert after == 0


def test_blackbox_accepts_integer_and_in_place_solvers():
    costs = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)

    def spoiling(y):
        order = torch.argsort(torch.argsort(-y)) + 1
        y.zero_()
        return order  # int64

    ranks = rankgrad.blackbox(spoiling, lam=2.0)(costs)
    assert ranks.dtype == torch.float32
    ranks[0].backward()
    assert costs.tolist() == [3.0, 1.0, 2.0]


def test_blackbox_refuses_second_derivatives_and_results_that_are_no_tensors():
    costs = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    ranks = rankgrad.blackbox(lambda y: torch.argsort(torch.argsort(-y)) + 1, lam=2.0)(costs)
    (grad,) = torch.autograd.grad(ranks[0], costs, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
    with pytest.raises(TypeError, match="solver: expected to return a tensor"):
        rankgrad.blackbox(lambda y: y.numpy(), lam=1.0)(costs)
