"""The report of a run that was interrupted."""

import re

import pytest

from rankgrad.lab.recipes import run

from runs import cli, rows, stop_after


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
