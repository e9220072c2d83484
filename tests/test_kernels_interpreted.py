"""The Triton kernels, interpreted on the CPU, against the reference.

Run in a process of its own: TRITON_INTERPRET=1 python -m pytest tests/test_kernels_interpreted.py
"""

import itertools
import os

import pytest
import torch

from rankgrad.engine import cuda, dense, long
from rankgrad.engine.request import Answer

from cases import (
    DTYPES,
    FORMS,
    KINDS,
    assert_equal_to_reference,
    assert_standings_equal_to_reference,
    make,
    request,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (see `make test`)"
    ),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Few chunks and programs: the interpreter runs programs one after another."""
    monkeypatch.setattr(long, "_CHUNKS", 4)
    monkeypatch.setattr(long, "_TERMS_BLOCK", 16)  # several chunks a program for few relevant items, or blocks
    monkeypatch.setattr(long, "_STREAMS", 2)
    long._plan.cache_clear()


@pytest.mark.parametrize(
    ("kind", "share"),
    [*itertools.product(KINDS, [0.05]), *itertools.product(KINDS[1::2], [0.7]), ("random", 0.0), ("ties", 0.0)],
)
def test_long_lists(kind, share, monkeypatch):
    monkeypatch.setattr(cuda, "LONGEST_SHORT_LIST", 0)
    number = KINDS.index(kind)
    data = make(kind, (2, 1, 403), share, dtype=DTYPES[number % 3], masked=number % 2 == 0, seed=number)
    assert_equal_to_reference(cuda, *data, FORMS[number % 5], lam=40.0, margin=0.25 * (number % 3))


@pytest.mark.parametrize(
    ("kind", "share"), [*itertools.product(KINDS, [0.03, 0.4]), ("random", 0.0), ("ties", 0.0)]
)
def test_short_lists(kind, share, monkeypatch):
    """3 relevant items are one group; 40 are several."""
    monkeypatch.setattr(cuda, "FEWEST_SHORT_LISTS", 1)
    number = KINDS.index(kind)
    data = make(kind, (2, 2, 103), share, dtype=DTYPES[number % 3], masked=number % 2 == 1, seed=number)
    assert_equal_to_reference(cuda, *data, FORMS[number % 5], lam=40.0, margin=0.25 * (number % 3))


@pytest.mark.parametrize(("kind", "share"), [("random", 0.9), ("ties", 0.3)])
def test_sorting_by_merges(kind, share, monkeypatch):
    """With more relevant items than pairs are compared for: one round of merges, and two."""
    from rankgrad.engine._kernels import sorting

    monkeypatch.setattr(sorting, "PAIRS", type(sorting.PAIRS)(8))
    monkeypatch.setattr(long, "_SORT_BLOCK", 16)
    monkeypatch.setattr(long, "_MERGE_PIECE", 8)
    monkeypatch.setattr(cuda, "LONGEST_SHORT_LIST", 0)
    data = make(kind, (1, 2, 151), share)
    assert_equal_to_reference(cuda, *data, "log_ap", lam=40.0, margin=0.0)


def test_a_device_with_room_for_fewer_programs_gets_fewer(monkeypatch):
    """The sort's programs wait for each other: a launch that does not fit is tried with fewer."""
    tried = []

    def launch(kernel, grid, *args, **options):
        tried.append(grid[0])
        assert options["together"]
        if grid[0] > 132:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    run = long.Long(*make("random", (1, 1, 40), 0.1), 0.0, None)
    monkeypatch.setattr(run.plan, "processors", 132)
    run.launch = launch
    try:
        run._merge((), again=False)
        run._merge((), again=True)
        assert tried == [264, 132, 132]
    finally:
        long._sorters.clear()


@pytest.mark.parametrize(
    ("kind", "share"), [*[(kind, 0.4) for kind in KINDS], ("random", 0.0), ("ties", 1.0), ("equal", 1.0)]
)
def test_dense_lists(kind, share, monkeypatch):
    """In blocks so short that runs of equal scores cross several of them."""
    monkeypatch.setattr(dense, "_BLOCK", 32)
    number = KINDS.index(kind)
    data = make(kind, (2, 1, 171), share, dtype=DTYPES[number % 3], masked=number % 2 == 1, seed=number)
    most = int(data[1].sum(-1).max()) or None
    monkeypatch.setattr(cuda, "DENSE", 10**6)
    monkeypatch.setattr(cuda, "SHORTEST_DENSE_LIST", 0)
    assert_equal_to_reference(
        cuda, *data, FORMS[number % 5], lam=40.0, margin=0.25 * (number % 2), max_relevant=most
    )


@pytest.mark.parametrize("masked", [False, True])
def test_standings(masked):
    assert_standings_equal_to_reference(cuda, *make("ties", (1, 2, 203), 0.2, masked=masked))


@pytest.mark.parametrize("short", [False, True])
def test_a_wrong_hint_and_a_nan_give_nan(short, monkeypatch):
    monkeypatch.setattr(cuda, "FEWEST_SHORT_LISTS", 1 if short else 99)
    scores, relevance, _ = make("random", (1, 2, 103), 0.3)
    if not short:  # short lists have room for any number
        for least in (10**6, 0):
            monkeypatch.setattr(cuda, "SHORTEST_DENSE_LIST", least)
            wrong = cuda.evaluate(request(scores, relevance, None, "ap", max_relevant=3))
            assert wrong.losses.isnan().all()
    scores[0, 0, 5] = torch.nan
    losses = cuda.evaluate(request(scores, relevance, None, "ap")).losses
    assert losses.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reduction_and_scaling(reduction):
    changes = torch.randint(-9, 9, (2, 3, 70), dtype=torch.int32)
    losses, items = torch.rand(2, 3, dtype=torch.float64), torch.tensor([[70, 60, 0], [1, 2, 3]])
    losses[1, 1] = torch.nan
    lists, upstream = torch.tensor([3, 2]), torch.randn((2, 3) if reduction == "none" else (2,))
    if reduction != "none":
        expected = losses.sum(1) / (lists if reduction == "mean" else 1)
        got = torch.empty(2)
        cuda.reduce(losses, lists, reduction == "mean", got)
        torch.testing.assert_close(got, expected.float(), equal_nan=True)
    factor = upstream.double() if reduction == "none" else upstream.double()[:, None]
    factor = factor * (1 if reduction == "mean" else lists[:, None]) / (0.3 * items.double().clamp(min=1))
    expected = changes * (factor + 0 * losses).float()[..., None]
    out = changes.view(torch.float32)  # in place
    divisor = 0.3 * items.double().clamp(min=1)
    cuda.scale(Answer(losses, changes, divisor, lists), upstream, reduction, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
