"""The CPU engines against the reference (which the other tests hold against the oracle)."""

import gc
import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import rankgrad
from rankgrad.engine import cpu, reference, spread
from rankgrad.engine.request import Request

from cases import (
    DTYPES,
    FORMS,
    KINDS,
    SHARES,
    assert_equal_to_reference,
    assert_standings_equal_to_reference,
    make,
    request,
)

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_equal_to_the_reference(kind, share):
    moved = 0.0
    for number, (shape, form) in enumerate(itertools.product([(2, 3, 517), (1, 1, 3001)], FORMS)):
        data = make(kind, shape, share, dtype=DTYPES[number % 3], masked=number % 2 == 1, seed=number)
        for margin in (0.0, 0.25):
            moved += assert_equal_to_reference(cpu, *data, form, lam=50.0, margin=margin)
            moved += assert_equal_to_reference(cpu, *data, form, reach="window", strength=0.4, margin=margin)
    if 0 < share < 1:
        assert moved > 0


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_one_long_list_in_chunks(kind, threads, monkeypatch):
    """With a length that is a multiple of nothing, and enough relevant items to be sorted in chunks as well."""
    monkeypatch.setattr(cpu, "_SHARED", 1)
    torch.set_num_threads(threads)
    for share, masked in ((0.001, False), (0.3, True), (0.96, False)):
        data = make(kind, (1, 1, 70_001), share, masked=masked)
        assert_equal_to_reference(cpu, *data, "log_ap", lam=20.0, margin=0.1)
        assert_equal_to_reference(cpu, *data, "log_ap", reach="window", strength=0.3, margin=0.1)


@needs_numba
def test_a_long_list_leaves_nothing_to_the_garbage_collector():
    """Its arrays are as large as the list: kept until a collection, they made calls a third slower."""
    asked = request(*make("random", (1, 1, 70_001), 0.3), "ap", strength=20.0)
    gc.collect()
    gc.disable()
    try:
        cpu.evaluate(asked)
        assert not [one for one in gc.get_objects() if type(one) is cpu._Together]
    finally:
        gc.enable()


@needs_numba
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_ragged_lists(threads, masked):
    """Lists of no item, one, a few and many behind one another; two calls of different lists."""
    torch.set_num_threads(threads)
    offsets = torch.tensor([[0, 0, 1, 3, 3, 60, 61, 400], [0, 10, 20, 30, 40, 390, 400, 400]])
    for number, kind in enumerate(KINDS):
        data = make(kind, (2, 400), 0.2, masked=masked, dtype=DTYPES[number % 3])
        for reach in ({"reach": "lam", "strength": 5.0}, {"reach": "window", "strength": 0.4}):
            given = {"offsets": offsets, "margin": 0.1, **reach}
            assert_equal_to_reference(cpu, *data, FORMS[number % len(FORMS)], **given)
        asked = request(*data, "ap", offsets=offsets)
        for a, b in zip(cpu.standings(asked), reference.standings(asked), strict=True):
            assert torch.equal(a, b)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(dtype):
    scores, _, mask = make("infinities", (3, 2, 1001), 0.1, dtype=dtype, masked=True)  # too few for the kernels
    for exists in (None, mask):
        got, expected = cpu.moments(scores, exists), spread.moments(scores, exists)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@needs_numba
def test_shares_of_the_spread_are_those_of_each_call():
    data = make("random", (3, 2, 400), 0.2)
    spreads = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    given = {"reach": "share", "strength": 0.7, "margin": 0.5, "margin_is_share": True, "spread": spreads}
    assert assert_equal_to_reference(cpu, *data, "log_ap", **given) > 0


@needs_numba
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("keys", [5, 2**32])
def test_words_are_sorted_by_key_and_then_by_place(chunks, keys):
    """Whatever the order they come in: after a move, equal scores may stand anywhere."""
    draw = np.random.default_rng(0)
    places = draw.permutation(70_001).astype(np.uint64)
    words = draw.integers(keys, size=len(places), dtype=np.uint64) << np.uint64(32) | places
    expected = np.sort(words)
    cpu._Together(cpu._numba_kernels(), np.empty(0, np.int32), chunks).sort_words(words, np.empty_like(words))
    np.testing.assert_array_equal(words, expected)


@needs_numba
def test_only_very_long_lists_are_shared():
    torch.set_num_threads(3)
    chunks = {}
    for shape in ((1, 2**18 - 1), (1, 2**18), (3, 2**18), (2, 100)):
        scores = torch.zeros(shape)
        chunks[shape] = cpu._Lists(Request(scores[None], scores[None].bool())).chunks
    assert chunks == {(1, 2**18 - 1): 1, (1, 2**18): 3, (3, 2**18): 1, (2, 100): 1}


@needs_numba
@pytest.mark.parametrize("masked", [False, True])
def test_standings(masked):
    for kind in KINDS:
        assert_standings_equal_to_reference(cpu, *make(kind, (2, 3, 301), 0.2, masked=masked))


