"""The benchmark of region heads on frozen features, on images small enough for a moment."""

import argparse
import json
import sys

import pytest
import torch
from benchmarks import region_features, regions
from torch import nn

from rankgrad.lab.training.errors import UserError

import scenes

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL = ["backbone=tiny", "pyramid=16", "hidden=32", "proposals=60", "view.short=64", "view.long=96"]
SMALL += ["batch.size=4", "batch.regions=32"]


def with_lists(root):
    """Drawn scenes with the lists train and val."""
    base = scenes.voc_set(root / "VOCdevkit" / "VOC2007", train=12, test=6)
    lists = base / "ImageSets" / "Main"
    for ours, theirs in (("trainval", "train"), ("test", "val")):
        (lists / f"{ours}.txt").rename(lists / f"{theirs}.txt")
    return root


def arguments(root):
    return argparse.Namespace(data=root, weights="none", epochs=1, settings=SMALL)


def drawn(image, boxes, labels):
    """A part of one image whose proposals are its objects."""
    objects = (boxes, labels, torch.zeros(len(labels), dtype=torch.bool))
    return region_features.Part([image], [(32, 48)], [objects], [boxes])


BOXES, LABELS = torch.tensor([[2.0, 3.0, 20.0, 30.0], [20.0, 4.0, 44.0, 28.0]]), torch.tensor([1, 3])


class Said(nn.Module):
    """A predictor that says what it was told."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, features):
        return self.logits, torch.zeros(len(self.logits), 4 * self.logits.shape[1])


def test_the_table(tmp_path, monkeypatch, capsys):
    """Rows train and are judged, features are made once, and what is finished is not run again."""
    root = with_lists(tmp_path / "data")
    options = ["--data", str(root), "--weights", "none", "--out", str(tmp_path / "out"), "--epochs", "1"]
    options += ["--seeds", "2", "--device", "cpu", "--rows", "CE, GIoU$|CE . log_ap, GIoU$"]
    monkeypatch.setattr(sys, "argv", ["regions.py", *options, *SMALL])
    regions.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written in capsys.readouterr().out and str(root) not in written and "recall" in written
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| boxes")]
    assert [row[0].removeprefix("| ") for row in rows] == [
        "boxes: CE, GIoU",
        "boxes: CE + log_ap, GIoU",
    ]
    assert {row[2] for row in rows} == {"2"}
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    plain = results["boxes: CE, GIoU / 0.02 / 0"]
    assert plain["gradient"] == pytest.approx(1, rel=1e-4) and plain["pushed down"] == 0
    assert all(0 <= result[metric] <= 100 for result in results.values() for metric in regions.METRICS)
    for name in ("train", "judged"):
        monkeypatch.setattr(regions, name, None)
    monkeypatch.setattr(region_features, "features_of", None)
    regions.main()
    monkeypatch.setattr(sys, "argv", ["regions.py", *options, "--epochs", "2", *SMALL])
    with pytest.raises(UserError, match="begun with other settings"):
        regions.main()
    monkeypatch.setattr(sys, "argv", ["regions.py", *options, *SMALL, "view.short=48"])
    (tmp_path / "out" / "results.json").unlink()
    with pytest.raises(UserError, match="made with other settings"):
        regions.main()


def test_rows_are_those_of_whole_detectors_with_the_same_proposals():
    assert {"boxes: CE, GIoU", "boxes: CE + log_ap, GIoU"} <= set(regions.ROWS)
    assert not any("RPN" in name for name in regions.ROWS)
    config = regions.settings_of(arguments("data"), "boxes: CE + 0.04 log_ap, GIoU, no memory", 0.01, 3)
    assert (config.loss.memory, config.boxes.name, config.boxes.box_weight) == (0, "giou", 10)
    assert (config.optim.lr, config.seed, config.model.score_threshold) == (0.01, 3, 0.01)


def test_boxes_and_scores_are_judged():
    """Proposals that are the objects, with the right classes, have an AP of 100; wrong classes 0."""
    part = drawn(torch.zeros(16, 2, 3, dtype=torch.float16), BOXES, LABELS)
    config = regions.settings_of(arguments("data"), "boxes: CE, GIoU")
    heads = regions.heads_of(config, 3, CPU).eval()
    right = 12.0 * nn.functional.one_hot(LABELS, 4).float()
    right[:, 0] = 6.0  # other classes are below the score threshold by odds too
    for logits, wanted in ((right, 100), (right.flip(0), 0)):
        heads.box_predictor = Said(logits)
        found = regions.judged(heads, part, config, 3, CPU)
        assert {found[metric] for metric in regions.METRICS} == {wanted}
        assert found["IoU"] == pytest.approx(100)
    assert region_features.recall(part, 0.7) == 1
    assert region_features.recall(part._replace(proposals=[BOXES[:1]]), 0.7) == 0.5


def test_features_are_whitened_and_belong_to_their_pixels():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(6, 6, generator=generator) @ torch.randn(6, 400, generator=generator)
    mean, basis = region_features.principal(
        [mixed[:, :100].reshape(6, 10, 10), mixed[:, 100:].reshape(6, 30, 10)], 4
    )
    torch.testing.assert_close(torch.cov(basis.T @ (mixed - mean[:, None])), torch.eye(4), rtol=0, atol=1e-3)
    part = drawn(torch.ones(16, 2, 3, dtype=torch.float16), BOXES, LABELS)
    part = region_features.Part(*(one * 2 for one in part))
    part.features[1] = torch.full((16, 3, 2), 2.0)
    maps = part.maps([0, 1], CPU)
    assert maps.shape == (2, 16, 3, 3) and maps.sum((1, 2, 3)).tolist() == [16 * 6, 2 * 16 * 6]
    assert float(maps[0, :, 2].abs().sum()) == 0 and float(maps[1, :, :, 2].abs().sum()) == 0
