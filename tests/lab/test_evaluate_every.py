"""How often a run evaluates where the recipe leaves it open: by sizes and epochs, known before the run starts."""

import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.detection.task import DetectionTask
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.training.loop import Trainer, epochs_between

import images
from runs import rows, stop_after

SMALL = ["backbone=tiny", "weights=none", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2"]
SMALL += ["view.resize=16", "view.crop=12", "save_minutes=0", "device=cpu"]


@pytest.mark.parametrize(
    ("trained", "tested", "epochs", "every"),
    [
        (100, 100, 90, 4),  # forward alone is a third of a training step: 1/3 / 4 is below a tenth
        (100, 100, 15, 3),  # five evaluations at least
        (100, 100, 4, 1),
        (100, 30, 90, 1),
        (100, 31, 90, 2),
        (100, 1000, 200, 34),
        (100, 1000, 90, 18),
    ],
)
def test_the_rule(trained, tested, epochs, every):
    assert epochs_between("auto", trained, tested, epochs) == every
    assert epochs_between(7, trained, tested, epochs) == 7


def test_a_run_evaluates_so_often_and_resumes_exactly(tmp_path, monkeypatch, capsys):
    root = images.folder_set(tmp_path / "data", classes=8)
    settings = [*SMALL, f"data.root={root}", "epochs=23"]
    folder, _ = run.run("folder", settings, out=str(tmp_path / "a"))
    assert "evaluates every 4 epochs (evaluate_every)" in capsys.readouterr().out
    assert [float(row["epoch"]) for row in rows(folder, "evaluations")] == [0, 4, 8, 12, 16, 20, 23]
    with monkeypatch.context() as patch:
        stop_after(patch, 30)
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", settings, out=str(tmp_path / "b"))
    run.run("folder", settings, out=str(tmp_path / "b"), resume=True)
    assert rows(tmp_path / "b", "evaluations") == rows(folder, "evaluations")
    capsys.readouterr()
    every, _ = run.run("folder", [*settings, "epochs=6", "evaluate_every=1"], out=str(tmp_path / "c"))
    assert len(rows(every, "evaluations")) == 7 and "evaluates every" not in capsys.readouterr().out


def test_larger_test_images_are_more_work(tmp_path):
    root = images.folder_set(tmp_path / "data", classes=8)
    tested = []
    for crop in (12, 24):
        settings = [*SMALL, f"data.root={root}", f"view.test_crop={crop}"]
        tested.append(ImageTask(recipes.load("folder", settings)[1], torch.device("cpu")).tested_items)
    assert tested == [24, 96]


def test_a_detector(root, tmp_path):
    settings = ["backbone=tiny", "weights=none", "pyramid=16", "hidden=32", "data.counts=any", f"data.root={root}"]
    settings += ["batch.size=4", "epochs=10", "evaluate_every=auto", "view.short=64", "view.long=96"]
    _, config = recipes.load("voc", settings)
    task = DetectionTask(config, torch.device("cpu"))
    assert task.tested_items == 6
    assert Trainer(task, config, tmp_path, torch.device("cpu")).evaluate_every == 2
