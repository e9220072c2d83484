"""The benchmark on Pascal VOC: its rows, its folders, and what it says a step costs."""

import re
import sys

import numpy as np
import pytest
import torch
from benchmarks import voc, voc_cost

from rankgrad.detection import RegionLoss, ranking_loss
from rankgrad.lab import recipes
from rankgrad.lab.training.errors import UserError

import scenes
from scenes import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", list(voc.ROWS))
def test_benchmark_rows_are_valid(name):
    _, config = recipes.load("voc07", voc.ROWS[name].split())
    if config.loss.name == "ranking":
        RegionLoss(**config.loss.options())


def test_rows_do_what_they_are_called():
    """The numbers in a row's name are those of its settings; what it does not name is the recipe's."""
    default = recipes.load("voc07")[1].loss
    for name, settings in voc.ROWS.items():
        loss = recipes.load("voc07", settings.split())[1].loss
        if loss.name == "cross_entropy":
            assert "log" not in name
            continue
        assert loss.memory == (0 if "no memory" in name else 30 if "memory 30" in name else default.memory), name
        told = re.search(r"CE \+ ([\d.]+) ", name)
        assert loss.ranking_weight == (float(told[1]) if told else 0.3 if "CE +" in name else 1), name
        for key in ("lambda", "window", "margin"):
            if told := re.search(rf"{key} ([\d.]+)", name):
                assert getattr(loss, {"lambda": "lam"}.get(key, key)) == float(told[1]), name
        assert (loss.cross_entropy, "GIoU" in name) == (float("CE" in name), "boxes=giou" in settings), name


def test_the_benchmark(tmp_path, monkeypatch, capsys):
    root = tmp_path / "data"
    base = scenes.voc_set(root / "VOCdevkit" / "VOC2007", train=8, test=4)
    for path in (base / "Annotations").glob("*.xml"):
        text = path.read_text()
        for ours, theirs in zip(scenes.NAMES, ("cat", "dog", "boat"), strict=True):
            text = text.replace(ours, theirs)
        path.write_text(text)
    options = ["--data", str(root), "--weights", "none", "--out", str(tmp_path / "out"), "--epochs", "1"]
    options += ["--seeds", "1", "--parallel", "2", "--rows", "^cross entropy$|^paper"]
    small = [s for s in SMALL if not s.startswith(("weights", "epochs", "milestones", "loss"))]
    monkeypatch.setattr(sys, "argv", ["voc.py", *options, *small])
    voc.main()
    written = (tmp_path / "out" / "table.md").read_text()
    shown = capsys.readouterr().out
    assert written in shown
    names = [line.split(" | ")[0] for line in written.splitlines() if line.endswith("` |")]
    assert names == ["| cross entropy", "| paper: ap on logits"]
    assert str(root) not in written
    assert "| cat |" in written
    before = (tmp_path / "out" / "cross-entropy" / "seed-0" / "result.json").stat().st_mtime_ns
    voc.main()  # what is finished is not run again
    assert (tmp_path / "out" / "cross-entropy" / "seed-0" / "result.json").stat().st_mtime_ns == before
    monkeypatch.setattr(sys, "argv", ["voc.py", "--choose", *options, *small])
    with pytest.raises(
        UserError, match=r"--out: .* started with other settings: .*data.test was 'test', now 'val'"
    ):
        voc.main()  # results on val do not mix with those on test


def test_settings_are_chosen_on_val_in_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(voc.side_by_side, "train", lambda jobs, **how: asked.extend(jobs))
    monkeypatch.setattr(sys, "argv", ["voc.py", "--choose", "--data", "D", "--rows", "^cross"])
    voc.main()
    _, config = recipes.load("voc07", asked[0].settings)
    assert (config.data.name, config.data.root) == ("voc", "D/VOCdevkit/VOC2007")
    assert (config.data.train, config.data.test) == ("train", "val")
    assert str(asked[0].folder) == "runs/voc-val/cross-entropy/seed-0"
    assert "judged on val" in (tmp_path / "runs" / "voc-val" / "table.md").read_text()


