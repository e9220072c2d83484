"""What a new user meets in the first hour: errors before data is read, and notes on the data before training."""

import re
import sys

import pytest
import torch

from rankgrad.lab.detection.scenes import Objects, notes_on
from rankgrad.lab.recipes import run
from rankgrad.lab.training.errors import UserError

import images
import scenes


def objects(*labels, difficult=()):
    hard = torch.tensor([label in difficult for label in labels], dtype=torch.bool)
    return Objects(torch.zeros(len(labels), 4), torch.tensor(labels, dtype=torch.int64), hard)


def test_notes_on_the_objects_of_a_detector():
    train = [objects(1, 1, 2), objects(1), objects(3, 1, difficult=(3,))]
    test = [objects(1), objects(3), objects(4, 4)]
    first, *more = notes_on(train, test, ("cat", "dog", "fox", "owl"))
    assert first == (
        "trains on 3 images with 5 objects of 2 classes, tests on 3 images with 4 objects of 3 classes"
    )
    assert more == [
        "2 of 4 classes in the test annotations only, nothing to learn them from: fox, owl",
        "1 of 4 classes in one training image only: dog",
    ]
    assert notes_on(train[:2], test[:1], ("cat", "dog"))[1:] == ["1 of 2 classes in one training image only: dog"]


def test_a_detector_says_what_it_trains_on(tmp_path, capsys):
    root = scenes.voc_set(tmp_path / "data", train=8, test=3)
    settings = ["backbone=tiny", "weights=none", "pyramid=8", "hidden=8", "proposals=20", "regions=8", "epochs=1"]
    settings += [
        "batch.size=4",
        "view.short=48",
        "view.long=64",
        "precision=fp32",
        "device=cpu",
        f"data.root={root}",
    ]
    folder, _ = run.run("voc", [*settings, "evaluate_first=true"], out=str(tmp_path / "run"))
    assert "trains on 8 images with " in capsys.readouterr().out
    report = (folder / "report.html").read_text()
    assert "trains on 8 images with " in report and "this run, before training<" in report


@pytest.mark.parametrize("recipe", ["folder", "voc"])
def test_a_wrong_backbone_is_an_error_before_data_is_read(recipe, tmp_path):
    images.folder_set(tmp_path / "data", classes=2, each=2)
    (tmp_path / "data" / "ImageSets" / "Main").mkdir(
        parents=True
    )  # no annotations: reading them would be the error
    with pytest.raises(UserError, match=r"model\.backbone: unknown name 'resnet5000', did you mean 'resnet50'"):
        run.run(recipe, ["backbone=resnet5000", f"data.root={tmp_path / 'data'}"], out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_ranker_says_what_it_trains_on(tmp_path, capsys):
    rows = [f"{row % 3} qid:{query} 1:{row} 2:{query % 4}" for query in range(12) for row in range(4)]
    (tmp_path / "a.txt").write_text("\n".join(rows))
    run.run(
        "ranker",
        [f"data.root={tmp_path / 'a.txt'}", "epochs=1", "device=cpu", "baselines=[]"],
        out=str(tmp_path / "run"),
    )
    said = capsys.readouterr().out
    assert re.search(r"trains on \d+ items of \d+ queries, validates on \d+ items of \d+ queries, tests on ", said)


def test_a_wrong_callback_is_an_error_before_data_is_read(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="callbacks: unknown value 'wandbb', did you mean 'wandb'"):
        run.run("folder", ["callbacks=[wandbb]", f"data.root={tmp_path / 'nowhere'}"], out=str(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        run.run("folder", ["callbacks=[wandb]", f"data.root={tmp_path / 'nowhere'}"], out=str(tmp_path / "run"))
