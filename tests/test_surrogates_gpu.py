"""The baseline methods on a CUDA device: the CPU's numbers, no host sync where promised, NaN instead of errors."""

import pytest
import torch

from rankgrad import surrogates

pytestmark = pytest.mark.gpu

#: Those that can size everything from their arguments. The divide and conquer asks how many items are left.
NO_SYNC = ["fastap", "chen2019", "yue2007", "smoothap", "permutahedron", "sodeep_fixed"]


def hint(name):
    return {"max_relevant": 60} if name in ("chen2019", "yue2007", "mohapatra2018", "smoothap") else {}


def value_and_grad(method, scores, relevance, arguments, **kwargs):
    x = scores.clone().requires_grad_()
    out = method.loss(x, relevance, **arguments, **kwargs)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("name", surrogates.METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gpu_gives_the_numbers_of_the_cpu(name, dtype):
    method = surrogates.METHODS[name]
    scores = (torch.rand(4, 60, dtype=dtype) * 2 - 1).round(decimals=2)
    relevance, mask = torch.rand(4, 60) < 0.3, torch.rand(4, 60) < 0.8
    arguments = method.arguments(scores)
    expected = value_and_grad(method, scores, relevance, arguments, mask=mask, reduction="none")
    there = {k: v.to("cuda") for k, v in arguments.items()}
    got = value_and_grad(method, scores.cuda(), relevance.cuda(), there, mask=mask.cuda(), reduction="none")
    tolerance = 1e-4 if dtype == torch.float32 or "sodeep" in name else 1e-10
    torch.testing.assert_close([t.cpu() for t in got], list(expected), atol=tolerance, rtol=tolerance)
    if method.rank is not None:
        ranks = method.rank(scores.cuda(), mask=mask.cuda(), **there).cpu()
        torch.testing.assert_close(
            ranks, method.rank(scores, mask=mask, **{k: v.cpu() for k, v in there.items()}), atol=1e-3, rtol=1e-4
        )


def test_the_two_ways_to_the_maximum_agree_to_the_bit():
    scores, relevance = (
        torch.randn(3, 5000, device="cuda").round(decimals=2),
        torch.rand(3, 5000, device="cuda") < 0.1,
    )
    one, two = (
        value_and_grad(surrogates.METHODS[name], scores, relevance, {}, reduction="none")
        for name in ("yue2007", "mohapatra2018")
    )
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("name", NO_SYNC)
def test_no_host_sync(name):
    method = surrogates.METHODS[name]
    scores = torch.rand(4, 60, device="cuda") * 2 - 1
    relevance, mask = torch.rand(4, 60, device="cuda") < 0.3, torch.rand(4, 60, device="cuda") < 0.8
    arguments = dict(method.arguments(scores)) | hint(name)
    value_and_grad(method, scores, relevance, arguments, mask=mask)  # warm up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value_and_grad(method, scores, relevance, arguments, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", surrogates.METHODS)
def test_a_list_with_a_nan_is_nan_and_the_others_are_not(name):
    method = surrogates.METHODS[name]
    scores = torch.rand(3, 20, device="cuda") * 2 - 1
    scores[1, 4] = torch.nan
    relevance = torch.arange(60, device="cuda").reshape(3, 20) % 3 == 0
    out, grad = value_and_grad(method, scores, relevance, method.arguments(scores), reduction="none")
    assert out.isnan().tolist() == [False, True, False]
    assert grad[1].isnan().any()
    assert grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", ["chen2019", "yue2007", "mohapatra2018", "smoothap"])
def test_a_list_that_does_not_fit_the_hint_is_nan(name):
    relevance = torch.tensor([[True, True, True, False], [True, False, False, False]], device="cuda")
    out = surrogates.METHODS[name].loss(
        torch.rand(2, 4, device="cuda"), relevance, max_relevant=2, reduction="none"
    )
    assert out.isnan().tolist() == [True, False]
