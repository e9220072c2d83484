"""``rankgrad bench reach`` on small inputs: every line is measured and judged, and what fails is no time."""

import functools
import types

import pytest
import torch

from rankgrad.engine import dispatch
from rankgrad.lab.bench import blocks, reach, timing
from rankgrad.lab.bench.lines import Measurement

from runs import cli


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    for name in ("seconds", "side_by_side"):
        quick = functools.partial(lambda fn, *data, budget=0.0: fn(*data, budget=0.0), getattr(timing, name))
        monkeypatch.setattr(timing, name, quick)


def test_the_tables(tmp_path, capsys):
    file = tmp_path / "reach.md"
    assert cli("bench", "reach", "--rehearse", "--markdown", str(file)) == 0
    text = file.read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(reach.SECTIONS)
    for row in (
        "| AP, one list of 9,000, 1 % relevant: window |",
        "| recall, 64 embeddings: automatic |",
        "| 128 embeddings: recall lam, eager |",
        "50 % relevant, no hint: lam |",
        "| metrics.average_precision, [80, 40] |",
        "| AP, float64 [160, 64] |",
    ):
        assert row in text, row
    assert "failed" not in text and "differs" not in text
    assert " goals met, in " in text


def test_the_way_of_a_gpu(monkeypatch, tmp_path, capsys):
    """All that a GPU would run, but for the measuring of CUDA graphs, launches and device memory."""
    monkeypatch.setattr(reach, "_gpu", lambda device: True)
    monkeypatch.setattr(timing, "recorded", lambda run: run)
    monkeypatch.setattr(timing, "launches", lambda run: 3)
    monkeypatch.setattr(timing, "graph_seconds", lambda run, device: timing.seconds(run, device, budget=0))
    file = tmp_path / "reach.md"
    before = torch.backends.cuda.matmul.allow_tf32
    assert cli("bench", "reach", "--rehearse", "--markdown", str(file)) == 0
    text = file.read_text()
    for row in (
        "| 256 queries, fp32: recall, window |",
        "| 256 queries, fp32: pairs with a hinge |",
        "| 256 queries, fp32: proxies of 10,000 classes |",
        "| 64 queries against a memory of 1,024, TF32: recall |",
        "| the same, replayed (3 launches) |",
    ):
        assert row in text, row
    assert "at most 2x its 3 products, 2,048 MiB" in text
    assert "at most similarity alone + 400 us" in text
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_memory_is_what_the_queries_meet(monkeypatch):
    """A memory that stayed empty would be measured as a quick one."""
    case = blocks.Case(8, 64, True, None, None, None)
    mean, seen = blocks.RecallLoss.mean, []
    monkeypatch.setattr(blocks.RecallLoss, "mean", lambda self, kinds: seen.append(kinds) or mean(self, kinds))
    assert all(line.time for line in blocks.lines(torch.device("cpu"), (case,)))
    assert seen and all(len(kinds) == 2 and len(kinds[1].candidates) == 64 for kinds in seen)


def test_a_wrong_gradient_does_not_count(monkeypatch, capsys):
    def off_by_one(request):
        answer = dispatch.reference.evaluate(request)
        return answer._replace(gradient=answer.gradient + 1)

    monkeypatch.setattr(reach, "reference", types.SimpleNamespace(evaluate=off_by_one))
    monkeypatch.setattr(reach, "SECTIONS", {"Windows": reach.windows})
    assert cli("bench", "reach", "--rehearse") == 1
    assert "differs" in capsys.readouterr().out


def test_a_section_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    def broken(device, sizes):
        yield Measurement("the first", 1.0)
        raise RuntimeError("no room")

    monkeypatch.setattr(reach, "SECTIONS", {"Broken": broken, "Short": reach.batches})
    file = tmp_path / "reach.md"
    assert cli("bench", "reach", "--rehearse", "--markdown", str(file)) == 1
    text = file.read_text()
    assert "| the first | 1 s |" in text and "failed: RuntimeError: no room" in text
    assert "metrics.average_precision" in text


def test_a_run_that_is_killed_leaves_what_it_measured(monkeypatch, tmp_path):
    def killed(device, sizes):
        yield Measurement("the first", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(reach, "SECTIONS", {"Killed": killed})
    file = tmp_path / "reach.md"
    cli("bench", "reach", "--rehearse", "--markdown", str(file))
    assert "| the first | 1 s |" in file.read_text()


@pytest.mark.parametrize(
    ("line", "goal", "met"),
    [
        (Measurement("a", 1.2, "b", 1.0, most_ratio=1.3), "at most 1.3x b", True),
        (Measurement("a", 1.4, "b", 1.0, most_ratio=1.3), "at most 1.3x b", False),
        (Measurement("a", 1.2, "b", 1.0, most_over=0.1), "at most b + 100 ms", False),
        (
            Measurement("a", 0.02, memory=400 << 20, most_time=0.03, most_memory=300 << 20),
            "at most 30 ms, 300 MiB",
            False,
        ),
        (
            Measurement("a", 0.02, memory=200 << 20, most_time=0.03, most_memory=300 << 20),
            "at most 30 ms, 300 MiB",
            True,
        ),
        (Measurement("a", None, "b", 1.0, most_ratio=1.3, fault="does not fit"), "at most 1.3x b", False),
        (Measurement("a", 1.0, "b", 1.0), "", None),
    ],
)
def test_goals(line, goal, met):
    assert line.goal == goal
    assert line.met is met
    assert line.cells()[-1] == {True: "met", False: "MISSED", None: ""}[met]
