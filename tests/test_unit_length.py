"""Embeddings of unit length: precision, short and zero rows."""

import pytest
import torch

import rankgrad
from rankgrad.engine import embeddings as engine
from rankgrad.pairs import unit_length

from cases import batch


def test_bf16_embeddings_are_normalised_in_float32():
    embeddings, labels = batch(32, 16, dtype=torch.float32)
    low = embeddings.bfloat16()
    pairs = rankgrad.retrieval_pairs(low, labels)
    assert torch.equal(pairs.scores, rankgrad.retrieval_pairs(low.float(), labels).scores)


def test_unit_length_is_torchs_normalize_and_differentiable_twice():
    rows = torch.randn(5, 7, dtype=torch.float64)
    results = []
    for normalise in (unit_length, torch.nn.functional.normalize):
        x = rows.clone().requires_grad_()
        value = normalise(x)
        value.backward(torch.arange(35.0, dtype=torch.float64).reshape(5, 7).sin())
        results.append((value.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    x = rows[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(unit_length, x)
    assert torch.autograd.gradgradcheck(unit_length, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("compiled", [False, True])
def test_short_rows_have_a_bounded_gradient_and_zeros_none(dtype, compiled):
    """x / |x| has a gradient of 1 / |x|: below 1e-6 (fp16: 1e-3) the factor goes to 0 with the length."""
    least = 1e-3 if dtype == torch.float16 else 1e-6
    lengths = torch.tensor([0.0, 1e-30, least / 10, least, 1e-2, 1e10 if dtype != torch.float16 else 1e3])
    rows = (torch.tensor([0.6, 0.8]) * lengths.unsqueeze(1)).to(dtype).requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(unit_length, backend="eager", fullgraph=True) if compiled else unit_length
    unit = run(rows)
    unit.backward(torch.tensor([0.8, -0.6], dtype=unit.dtype).expand(6, 2))  # at a right angle: times the factor
    factor = rows.grad.double().norm(dim=1)
    exact = rows.detach().double().norm(dim=1)
    expected = torch.minimum(1 / exact, exact / least**2)
    torch.testing.assert_close(factor, expected, rtol=2e-2, atol=1e-6)
    assert (rows.grad[0] == 0).all() and factor.max() <= 1.01 / least
    assert torch.equal(unit[0], torch.zeros_like(unit[0]))


def test_a_zero_embedding_in_a_loss():
    for dtype in (torch.float16, torch.float32):
        embeddings, labels = batch(32, 16, dtype=torch.float32)
        embeddings[3] = 0
        x = embeddings.to(dtype).requires_grad_()
        rankgrad.AveragePrecisionLoss(window=0.1)(x, labels).backward()
        assert (x.grad[3] == 0).all() and x.grad.isfinite().all() and (x.grad != 0).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_any_size_have_unit_length(compiled):
    """Squares of numbers beyond 1e19 are infinite in float32: such rows were taken for zeros."""
    rows = torch.randn(6, 16)
    called = torch.compile(unit_length, backend="eager", fullgraph=True) if compiled else unit_length
    expected = torch.nn.functional.normalize(rows)
    for size in (1e-8, 1e19, 1e25, 1e37):
        given = (rows * size).requires_grad_()
        torch.testing.assert_close(called(given), expected)
        called(given)[:, 0].sum().backward()
        assert given.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (0, 7)])
def test_unit_length_of_any_number_of_dimensions(shape):
    rows = torch.randn(shape, requires_grad=True)
    torch.testing.assert_close(unit_length(rows), torch.nn.functional.normalize(rows, dim=-1))
    unit_length(rows).sum().backward()
    assert rows.grad.shape == rows.shape


def test_only_matrices_of_embeddings_go_to_the_kernels(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(engine, "has_triton", lambda: True)
    taken = [
        shape
        for shape in ((4, 8), (2, 4, 8), (8,), (0, 8), (4, 20_000))
        if engine._by_kernels(torch.ones(shape).as_subclass(OnGpu))
    ]
    assert taken == [(4, 8)]
