"""The report of a run that was interrupted, and of runs side by side whose data differ."""

import re

import pytest

from rankgrad.lab.recipes import run

import images
from runs import cli, rows, stop_after

SMALL = [
    "backbone=tiny",
    "weights=none",
    "precision=fp32",
    "embedding=8",
    "batch.size=6",
    "per_class=2",
    "lr=1e-3",
]
SMALL += ["view.resize=16", "view.crop=12", "save_minutes=0", "device=cpu"]


def test_an_interrupted_run_shows_its_last_evaluation(tmp_path, monkeypatch, capsys):
    out = tmp_path / "a"
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", ["epochs=2", "device=cpu", "save_minutes=0"], out=str(out))
    capsys.readouterr()
    assert cli("report", out) == 0
    page = (out / "report.html").read_text()
    first, last = rows(out, "evaluations")
    for row, label in ((first, "this run, before training"), (last, r"this run, last evaluation \(epoch 1\)")):
        cells = re.search(rf'<tr class="own"><td>{label}</td>(.*?)</tr>', page).group(1)
        assert re.findall("<td>([^<]*)</td>", cells)[0] == f"{float(row['R@1']):.1f}"
    assert "This run is not finished: it was interrupted, or is still training. Its last step is 12" in page
    assert "best evaluation (epoch" not in page and "<td>not finished</td>" in page
    run.run("digits", ["epochs=2", "device=cpu", "save_minutes=0"], out=str(out), resume=True)
    page = (out / "report.html").read_text()
    assert "not finished" not in page and "this run, last epoch (epoch 2)" in page


def test_interrupted_before_the_first_evaluation(tmp_path, monkeypatch):
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run.run("digits", ["epochs=2", "device=cpu", "evaluate_first=false"], out=str(tmp_path / "a"))
    assert cli("report", tmp_path / "a") == 0
    assert "This run is not finished" in (tmp_path / "a" / "report.html").read_text()


def test_runs_on_other_data_are_said_to_be(tmp_path, capsys):
    one, other = images.folder_set(tmp_path / "one"), images.folder_set(tmp_path / "other", classes=8, each=4)
    for name, root, *more in (
        ("a", one),
        ("same", one, "seed=1", "data.cache=none"),
        ("split", one, "split_seed=3"),
        ("b", other),
    ):
        run.run("folder", [*SMALL, "epochs=1", f"data.root={root}", *more], out=str(tmp_path / name))
    said = {}
    for name in ("same", "split", "b"):
        capsys.readouterr()
        assert cli("report", tmp_path / "a", "--beside", tmp_path / name) == 0
        said[name] = capsys.readouterr().out
        page = (tmp_path / "a" / "report.html").read_text()
        assert ("may not compare" in page) == ("may not compare" in said[name]) == (name != "same")
    assert "split: data.split_seed 3 (this run: 0)" in said["split"]
    assert f"b: data.root {str(other)!r} (this run: {str(one)!r})" in said["b"]
    assert "training items 16 (this run: 18)" in said["b"] and "test classes 4 (this run: 3)" in said["b"]
