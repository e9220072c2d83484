"""Which engine and which kernels a call gets, and what is said where Numba or Triton cannot be used."""

import importlib.util
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import rankgrad
from rankgrad.engine import cpu, cuda, dispatch, ops, reference
from rankgrad.engine.request import Answer, Request

from cases import make

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")


def test_large_scores_on_the_cpu_go_to_the_engine_and_small_ones_do_not_load_it():
    scores = torch.zeros(1, 1, dispatch.SMALL_ON_CPU)
    assert dispatch.engine_for(Request(scores, scores > 0)) is cpu
    code = (
        "import sys, torch, rankgrad;"
        "rankgrad.recall_loss(torch.randn(8, 100), torch.rand(8, 100) < 0.1, lam=1.0);"
        "assert 'numba' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def stand_in_for_triton(monkeypatch):
    """What Triton says when asked for its GPU, or how it fails."""

    def put(fault):
        class Driver:
            @property
            def active(self):
                if fault is not None:
                    raise fault
                return SimpleNamespace(get_current_target=lambda: "a GPU")

        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=Driver())))
        dispatch.has_triton.cache_clear()

    yield put
    dispatch.has_triton.cache_clear()


def test_where_triton_can_be_used(stand_in_for_triton):
    stand_in_for_triton(None)
    assert dispatch.has_triton()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RuntimeError("Failed to find C compiler"), r"cannot be used here \(Failed to find C compiler\)"),
        (ImportError("libcuda.so"), r"cannot be used here \(libcuda\.so\)"),
        (ModuleNotFoundError("No module", name="triton"), "is not installed"),
    ],
)
def test_where_triton_cannot_be_used(stand_in_for_triton, monkeypatch, fault, said):
    """It may be installed and lack a compiler or a GPU it knows: then torch does it, backward too."""
    stand_in_for_triton(fault)

    class OnAGpu(torch.Tensor):
        is_cuda = True

    called = []
    monkeypatch.setattr(ops.cuda, "scale", lambda *args: called.append(1))
    changes, one = torch.ones(1, 1, 4, dtype=torch.int32).as_subclass(OnAGpu), torch.ones(1, 1)
    answer, out = Answer(0 * one, changes, 8 * one, one[0]), torch.empty(1, 1, 4)
    with pytest.warns(UserWarning, match=f"^rankgrad: Triton {said}; using the slower sorts"):
        ops.scale(answer, one[0], "mean", out)
    assert not called and out.tolist() == [[[1 / 8] * 4]]


def test_without_numba_it_says_so_once(monkeypatch):
    scores, relevance, _ = make("random", (1, 1, 1 << 15), 0.01)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else real(name))
    cpu._numba_kernels.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert dispatch.engine_for(Request(scores, relevance)) is reference
    cpu._numba_kernels.cache_clear()
    assert len([w for w in caught if "Numba is not installed" in str(w.message)]) == 1


LARGE = """
import sys, warnings, torch, rankgrad
scores, relevance = torch.randn(16, 520), torch.rand(16, 520) < 0.1
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        x = scores.clone().requires_grad_()
        loss = rankgrad.average_precision_loss(x, relevance, lam=7.0, margin=0.1)
        loss.backward()
with rankgrad.engine.dispatch.forced(rankgrad.engine.reference):
    y = scores.clone().requires_grad_()
    rankgrad.average_precision_loss(y, relevance, lam=7.0, margin=0.1).backward()
assert torch.equal(x.grad, y.grad) and x.grad.abs().sum() > 0
assert "rankgrad.engine._kernels.lists_cpu" not in sys.modules
print(*(w.message for w in caught), sep="\\n")
"""


@needs_numba
def test_numba_that_may_not_compile_is_not_used():
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    out = subprocess.run(
        [sys.executable, "-c", LARGE], check=True, capture_output=True, text=True, env=environment
    )
    assert not out.stdout.strip()


@needs_numba
def test_numba_without_threads_is_not_used():
    environment = {**os.environ, "NUMBA_NUM_THREADS": "0"}
    out = subprocess.run(
        [sys.executable, "-c", LARGE], check=True, capture_output=True, text=True, env=environment
    )
    assert out.stdout.count("rankgrad: Numba is installed but cannot be used (Number of threads") == 1


@needs_numba
def test_numba_without_a_place_for_its_cache_says_what_to_do_once():
    # How Numba tries whether it may write to a folder. (No folder would do: root may write anywhere.)
    nowhere = (
        "import tempfile\ndef refuse(**anywhere):\n    raise PermissionError\ntempfile.TemporaryFile = refuse\n"
    )
    out = subprocess.run([sys.executable, "-c", nowhere + LARGE], check=True, capture_output=True, text=True)
    assert out.stdout.count("rankgrad: Numba is installed but cannot be used") == 1
    assert "NUMBA_CACHE_DIR" in out.stdout


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_eager_call_gives_what_the_ops_give(reduction, monkeypatch):
    """The short way past torch's dispatcher, against the ops that torch.compile sees."""
    scores, relevance = torch.randn(2, 5, 60), torch.rand(2, 5, 60) < 0.2
    mask = torch.rand(5, 60) < 0.9
    upstream = torch.randn(2, 5) if reduction == "none" else torch.tensor(3.0)
    results = []
    for plain in (True, False):
        monkeypatch.setattr(ops, "is_plain_call", lambda tensor, plain=plain: plain)
        x = scores.clone().requires_grad_()
        value = rankgrad.average_precision_loss(x, relevance, lam=5.0, mask=mask, reduction=reduction)
        assert ("ListLoss" in type(value.grad_fn).__name__) == plain
        value.backward(upstream)
        results.append((value.detach(), x.grad))
    (value, grad), (expected, expected_grad) = results
    assert torch.equal(value, expected)
    assert torch.equal(grad, expected_grad)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("shape", "hint", "expected"),
    [
        ((1, 128, 512), None, "short"),
        ((1, 128, 16_384), None, "short"),
        ((1, 20, 32_768), None, "long"),  # a detector's classes: one program a list would leave most of a GPU idle
        ((1, 8, 512), None, "long"),
        ((1, 256, 65_537), None, "long"),
        ((1, 1, 100_000), 50_000, "dense"),
        ((1, 1, 100_000), 1_000, "long"),
    ],
)
def test_which_kernels_a_shape_gets(shape, hint, expected):
    scores = torch.zeros(()).expand(shape)
    assert cuda.regime(Request(scores, scores > 0, max_relevant=hint)) is getattr(cuda, expected)
