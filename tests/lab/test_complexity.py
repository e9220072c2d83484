"""The measured complexity table: what is predicted, fitted and shown, and that nothing runs beyond its limits."""

import json
import math

import pytest
import torch

from rankgrad.lab.bench import commands, complexity, complexity_table, timing
from rankgrad.lab.cli import main
from rankgrad.lab.training import machine
from rankgrad.surrogates import METHODS

from runs import cli

CPU = torch.device("cpu")


def test_every_method_has_a_row_and_a_style():
    from rankgrad.lab.figures.complexity import _LOOKS

    names = set(complexity.contenders())
    assert names == {"ap", "recall", "rambo", *METHODS} == set(_LOOKS)


@pytest.mark.parametrize("name", list(complexity.contenders()))
def test_every_method_runs_and_gives_a_gradient(name):
    scores, relevance = complexity.make_list(200, 20, CPU)
    scores = scores / 10
    step = complexity.step_of(complexity.contenders()[name].prepare(scores), scores, relevance)
    gradient = step()
    assert gradient.shape == (200,)
    assert gradient.isfinite().all() and gradient.any()


def test_slope_and_prediction():
    cubic = [(n, 7 * n**3) for n in (10, 30, 100)]
    assert timing.growth_exponent(cubic) == pytest.approx(3)
    assert timing.growth_exponent(cubic[:1]) is None
    assert complexity.predicted(cubic, 300, at_least=1, at_most=4) == pytest.approx(7 * 300**3)
    assert complexity.predicted(cubic, 300, at_least=1, at_most=2) == pytest.approx(7 * 100**3 * 9)
    flat = [(10, 2.0), (100, 2.0)]
    assert complexity.predicted(flat, 1000, at_least=2, at_most=4) == pytest.approx(200)
    assert complexity.predicted(flat[:1], 100, at_least=1, at_most=2) == pytest.approx(20)
    assert complexity.predicted([], 10, at_least=1, at_most=2) == 0


def test_the_fit_is_over_the_tail_and_the_claim_over_the_same_lists():
    times = [(100, 1.0), (300, 1.0), (1000, 1.0), (3000, 9.0), (10000, 100.0)]
    curve = complexity.CostCurve("x", "x", "O(n log n)", [complexity.Point(*t) for t in times])
    curve.points.append(complexity.Point(30000, None, note="> 60 s"))
    complexity.fit(curve, lambda n, p: n * math.log(n))
    assert curve.fitted == (1000, 3000, 10000)
    assert curve.exponent == pytest.approx(2, abs=0.01)
    assert 1.1 < curve.claimed < 1.15


def spy(seconds, peak):
    """A method that pretends to need seconds(n) and peak(n), and notes the lengths it was run at."""
    ran = []

    def prepare(scores):
        ran.append(len(scores))
        return lambda s, r: (s * 0).sum()

    return complexity.Contender("spy", "?", lambda n, p: n, prepare), ran, seconds, peak


def walk(monkeypatch, contender, ran, seconds, peak, *, limit, free):
    monkeypatch.setattr(timing, "seconds", lambda *a, **k: seconds(ran[-1]))
    monkeypatch.setattr(machine, "available_bytes", lambda device: free)
    real = timing.memory_over_now

    def pretend(device):
        manager = real(device)
        manager.__enter__()

        class Pretend:
            def __enter__(self):
                return lambda: peak(ran[-1])

            def __exit__(self, *_):
                return None

        return Pretend()

    monkeypatch.setattr(timing, "memory_over_now", pretend)
    points = []
    for n in (100, 1000, 10_000, 100_000):
        points.append(complexity._next_point(contender, points, n, CPU, limit))
        if points[-1].note:
            break
    return points


def test_a_list_that_would_take_too_long_is_not_run(monkeypatch):
    contender, ran, *needs = spy(lambda n: 1e-6 * n**2, lambda n: 0)
    points = walk(monkeypatch, contender, ran, *needs, limit=60, free=2**40)
    assert [p.note for p in points] == ["", "", "> 60 s"]
    assert ran == [100, 1000]
    assert points[-1].n == 10_000 and points[-1].seconds is None


def test_a_list_that_would_fill_the_memory_is_not_run(monkeypatch):
    contender, ran, *needs = spy(lambda n: 1e-9 * n, lambda n: 400 * n**2)
    points = walk(monkeypatch, contender, ran, *needs, limit=60, free=20 * 2**30)
    assert [p.note for p in points] == ["", "", "out of memory"]
    assert ran == [100, 1000]


