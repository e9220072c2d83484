"""The table of losses: every row's settings are valid, and the runner writes what it measured."""

import sys

import pytest
from benchmarks import cub, frozen

from rankgrad.lab import recipes
from rankgrad.lab.retrieval import losses

import images


@pytest.mark.parametrize("name", list(cub.ROWS))
def test_rows_are_valid(name):
    _, config = recipes.load("cub", cub.ROWS[name].split())
    losses.build(config.loss, config.miner, classes=4, embedding=8)


def test_the_table(tmp_path, monkeypatch, capsys):
    root = images.cub_set(tmp_path / "data")
    small = [
        "backbone=tiny",
        "pooling=own",
        "precision=fp32",
        "embedding=8",
        "batch.size=6",
        "per_class=2",
        "view.resize=16",
    ]
    small += ["view.crop=12", "data.counts=any", "device=cpu"]
    options = ["--data", str(root), "--weights", "none", "--out", str(tmp_path / "out"), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["cub.py", *options, "--seeds", "2", "--rows", "^recall log$|FastAP", *small])
    cub.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written in capsys.readouterr().out
    rows = [line.split(" | ")[0] for line in written.splitlines() if "±" in line and line.startswith("|")]
    assert rows == ["| recall log", "| FastAP"]
    assert str(root) not in written


def test_losses_on_frozen_features(tmp_path, monkeypatch, capsys):
    root = images.cub_set(tmp_path / "data", classes=(1, 2, 3, 4, 101))
    monkeypatch.setattr(frozen, "BATCH", 8)
    monkeypatch.setattr(frozen, "EPOCHS", 4)
    small = ["backbone=tiny", "pooling=own", "precision=fp32", "view.resize=16", "view.crop=12", "data.counts=any"]
    options = [
        "--data",
        str(root),
        "--weights",
        "none",
        "--out",
        str(tmp_path / "out"),
        "--seeds",
        "2",
        "--rates",
        "1e-3",
    ]
    more = ["--rows", "^ap$", "--settings", "mine: loss=proxy loss.attraction=0.2", "--", *small]
    monkeypatch.setattr(sys, "argv", ["frozen.py", *options, *more])
    frozen.main()
    first = (tmp_path / "out" / "table.md").read_text()
    rows = [line.split(" | ") for line in first.splitlines() if line.startswith("| ") and "±" in line]
    assert [row[0] for row in rows] == ["| ap", "| mine"] and rows[1][-1] == "`loss=proxy loss.attraction=0.2` |"
    assert "features: view 4 of 4, 10 images" in capsys.readouterr().out
    frozen.main()  # with the features of the first time
    assert "features" not in capsys.readouterr().out
    again = (tmp_path / "out" / "table.md").read_text()
    assert again.splitlines()[4:] == first.splitlines()[4:]
    monkeypatch.setattr(sys, "argv", ["frozen.py", *options, *more, "view.scale=0.5"])
    with pytest.raises(SystemExit, match=r"features\.pt was made with other settings"):
        frozen.main()
