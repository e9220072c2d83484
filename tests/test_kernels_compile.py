"""Every Triton kernel compiles for the H200 (sm_90), as the engine launches it; no GPU is needed for that.

The engine runs on CPU tensors, with launches that compile and do nothing else.
"""

import itertools
import os

import pytest
import torch

from rankgrad.engine import cuda, launching

from cases import request

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(), reason="compiles without a GPU"
)


class _H200:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class _Done:
    """A compiled kernel whose launch does nothing."""

    function = packed_metadata = None

    def __init__(self, kernel, arguments):
        self.name, self.arguments = kernel.__name__, arguments

    def run(self, *launch):
        assert len(launch) - 9 == self.arguments, (
            f"{self.name}: a later launch with other arguments than the first"
        )


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels compiled so far."""
    from triton.runtime.driver import driver

    names = []

    def compile_only(kernel, grid, args, constants, options):
        assert kernel.arg_names[len(args) :] == [*constants]
        kernel.warmup(*args, grid=grid, **constants, **options)
        names.append(kernel.__name__)
        return _Done(kernel, len(kernel.arg_names))

    monkeypatch.setattr(launching, "first_launch", compile_only)
    monkeypatch.setattr(launching, "programs", lambda device: 132)
    for module in (cuda, cuda.long, cuda.short):
        monkeypatch.setattr(module, "programs", lambda device: 132)
    plans = (cuda._plan, cuda.long._plan, cuda.short._plan, cuda.dense._plan)
    for cache in plans:
        cache.cache_clear()
    monkeypatch.setattr(driver, "_active", _H200())
    yield names
    for cache in plans:
        cache.cache_clear()


def evaluate(shape, form, *, dtype=torch.float32, masked=False, with_changes=True, **given):
    scores, relevance = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    mask = ~relevance if masked else None
    return cuda.evaluate(request(scores, relevance, mask, form, margin=0.1, with_gradient=with_changes, **given))


def test_long_lists(compiled):
    for _ in range(2):  # the second time from the plan
        evaluate((1, 1, 100_003), "ap")
    evaluate((1, 2, 100_000), "tables", dtype=torch.bfloat16, masked=True, lists=torch.ones(1, dtype=torch.int64))
    evaluate((1, 1, 100_003), "log", with_changes=False, max_relevant=100)
    assert {"gather", "sort_by_merging", "stream", "terms", "settle"} <= set(compiled)


def test_dense_lists(compiled):
    for _ in range(2):
        evaluate((1, 1, 100_003), "ap", max_relevant=50_000)
    evaluate((2, 3, 4096), "tables", dtype=torch.float16, masked=True, max_relevant=4096)
    assert {"shift", "flag", "move", "place_moved", "place_others", "finish"} <= set(compiled)


def test_standings(compiled):
    scores, relevance = torch.zeros(1, 1, 70_000), torch.zeros(1, 1, 70_000, dtype=torch.bool)
    cuda.standings(request(scores, relevance, None, "ap"))
    assert compiled.count("terms") == 1


def test_short_lists(compiled):
    for _ in range(2):
        answer = evaluate((1, 128, 512), "loglog")
        cuda.reduce(answer.losses, answer.lists, True, torch.empty(1))
        cuda.scale(answer, torch.ones(1), "mean", answer.gradient.view(torch.float32))
    evaluate((1, 17, 33), "log_ap", dtype=torch.float16, masked=True, max_relevant=3)
    evaluate((1, 128, 512), "tables", with_changes=False)
    assert {"count_items", "rank_lists", "reduce_losses", "scale_changes"} <= set(compiled)


def test_a_kernel_for_aligned_tensors_is_not_used_for_others():
    room = torch.zeros(100)
    aligned, odd = room[:50], room[1:51]
    assert launching.kinds(aligned, None) == launching.kinds(aligned.clone(), None)
    different = [launching.kinds(*pair) for pair in itertools.product((aligned, odd, odd.half(), None), repeat=2)]
    assert len(set(different)) == len(different)