def test_a_lump_of_memory_early_on_is_no_growth(monkeypatch):
    """A compiler's 90 MB at one length, nothing at the next."""
    contender, ran, *needs = spy(lambda n: 1e-9 * n, lambda n: 90 * 2**20 if n == 100 else 10 * n)
    points = walk(monkeypatch, contender, ran, *needs, limit=60, free=20 * 2**30)
    assert ran == [100, 1000, 10_000, 100_000] and not points[-1].note


def test_a_first_call_that_compiles_is_not_the_time():
    import time

    calls = []

    def run():
        calls.append(1)
        time.sleep(0.2 if len(calls) == 1 else 0.001)

    assert timing.seconds(run, CPU, budget=0.01) < 0.1
    calls.clear()
    assert timing.seconds(run, CPU, budget=0.01, once_over=0.1) > 0.1
    assert len(calls) == 1


def test_a_list_longer_than_predicted_says_so(monkeypatch):
    contender, ran, *needs = spy(lambda n: 1.0 if n < 1000 else 100.0, lambda n: 0)
    points = walk(monkeypatch, contender, ran, *needs, limit=60, free=2**40)
    assert points[-1].note == "> 60 s" and points[-1].seconds is None


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
            "fails: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        ),
    ],
)
def test_failures_are_reported_and_the_others_go_on(error, note):
    def prepare(scores):
        raise error

    contender = complexity.Contender("x", "?", lambda n, p: n, prepare)
    assert complexity._next_point(contender, [], 100, CPU, 60).note == note


def test_memory_is_measured():
    with timing.memory_over_now(CPU) as peak:
        block = torch.ones(50 * 2**18)
        del block
        assert 45 * 2**20 < peak() < 80 * 2**20
    assert machine.available_bytes(CPU) > 2**20


def test_a_wrong_gradient_gets_no_time(monkeypatch):
    wrong = complexity.Contender(
        "x", "?", lambda n, p: n, lambda s: lambda a, b: (a * torch.rand(1)).sum(), ours=True
    )
    assert complexity._next_point(wrong, [], 100, CPU, 60).note == "differs from the reference"


def test_the_command(tmp_path, capsys):
    files = {name: tmp_path / f"c.{name}" for name in ("md", "json", "png", "svg")}
    options = ["--methods", "ap,fastap", "--device", "cpu", "--longest", "1000", "--seconds", "5"]
    options += ["--markdown", files["md"], "--json", files["json"], "--plot", files["png"]]
    assert cli("bench", "complexity", *options) == 0
    out = capsys.readouterr().out
    assert "FastAP, 10 bins" in out and "O((n + p) L)" in out
    numbers = json.loads(files["json"].read_text())
    curves = {curve["name"]: curve for curve in numbers["devices"]["cpu"]["curves"]}
    assert [p["n"] for p in curves["ap"]["points"]] == [100, 300, 1000]
    assert all(p["seconds"] > 0 for curve in curves.values() for p in curve["points"])
    text = files["md"].read_text()
    assert "| method | 100 | 300 | 1k |" in text and "1 % of them relevant" in text
    assert files["png"].stat().st_size > 10_000 and files["svg"].read_text().startswith("<?xml")


def test_names_are_checked():
    assert "did you mean 'chen2019'?" in cli("bench", "complexity", "--methods", "chen2018")
    assert "--device: unknown value 'gpu'" in cli("bench", "complexity", "--device", "gpu")


@pytest.mark.parametrize(("largest", "batches"), [(64, ()), (128, (128,)), (10**6, (128, 512, 1024))])
def test_batches_that_are_too_large_are_left_out(monkeypatch, largest, batches):
    class Seen(Exception):  # noqa: N818
        pass

    def rows(place, given):
        raise Seen(given)

    monkeypatch.setattr(commands.long_lists, "rows", lambda *args, **kwargs: [])
    monkeypatch.setattr(commands.retrieval, "rows", rows)
    with pytest.raises(Seen) as caught:
        main(["bench", "--device", "cpu", "--longest", "100000", "--largest-batch", str(largest)])
    assert caught.value.args == (batches,)


def test_short_lengths():
    assert [complexity_table.short(n) for n in (100, 3000, 300_000, 10_000_000)] == ["100", "3k", "300k", "10M"]


@pytest.mark.gpu
def test_every_method_is_timed_on_a_gpu():
    *_, (curves, _, _) = complexity.measure(torch.device("cuda"), (100, 1000), limit=20)
    assert {name: [p.note for p in curve.points] for name, curve in curves.items()} == {
        name: ["", ""] for name in complexity.contenders()
    }
    assert all(p.seconds > 0 and p.peak > 0 for curve in curves.values() for p in curve.points)
