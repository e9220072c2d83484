"""The figure of ablations: read from the tables of the benchmark."""

import itertools
import json

import pytest
from benchmarks import cub, side_by_side

from rankgrad.lab.figures import (
    ablations,
)
from rankgrad.lab.training.errors import UserError

from drawings import assert_texts_apart, pixels, quiet, size


def cub_table(folder, names):
    """As benchmarks/cub.py writes it: R@1 of 60 in two runs of each row, and 65 ± 0.7 in the last epoch."""
    for name, seed in itertools.product(names, (0, 1)):
        run = side_by_side.folder_of(folder, name, seed)
        run.mkdir(parents=True)
        metrics = {"R@1": 60.0, "R@2": 61.0, "R@4": 62.0, "R@8": 63.0, "mAP@R": 20.0}
        last = metrics | {"R@1": 64.5 + seed, "epoch": 20.0}
        result = {"best": metrics, "last": last, "seconds": 100.0, "speed": 3000.0}
        (run / "result.json").write_text(json.dumps(result))
    return cub.table(folder, ["epochs=20"])


def test_tables_of_the_benchmark_are_read(tmp_path):
    found = ablations.read_table(cub_table(tmp_path, cub.ROWS))[20]
    assert list(found) == list(cub.ROWS)
    assert found["ap"] == ablations.Ablation(ablations.Score(60, 0), ablations.Score(65, 0.7))
    assert ablations.read_table("| a | b |\n|---|---|\n| 1 | 2 |\n") == {}


def test_every_row_of_the_figure_is_a_row_of_the_benchmark():
    assert {row for panel in ablations.PANELS.values() for _, row in panel} <= set(cub.ROWS)
    assert set(ablations.PAPER) <= set(cub.ROWS)


def test_the_caption_says_how_far_a_change_moves_the_recall_loss(tmp_path):
    table = """| loss | best R@1 | last R@1 |
|---|---|---|
| recall loglog | 59.7 ± 0.2 | 59.2 ± 0.2 |
| recall loglog, no margin | 55.9 ± 0.2 | 40.2 ± 0.5 |
| ap | 60.8 ± 0.4 | 60.5 ± 0.7 |
"""
    (tmp_path / "cub.md").write_text(table)
    (drawing,) = ablations.draw(quiet(results=tmp_path)[0])
    seen = "What to see: 59.7 (59.2 at the end) moves by -3.8 (-19.0) with no margin."
    assert seen in " ".join(drawing.caption.split())


def test_rows_of_runs_of_different_length_do_not_meet(tmp_path):
    table = """| loss | epochs | best R@1 | last R@1 |
|---|---|---|---|
| recall loglog | 12 | 59.7 ± 0.2 | 59.2 ± 0.2 |
| recall loglog, no margin | 12 | 55.9 ± 0.2 | 40.2 ± 0.5 |
| recall loglog | 20 | 90.0 ± 0.2 | 90.0 ± 0.2 |
"""
    (tmp_path / "cub.md").write_text(table)
    (drawing,) = ablations.draw(quiet(results=tmp_path)[0])
    caption = " ".join(drawing.caption.split())
    assert (
        "After 12 epochs." in caption and "59.7 (59.2 at the end) moves by -3.8 (-19.0) with no margin" in caption
    )


def test_missing_rows_are_reported(tmp_path):
    (tmp_path / "2026-01-01-other.md").write_text("no table")
    with pytest.raises(UserError, match=r"no table of benchmarks/cub\.py"):
        ablations.draw(quiet(results=tmp_path)[0])
    (tmp_path / "2026-01-02-cub.md").write_text(cub_table(tmp_path / "runs", ["recall loglog", "ap", "FastAP"]))
    inputs, told = quiet(results=tmp_path)
    (drawing,) = ablations.draw(inputs)
    assert told == [
        "not in the tables: recall loglog, no memory, ap, no memory, recall loglog, no margin, "
        "recall loglog, lambda 0.04, recall loglog, lambda 1"
    ]
    assert "2026-01-02-cub.md" in drawing.caption and "Not measured: recall loglog, no memory" in drawing.caption
    assert "other" not in drawing.caption
    assert pixels(drawing.figure).shape == size(drawing.figure)
    assert_texts_apart(drawing.figure)
    (tmp_path / "2026-01-02-cub.md").write_text(cub_table(tmp_path / "others", ["FastAP"]))
    with pytest.raises(UserError, match="has none of the rows"):
        ablations.draw(inputs)
    with pytest.raises(UserError, match="no such file or folder"):
        ablations.draw(quiet(results=tmp_path / "nothing")[0])
