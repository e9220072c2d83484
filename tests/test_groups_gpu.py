"""Ragged lists and losses of all ranks on a CUDA device: as on the CPU, and without waiting for the device."""

import pytest
import torch

import rankgrad
from rankgrad import metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
REACHES = [{"lam": 2.0}, {"window": 0.7}, {"margin": "auto"}]
LOSSES = {
    "ap": lambda s, t, **k: rankgrad.average_precision_loss(s, t > 1, **k),
    "recall": lambda s, t, **k: rankgrad.recall_loss(s, t > 1, weight=torch.sqrt, **k),
    "ndcg": lambda s, t, **k: rankgrad.ndcg_loss(s, t, k=5, **k),
    "spearman": lambda s, t, **k: rankgrad.spearman_loss(s, t, **k),
}


def ragged(dtype):
    generator = torch.Generator().manual_seed(0)
    groups = torch.cat([torch.arange(300).repeat_interleave(3), torch.full((20_000,), 300)])
    groups = groups[torch.randperm(len(groups), generator=generator)]
    scores = torch.randn(len(groups), generator=generator, dtype=dtype)
    return scores, torch.randint(0, 4, scores.shape, generator=generator), groups


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_on_the_cpu_and_without_a_sync(name, reach, dtype):
    scores, target, groups = ragged(dtype)
    x, y = scores.clone().requires_grad_(), scores.cuda().requires_grad_()
    target_there, groups_there = target.cuda(), groups.cuda()
    loss = LOSSES[name]
    expected = loss(x, target, groups=groups, **reach)
    expected.backward()

    def step(**given):
        y.grad = None
        value = loss(y, target_there, groups=groups_there, **given, **reach)
        value.backward()
        return value.detach(), y.grad

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [step(), step(num_groups=301)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for value, grad in runs:
        torch.testing.assert_close(value.cpu(), expected.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad.cpu(), x.grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(grad, runs[0][1])


def test_none_needs_the_number_of_groups_and_wrong_ids_are_nan():
    scores, target, groups = (one.cuda() for one in ragged(torch.float32))
    with pytest.raises(ValueError, match="num_groups"):
        metrics.ndcg(scores, target, groups=groups, reduction="none")
    each = metrics.ndcg(scores, target, groups=groups, num_groups=301, reduction="none")
    here = metrics.ndcg(scores.cpu(), target.cpu(), groups=groups.cpu(), reduction="none")
    torch.testing.assert_close(each.cpu(), here)
    assert rankgrad.average_precision_loss(scores, target > 1, groups=groups, num_groups=300).isnan()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reach", REACHES)
def test_rows_without_a_sync(name, reach):
    generator = torch.Generator().manual_seed(1)
    scores, target = torch.randn(8, 200, generator=generator), torch.randint(0, 4, (8, 200), generator=generator)
    x, y, there = scores.clone().requires_grad_(), scores.cuda().requires_grad_(), target.cuda()
    LOSSES[name](x, target, **reach).backward()
    LOSSES[name](y, there, **reach).backward()
    y.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        LOSSES[name](y, there, **reach).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-5, atol=1e-7)