@pytest.mark.parametrize("engine", [cpu, reference])
def test_nan_is_marked(engine):
    scores, relevance, _ = make("random", (1, 3, 50), 0.2)
    scores[0, 1, 7] = torch.nan
    mask = torch.ones_like(relevance)
    for hidden in (False, True):
        mask[0, 1, 7] = not hidden
        losses = engine.evaluate(request(scores, relevance, mask, "ap")).losses
        assert losses.isnan().tolist() == [[False, not hidden, False]]


def test_forms_are_numbered_in_the_kernels_as_in_the_table():
    pytest.importorskip("numba")
    from rankgrad.engine import forms
    from rankgrad.engine._kernels import forms_cpu

    above, own, tables = torch.arange(40), torch.arange(40) % 7 + 1, torch.rand(2, 9, dtype=torch.float64)
    for name in forms.FORMS:
        assert getattr(forms_cpu, name.upper()) == forms.code(name)
        values, slopes = forms.terms(name, tables, above, own)
        for c, r, value, slope in zip(above.tolist(), own.tolist(), values, slopes, strict=True):
            given = forms.code(name), tables.numpy(), c, float(r)
            assert np.isclose(forms_cpu.value_of.py_func(*given), value, rtol=1e-14, atol=0)
            assert np.isclose(forms_cpu.slope_of.py_func(*given), slope, rtol=1e-14, atol=0)


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    """As DataLoader workers are: the parent's threads are not there, and to wait for them would be forever."""
    code = """
import multiprocessing, torch, rankgrad
torch.set_num_threads(2)
scores, relevance = torch.randn(64, 512), torch.rand(64, 512) < 0.1

def put_loss(results):
    torch.set_num_threads(2)
    results.put(float(rankgrad.average_precision_loss(scores, relevance, lam=1.0)))

results = multiprocessing.get_context("fork").SimpleQueue()
put_loss(results)
child = multiprocessing.get_context("fork").Process(target=put_loss, args=(results,))
child.start()
child.join(20)
if child.is_alive():
    child.kill()
    raise SystemExit("the child waits")
assert results.get() == results.get()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_scores_stay_where_they_are_whatever_the_default_device(dtype, masked, monkeypatch):
    monkeypatch.setattr(cpu, "_decoding", cpu._decoding.__wrapped__)
    scores, relevance, mask = make("random", (1, 16, 520), 0.2, dtype=dtype, masked=masked)
    for weight in ("log", torch.log1p):
        results = []
        for device in ("cpu", "meta"):
            x = scores.clone().requires_grad_()
            with torch.device(device):
                loss = rankgrad.recall_loss(x, relevance, lam=5.0, margin=0.1, mask=mask, weight=weight)
                loss.backward()
            results.append((loss.detach(), x.grad))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_wrong_hint_is_an_error_and_a_right_one_changes_nothing():
    scores, relevance = torch.randn(2, 50, requires_grad=True), torch.rand(2, 50) < 0.3
    plain = rankgrad.average_precision_loss(scores, relevance, lam=5.0)
    hinted = rankgrad.average_precision_loss(scores, relevance, lam=5.0, max_relevant=40)
    assert torch.equal(plain, hinted)
    with pytest.raises(ValueError, match=r"max_relevant: expected at least \d+ .*received 3"):
        rankgrad.average_precision_loss(scores, relevance, lam=5.0, max_relevant=3)
    with pytest.raises(ValueError, match="max_relevant"):
        rankgrad.recall_loss(scores, relevance, lam=5.0, max_relevant=0)


def test_the_gradient_takes_over_the_memory_of_the_changes_unless_the_graph_is_kept():
    scores, relevance = torch.randn(4, 60, requires_grad=True), torch.rand(4, 60) < 0.3
    loss = rankgrad.average_precision_loss(scores, relevance, lam=5.0)
    (first,) = torch.autograd.grad(loss, scores, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, scores, torch.tensor(2.0), retain_graph=True)
    (third,) = torch.autograd.grad(loss, scores)
    assert torch.equal(first, kept)
    assert torch.equal(second, 2 * kept)
    assert torch.equal(third, kept)
    assert kept.abs().sum() > 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, scores)


@needs_numba
def test_the_engine_leaves_torch_its_threads():
    """Numba's launch sets OpenMP's number of threads, which torch shares: results would change by a bit."""
    code = (
        "import torch, rankgrad; torch.set_num_threads(1);"
        "[rankgrad.recall_loss(torch.randn(100, 400), torch.rand(100, 400) < 0.1, lam=1.0) for _ in range(3)];"
        "assert torch.get_num_threads() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loss_cannot_be_differentiated_twice_and_says_so():
    scores, relevance = torch.randn(60, requires_grad=True), torch.rand(60) < 0.3
    loss = torch.ones((), requires_grad=True) * rankgrad.average_precision_loss(scores, relevance, lam=5.0)
    (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