def test_settings_that_a_row_would_undo(tmp_path, monkeypatch):
    """What is given for all rows applies to them; what a row sets itself would be lost without a word."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(voc.side_by_side, "train", lambda jobs, **how: asked.extend(jobs))
    arguments = ["voc.py", "--data", "D", "--rows", "^CE . 0.3 log_ap$"]
    monkeypatch.setattr(sys, "argv", [*arguments, "lr=0.03", "loss.margin=3"])
    voc.main()
    config = recipes.load("voc07", asked[0].settings)[1]
    assert (config.optim.lr, config.loss.margin) == (0.03, 3)
    monkeypatch.setattr(sys, "argv", [*arguments, "loss.ranking_weight=3"])
    with pytest.raises(
        UserError, match=r"^settings: expected what no row sets .* received loss\.ranking_weight=3; see row"
    ):
        voc.main()


def test_how_much_longer_steps_are():
    """Step by step; a slow moment, even a long one, is outvoted, and shows in the standard error."""
    base = [10.0, 12.0, 11.0] * 10
    more = [0.25, 0.5, 0.75] * 9 + [0.5, 1.0, 90.0]  # medians: nine times 0.5, once 1
    steps = {"cross entropy": base, "ranking": [a + b for a, b in zip(base, more, strict=True)]}
    assert voc_cost._more(steps, "ranking") == "+0.55 ± 0.05 (+5.0 ± 0.5 %)"
    assert voc_cost._more(steps, "cross entropy") == "+0.00 ± 0.00 (+0.0 ± 0.0 %)"
    assert voc_cost._more_kernels({"cross entropy": 20.0, "ranking": 20.5}, "ranking") == "20.50 | +0.50 (+2.50 %)"


@pytest.mark.parametrize("lasting", [1, 25])
def test_the_standard_error(lasting):
    """It says how much repeated measurements differ, also where slow moments last."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(400):
        noise = draw.normal(0.5, 2.0, 250 // lasting).repeat(lasting)
        steps = {"cross entropy": [50.0] * 250, "ranking": list(50 + noise)}
        middle, _, error, *_ = voc_cost._more(steps, "ranking").split()
        found.append((float(middle), float(error)))
    medians, errors = np.array(found).T
    assert medians.std() == pytest.approx(errors.mean(), rel=0.1)


def test_what_the_loss_costs(monkeypatch):
    monkeypatch.setattr(voc_cost, "IMAGES", 1)
    monkeypatch.setattr(voc_cost, "REGIONS", 32)
    monkeypatch.setattr(voc_cost, "MEMORY", 1)
    ours = voc_cost.Case("tiny", (64, 64), stock=False, times=2)
    stock = voc_cost.Case("resnet18", (64, 96), stock=True, times=2)
    text = voc_cost.measure((ours, stock))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")
    ]
    for maker, canvas in (("the recipes' tiny", "64 x 64"), ("torchvision's resnet18", "64 x 96")):
        found = [row for row in rows if len(row) == 7 and row[1] == canvas]
        assert {row[0] for row in found} == {f"{maker}, 32 regions an image, 25 % foreground, 2 steps"}
        steps = {loss: cells for _, _, loss, *cells in found}
        more = [] if "torchvision" in maker else ["ranking, RPN ranked"]
        assert list(steps) == ["cross entropy", "cross entropy again", "ranking", *more]
        before, *empty = steps.pop("cross entropy")
        assert not any(empty)  # on a CPU there are no kernels either
        for after, more, *_ in steps.values():
            difference = float(after) - float(before)
            assert float(more.split()[0]) == pytest.approx(difference, abs=0.02)  # of two, medians are means
    alone = {row[0]: float(row[1]) for row in rows if len(row) == 2 and "alone" not in row[0]}
    assert list(alone) == ["cross entropy", "ranking", "ranking, not recorded"]
    assert all(took > 0 for took in alone.values())


def test_each_cost_is_that_of_its_loss(monkeypatch):
    """The losses of a step change with its name, and are the same when their turn comes again."""
    monkeypatch.setattr(voc_cost, "IMAGES", 1)
    monkeypatch.setattr(voc_cost, "REGIONS", 32)
    monkeypatch.setattr(voc_cost, "MEMORY", 0)
    training = voc_cost._Training(voc_cost.Case("tiny", (64, 64), stock=False, times=1), torch.device("cpu"))
    found = {}
    for name in (*training.names, *training.names):
        training._use(name)
        torch.manual_seed(0)
        losses = [float(training.losses()[part].detach()) for part in ("loss_classifier", "loss_objectness")]
        assert found.setdefault(name, losses) == losses
    plain, again, ranked, with_rpn = found.values()
    assert plain == again and len({losses[0] for losses in found.values()}) == 2
    assert ranked[1] == plain[1] != with_rpn[1] and with_rpn[0] == ranked[0]


def test_regions_that_do_not_exist_are_not_counted(monkeypatch):
    monkeypatch.setattr(voc_cost, "IMAGES", 2)
    monkeypatch.setattr(voc_cost, "MEMORY", 1)
    subject = voc_cost.Case("tiny", (64, 64), stock=False, times=1)
    training = voc_cost._Training(subject, torch.device("cpu"))
    relevance = torch.eye(20).bool()[:8]
    relevance[2:] = False
    there = (torch.arange(8) < 4).unsqueeze(1)
    ranking_loss(training.network).ranking.memory.push(torch.zeros(8, 20), relevance, there)
    assert training.regions() == "2 regions an image, 50 % foreground"


def test_the_cost_takes_no_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(voc_cost, "measure", lambda: "| cost |")
    monkeypatch.setattr(sys, "argv", ["voc", "--cost", "--out", str(tmp_path)])
    voc.main()
    assert (tmp_path / "cost.md").read_text() == "| cost |"
    monkeypatch.setattr(sys, "argv", ["voc", "--cost", "--out", str(tmp_path), "epochs=1"])
    with pytest.raises(SystemExit):
        voc.main()
    assert "--cost takes no settings, received ['epochs=1']" in capsys.readouterr().err
