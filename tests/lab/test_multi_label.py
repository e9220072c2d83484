"""The benchmarks of a multi-label classifier and of imbalanced problems, on data small enough for a moment."""

import argparse
import json
import sys

import numpy as np
import pytest
import torch
from benchmarks import imbalanced, multi_label
from sklearn.datasets import make_classification

from rankgrad.lab.training.errors import UserError

import scenes


def as_voc(root):
    """The drawn scenes with classes of VOC, and all four lists."""
    base = scenes.voc_set(root / "VOCdevkit" / "VOC2007", train=12, test=6)
    for path in (base / "Annotations").glob("*.xml"):
        text = path.read_text()
        for ours, theirs in zip(scenes.NAMES, ("cat", "dog", "boat"), strict=True):
            text = text.replace(ours, theirs)
        path.write_text(text)
    lists = base / "ImageSets" / "Main"
    names = (lists / "trainval.txt").read_text().split()
    (lists / "train.txt").write_text("\n".join(names[:6]))
    (lists / "val.txt").write_text("\n".join(names[6:]))
    return root


def test_images_are_relevant_to_what_they_show(tmp_path):
    """A class of which an image shows difficult objects alone is left out for it."""
    root = as_voc(tmp_path)
    path = root / "VOCdevkit/VOC2007/Annotations/000000.xml"
    path.write_text(scenes.annotation([("cat", (1, 1, 9, 9), True), ("dog", (1, 1, 9, 9), True),
                                       ("dog", (5, 5, 20, 20), False)], size=(44, 60)))  # fmt: skip
    found = multi_label.read(root, "train", 32, torch.device("cpu"))
    names = multi_label.voc.CLASSES
    shown = [name for name, there in zip(names, found.relevance[0].tolist(), strict=True) if there]
    left_out = [name for name, there in zip(names, found.mask[0].tolist(), strict=True) if not there]
    assert (shown, left_out) == (["dog"], ["cat"])
    assert found.relevance.shape == (6, 20) and not bool(found.relevance[3].any())  # an image without objects


def test_losses_of_classes():
    """Asymmetric loss in loops; without focus and shift it is BCE; what is masked has no part."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    relevance, mask = (torch.rand(6, 4, generator=generator) < share for share in (0.4, 0.8))
    total = 0.0
    for z, y, there in zip(logits.flatten().tolist(), relevance.flatten(), mask.flatten(), strict=True):
        p = 1 / (1 + np.exp(-z))
        shifted = max(p - 0.05, 0)
        total += float(there) * (-np.log(p) if y else -(shifted**3) * np.log(1 - shifted))
    found = multi_label.asymmetric(3)(logits, relevance, mask)
    assert float(found) == pytest.approx(total / int(mask.sum()))
    wanted = multi_label.binary_cross_entropy(logits, relevance, mask)
    for same in (multi_label.asymmetric(0, 0), multi_label.focal(0)):
        torch.testing.assert_close(same(logits, relevance, mask).double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(wanted, torch.nn.functional.binary_cross_entropy_with_logits(
        logits[mask], relevance[mask].double()))  # fmt: skip


def test_ranking_follows_the_scale_of_the_logits():
    """Reach and margin are automatic: logits of ten times the size have a tenth of the gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    relevance, mask = torch.rand(40, 4, generator=generator) < 0.3, torch.ones(40, 4, dtype=torch.bool)
    found = []
    for scale in (1, 10):
        scaled = (scale * logits).requires_grad_()
        multi_label.ranking(None, 7)()(scaled, relevance, mask).backward()
        found.append(scale * scaled.grad)
    assert float(found[0].abs().sum()) > 0
    torch.testing.assert_close(*found)


def test_the_table(tmp_path, monkeypatch, capsys):
    """Every loss trains; what is chosen on val is judged on test; what is finished is not run again."""
    root = as_voc(tmp_path / "data")
    monkeypatch.setattr(multi_label, "RATES", (1e-4,))
    options = ["--data", str(root), "--weights", "tiny", "--size", "32", "--epochs", "1", "--seeds", "2"]
    options += ["--batch", "3"]
    options += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["multi_label.py", *options])
    multi_label.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written in capsys.readouterr().out and str(root) not in written
    for row in multi_label.ROWS:
        (line,) = [one for one in written.splitlines() if one.startswith(f"| {row} |") and "rate" in one]
        assert line.split(" | ")[3] == "2"
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    choices = sum(len(settings) for settings in multi_label.ROWS.values())
    assert len(results) == choices + 2 * len(multi_label.ROWS) and all(
        0 <= value <= 100 for value in results.values()
    )
    for row in multi_label.ROWS:
        runs = multi_label.choices_of(row, results)
        assert results[multi_label.best(results, row).name] == max(results[run.name] for run in runs)
    monkeypatch.setattr(multi_label, "_work", None)  # no process is started again
    multi_label.main()
    monkeypatch.setattr(sys, "argv", ["multi_label.py", *options, "--epochs", "2"])
    with pytest.raises(UserError, match="begun with other settings"):
        multi_label.main()


def test_what_comes_next():
    """Choices first; a row that has chosen trains its seeds, one of each row before the next; nothing twice."""
    rows = ["BCE", "focal"]
    results, begun, order = {}, set(), []
    while (run := multi_label._next(rows, results, begun, 2)) is not None:
        order.append(run)
        begun.add(run.name)
        results[run.name] = run.rate  # the largest rate is the best
    choices = 2 * len(multi_label.RATES) + 1  # the second setting of focal, at its best rate
    assert [run.test for run in order] == ["val"] * choices + ["test"] * 4
    assert [(run.row, run.seed) for run in order[choices:]] == [("BCE", 0), ("focal", 0), ("BCE", 1), ("focal", 1)]
    assert {run.rate for run in order[choices:]} == {max(multi_label.RATES)}
    assert multi_label._next(rows, {}, {run.name for run in order[:choices]}, 2) is None  # they are still running


def test_a_process_that_dies_takes_one_run_with_it(tmp_path, capsys):
    """Of a folder without images no run is measured, and the others are tried."""
    args = argparse.Namespace(
        data=tmp_path, weights="tiny", size=32, batch=3, epochs=1, seeds=1, parallel=2, device="cpu"
    )
    assert list(multi_label._measured(args, ["BCE"], {}, float("inf"))) == []
    assert capsys.readouterr().out.count("FAILED BCE") == len(multi_label.RATES)


@pytest.mark.parametrize("name", [name for name in imbalanced.LOSSES if name != "LibAUC AP"])
def test_imbalanced_losses_learn(monkeypatch, name):
    x, y = make_classification(300, 6, weights=[0.9], class_sep=2.0, random_state=0)
    monkeypatch.setattr(imbalanced, "read", lambda _: (x.astype(np.float32), y == 1))
    monkeypatch.setattr(imbalanced, "RATES", (1e-2,))
    monkeypatch.setattr(imbalanced, "STEPS", (10, 30))
    found = imbalanced.measure("made", name, 2)
    assert len(found) == 2 and min(found) > 50  # by chance: 10
