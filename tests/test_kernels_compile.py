"""Every Triton kernel compiles for the H200 (sm_90), as the engine launches it; no GPU is needed for that.

The engine runs on CPU tensors, with launches that compile and do nothing else.
"""

import itertools
import os
import warnings

import pytest
import torch

from rankgrad.engine import cuda, embeddings, launching

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
        _assert_launchable(launch[:2])


def _assert_launchable(grid):
    """A grid's first axis ends at 2^31 - 1, the second at 65,535."""
    assert 0 < grid[0] < 2**31, grid
    assert 0 < grid[1] < 2**16, grid


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels compiled so far."""
    from triton.runtime.driver import driver

    names = []

    def compile_only(kernel, grid, args, constants, options):
        assert kernel.arg_names[len(args) :] == [*constants]
        _assert_launchable(grid)
        kernel.warmup(*args, grid=grid, **constants, **options)
        names.append(kernel.__name__)
        return _Done(kernel, len(kernel.arg_names))

    monkeypatch.setattr(launching, "first_launch", compile_only)
    monkeypatch.setattr(launching, "processors_of", lambda device: 132)
    for module in (cuda, cuda.long, cuda.short):
        monkeypatch.setattr(module, "processors_of", lambda device: 132)
    plans = (cuda._plan, cuda.long._plan, cuda.short._plan, cuda.dense._plan, embeddings._plan)
    for cache in plans:
        cache.cache_clear()
    monkeypatch.setattr(driver, "_active", _H200())
    yield names
    for cache in plans:
        cache.cache_clear()


def evaluate(shape, form, *, dtype=torch.float32, masked=False, **given):
    scores, relevance = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    mask = ~relevance if masked else None
    return cuda.evaluate(request(scores, relevance, mask, form, **{"margin": 0.1, **given}))


def shares(calls):
    """An automatic window and margin."""
    return {"reach": "share", "margin_is_share": True, "spread": torch.ones(calls, dtype=torch.float64)}


ELSEWHERE = {"lists": torch.ones(1, dtype=torch.int64)}


def test_long_lists(compiled):
    for _ in range(2):  # the second time from the plan
        evaluate((1, 1, 100_003), "ap")
    evaluate((1, 2, 100_000), "tables", dtype=torch.bfloat16, masked=True, **ELSEWHERE)
    evaluate((1, 1, 100_003), "log", with_gradient=False, max_relevant=100, margin=0.0)
    assert {"gather", "sort_by_merging", "stream", "terms", "settle"} <= set(compiled)


def test_long_lists_by_window(compiled):
    for _ in range(2):
        evaluate((1, 1, 100_003), "ap", reach="window")
    evaluate((2, 1, 100_000), "tables", dtype=torch.float16, masked=True, **shares(2))
    evaluate((1, 1, 100_003), "log", reach="window", with_gradient=False, max_relevant=100)
    assert {"sum_units", "offset_units", "settle"} <= set(compiled)
    assert compiled.count("sort_by_merging") == 2


def test_very_many_relevant_items_are_sorted_in_several_launches(compiled):
    evaluate((1, 1, 5_000_000), "log", reach="window")
    assert "sort_step" in compiled


def test_very_many_long_lists(compiled, monkeypatch):
    monkeypatch.setattr(cuda, "LONGEST_SHORT_LIST", 0)
    evaluate((1, 70_000, 2), "ap", reach="window")
    evaluate((1, 70_000, 2), "ap")


def test_dense_lists(compiled):
    for _ in range(2):
        evaluate((1, 1, 100_003), "ap", max_relevant=50_000)
    evaluate((2, 3, 4096), "tables", dtype=torch.float16, masked=True, max_relevant=4096)
    assert {"shift", "flag", "move", "place_moved", "place_others", "finish"} <= set(compiled)


def test_dense_lists_by_window(compiled):
    for _ in range(2):
        evaluate((1, 1, 100_003), "ap", max_relevant=50_000, reach="window")
    evaluate((2, 3, 4096), "tables", dtype=torch.float16, masked=True, max_relevant=4096, **shares(2))
    assert {"move", "in_units", "reach_up"} <= set(compiled)
    assert "place_moved" not in compiled


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
    evaluate((1, 128, 512), "tables", with_gradient=False)
    assert {"count_items", "rank_sparse_lists", "reduce_losses", "scale_changes"} <= set(compiled)


def test_short_lists_by_window(compiled):
    for _ in range(2):
        answer = evaluate((1, 128, 512), "log", reach="window")
        cuda.scale(answer, torch.ones(1), "mean", answer.gradient)
    evaluate((2, 17, 33), "tables", dtype=torch.bfloat16, masked=True, max_relevant=3, **shares(2))
    evaluate((1, 128, 512), "ap", reach="window", with_gradient=False, **ELSEWHERE)
    evaluate((1, 128, 512), "ap", reach="window", scaled=True)
    evaluate((1, 128, 20_000), "ap", reach="window", scaled=True, max_relevant=16)  # few long ones: 32 warps
    evaluate((1, 128, 20_000), "ap", max_relevant=16)
    assert {"count_items", "rank_sparse_lists", "rank_other_lists", "scale_changes"} <= set(compiled)


@pytest.mark.parametrize(("hint", "kernels"), [(16, {"rank_sparse_lists"}), (17, {"stream", "terms"})])
def test_long_lists_with_a_hint_of_few_relevant_items_are_swept(compiled, hint, kernels):
    evaluate((1, 128, 1_000_000), "log", reach="window", masked=True, max_relevant=hint, **ELSEWHERE)
    assert kernels <= set(compiled)
    assert "rank_other_lists" not in compiled


def test_embeddings(compiled):
    labels, valid = torch.arange(70) % 7, torch.ones(70, dtype=torch.bool)
    for _ in range(2):
        unit, lengths = embeddings.launch_normalize(torch.randn(70, 512))
        embeddings.launch_normalize_backward(unit, unit, lengths, 1e-6)
        embeddings.launch_flags(embeddings.Labels(labels, labels, labels, labels, None))
        embeddings.launch_flags(embeddings.Labels(labels.int(), None, labels.int(), labels, valid))
        embeddings.launch_count_lists(embeddings.Labels(labels, labels, labels, labels, valid))
    assert compiled.count("flag_pairs") == 2
    assert compiled.count("count_lists") == 1


def test_moments(compiled):
    for mask in (None, torch.ones(2, 5, 1000, dtype=torch.bool)):
        for _ in range(2):
            cuda.moments(torch.zeros(2, 5, 1000, dtype=torch.bfloat16), mask)
    assert compiled.count("part_moments") == 2


def test_an_unknown_version_of_triton_launches_its_kernels_itself(monkeypatch):
    """Compiled kernels are not kept: every launch is Triton's own, and a warning says so once."""
    launched = []
    monkeypatch.setattr(launching, "processors_of", lambda device: 132)
    monkeypatch.setattr(launching, "first_launch", lambda kernel, *rest: launched.append(kernel) or object())
    monkeypatch.setattr(launching, "triton_version", lambda: "4.1.0+git")
    launching.calls_directly.cache_clear()
    cuda._plan.cache_clear()
    losses, lists, out = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.int64), torch.empty(1)
    with pytest.warns(UserWarning, match=r"kernels of Triton 4\.1\.0\+git are launched by Triton itself"):
        cuda.reduce(losses, lists, True, out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda.reduce(losses, lists, True, out)
    assert len(launched) == 2
    launching.calls_directly.cache_clear()
    cuda._plan.cache_clear()


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.9.0+git1a2b", True), ("3.10.0", False), ("3.5", False)]
)
def test_which_versions_of_triton_are_known(version, known, recwarn):
    launching.calls_directly.cache_clear()
    assert launching.calls_directly(version) is known
    assert len(recwarn) == (not known)


def test_a_kernel_for_aligned_tensors_is_not_used_for_others():
    room = torch.zeros(100)
    aligned, odd = room[:50], room[1:51]
    assert launching.kinds(aligned, None) == launching.kinds(aligned.clone(), None)
    different = [launching.kinds(*pair) for pair in itertools.product((aligned, odd, odd.half(), None), repeat=2)]
    assert len(set(different)) == len(different)
