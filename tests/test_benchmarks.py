"""The table of losses: every row's settings are valid, and the runner writes what it measured."""

import sys

import pytest
from benchmarks import cub

from rankgrad import recipes
from rankgrad.retrieval import losses

import pictures


@pytest.mark.parametrize("name", list(cub.ROWS))
def test_rows_are_valid(name):
    _, config = recipes.load("cub", cub.ROWS[name].split())
    losses.build(config.loss, config.miner, classes=4, embedding=8)


def test_the_table(tmp_path, monkeypatch, capsys):
    root = pictures.cub_set(tmp_path / "data")
    small = ["backbone=tiny", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2", "view.resize=16"]
    small += ["compile=false", "view.crop=12", "data.counts=any", "device=cpu"]
    options = ["--data", str(root), "--weights", "none", "--out", str(tmp_path / "out"), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["cub.py", *options, "--seeds", "2", "--rows", "^recall log$|FastAP", *small])
    cub.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written in capsys.readouterr().out
    rows = [line.split(" | ")[0] for line in written.splitlines() if "±" in line and line.startswith("|")]
    assert rows == ["| recall log", "| FastAP"]
    assert str(root) not in written
