"""A detector from a VOC folder to the report: training, an exact continuation, several processes, evaluation."""

import inspect
import json
import math
import re
import shutil
import sys
from urllib.error import URLError

import numpy as np
import pytest
import torch
from benchmarks import voc, voc_cost
from torchvision.models.detection import FasterRCNN
from torchvision.ops import FrozenBatchNorm2d, generalized_box_iou_loss

from rankgrad.detection import RegionLoss, ranking_loss
from rankgrad.detection.region_loss import padded
from rankgrad.lab import recipes
from rankgrad.lab.cli import main
from rankgrad.lab.detection import batches, model
from rankgrad.lab.detection import task as task_module
from rankgrad.lab.detection.config import Config, Loss, Model, View
from rankgrad.lab.detection.task import DetectionTask
from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint
from rankgrad.lab.training.errors import UserError

import scenes
from runs import rows, same_weights, stop_after

SMALL = [
    "backbone=tiny",
    "weights=none",
    "pyramid=16",
    "hidden=32",
    "proposals=60",
    "detections=10",
    "trainable=5",
    "batch.size=4",
    "regions=32",
    "test_size=3",
    "view.short=64",
    "view.long=96",
    "precision=fp32",
    "epochs=2",
    "warmup=2",
    "milestones=[1]",
    "device=cpu",
    "loss.memory=2",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For all runs of the module alike: how sums are split over threads decides their last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return scenes.voc_set(tmp_path_factory.mktemp("voc"))


@pytest.fixture(autouse=True, scope="module")
def _watched_more_often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_module, "WATCH_EVERY", 4)
        yield


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "ranking"
    run.run("voc", [*SMALL, f"data.root={root}"], out=str(folder))
    return folder


def test_what_a_run_leaves(trained):
    assert len(rows(trained)) == 6
    for row in rows(trained):
        parts = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
        assert float(row["loss"]) == pytest.approx(sum(float(row[part]) for part in parts), rel=1e-5)
        sizes = float(row["logit_gradient"]), float(row["logit_gradient_ce"])
        if (int(row["step"]) - 1) % 4 == 0:
            assert min(sizes) > 0 and sizes[0] != sizes[1]
        else:
            assert math.isnan(sizes[0]) and math.isnan(sizes[1])
    assert set(rows(trained, "evaluations")[0]) == {"step", "epoch"} | {
        f"{metric} {scores}" for metric in ("AP50", "AP50-11", "AP", "AP75") for scores in ("odds", "softmax")
    }
    assert set(json.loads((trained / "classes.json").read_text())["odds"]["AP50"]) == set(scenes.NAMES)
    assert (trained / "report.html").is_file()


def test_cross_entropy_in_the_same_loop(root, tmp_path):
    """Nothing is exchanged, and the gradient that is written down is cross entropy's own."""
    folder, _ = run.run(
        "voc", [*SMALL[:-1], "loss=cross_entropy", f"data.root={root}", "epochs=1"], out=str(tmp_path / "a")
    )
    for row in rows(folder):
        assert row["logit_gradient"] == row["logit_gradient_ce"]
    assert float(rows(folder)[0]["logit_gradient"]) > 0 and rows(folder)[1]["logit_gradient"] == "nan"


def test_gradient_sizes_are_measured_right(root):
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}", "loss.ranking_weight=1e-6"])
    task = DetectionTask(config, torch.device("cpu"))
    task.network.train()
    task.loss.train()
    task.batch_loss(task.network, 0).backward()
    # with next to no ranking the loss is cross entropy: what arrives must be what was foretold
    assert float(task.parts["logit_gradient"]) == pytest.approx(float(task.parts["logit_gradient_ce"]), rel=1e-3)


def test_regions_that_were_added_have_no_gradient_size(root):
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}"])
    task = DetectionTask(config, torch.device("cpu"))
    logits, labels = torch.randn(20, 4, requires_grad=True), torch.randint(0, 4, (20,))
    sizes = []
    for inputs in ((logits, labels), padded(logits, labels, 32)):
        task._watch_ranking(task.loss, inputs)
        sizes.append(task.parts["logit_gradient_ce"])
    torch.testing.assert_close(*sizes)


def test_difficult_objects_are_no_targets(root):
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}"])
    task = DetectionTask(config, torch.device("cpu"))
    there = [o for o in task.source.scenes.objects if bool(o.difficult.any())]
    assert there
    for whole, kept in zip(task.source.scenes.objects, task.objects, strict=True):
        assert torch.equal(kept.boxes, whole.boxes[~whole.difficult])
        assert len(kept.labels) == int((~whole.difficult).sum())


def test_batches_are_shown_at_many_sizes(root, monkeypatch):
    """With jitter: a factor for each batch, the same when the step is done again; mirroring is as without."""
    shown: dict[str, list[float]] = {}
    mirrored: dict[str, list[torch.Tensor]] = {}
    for jitter in ("[1,1]", "[0.5,1.5]"):

        def watched(images, flips, view, factor, jitter=jitter):
            shown.setdefault(jitter, []).append(factor)
            mirrored.setdefault(jitter, []).append(flips)
            return batches.canvas(images, flips, view, factor)

        monkeypatch.setattr(task_module, "canvas", watched)
        _, config = recipes.load("voc", [*SMALL, f"data.root={root}", f"view.jitter={jitter}"])
        task = DetectionTask(config, torch.device("cpu"))
        task.network.train()
        for step in (*range(12), 3):
            assert torch.isfinite(task.batch_loss(task.network, step))
    assert shown["[1,1]"] == [1.0] * 13
    factors = shown["[0.5,1.5]"]
    assert len(set(factors)) == 12 and factors[12] == factors[3]
    assert 0.5 <= min(factors) < 0.7 and 1.3 < max(factors) <= 1.5
    assert all(torch.equal(a, b) for a, b in zip(*mirrored.values(), strict=True))


@pytest.mark.parametrize("stop", [2, 4])
def test_resume_is_exact_to_the_bit(root, trained, tmp_path, monkeypatch, stop):
    settings = [*SMALL, f"data.root={root}", "save_minutes=0"]
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            run.run("voc", settings, out=str(tmp_path / "a"))
    folder, _ = run.run("voc", settings, out=str(tmp_path / "a"), resume=True)
    assert same_weights(folder / "last.safetensors", trained / "last.safetensors")
    assert rows(folder) == rows(trained)
    assert rows(folder, "evaluations") == rows(trained, "evaluations")


def test_a_checkpoint_is_torchvisions(trained):
    """The weights load into a stock FasterRCNN of the same shape, and eval measures what training measured."""
    weights, notes = checkpoint.load_weights(trained / "last.safetensors")
    _, config = recipes.checked(notes["config"])
    ours = model.rebuild(config.model, config.view, regions=32, notes=notes, weights=weights)
    assert notes["classes"] == list(scenes.NAMES)
    assert isinstance(ours, FasterRCNN)
    keys = set(weights)
    assert {
        "backbone.body.conv1.weight",
        "rpn.head.cls_logits.weight",
        "roi_heads.box_predictor.cls_score.bias",
    } <= keys
    assert not any("memory" in key for key in keys)


def test_eval_and_report(trained, root, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["eval", str(trained / "last.safetensors"), "--data", str(root)])
    shown = capsys.readouterr().out
    assert re.search(r"detecting .* (\d+)/\1 ", shown)
    last = rows(trained, "evaluations")[-1]
    for name, value in last.items():
        if name not in ("step", "epoch"):
            assert f"{name} {float(value):.1f}" in shown
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    with pytest.raises(SystemExit):
        main(["report", str(trained), "--beside", str(other)])
    text = (trained / "report.html").read_text()
    assert "other, last epoch" in text
    with pytest.raises(SystemExit, match="--beside: no run in"):
        main(["report", str(trained), "--beside", str(tmp_path / "nothing")])
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "config.yaml").write_text(recipes.recipe_text("digits"))
    with pytest.raises(SystemExit, match=r"--beside: the run in .*digits' is not finished"):
        main(["report", str(trained), "--beside", str(tmp_path / "digits")])
    (tmp_path / "digits" / "result.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"--beside: expected a run of the same task as .*, received .*digits"):
        main(["report", str(trained), "--beside", str(tmp_path / "digits")])


def test_learning(tmp_path):
    """A detector this small learns three colours from a few images: an AP50 of 76 to 94 with six seeds."""
    root = scenes.voc_set(tmp_path / "data", train=20, test=8)
    settings = [*SMALL, f"data.root={root}", "epochs=25", "milestones=[22]", "evaluate_every=25"]
    _, (result,) = run.run("voc", settings, out=str(tmp_path / "a"))
    assert result.last["AP50 odds"] > 50


def test_broken_images_are_named(tmp_path):
    root = scenes.voc_set(tmp_path / "data", train=8)
    (root / "JPEGImages" / "000003.jpg").write_bytes(b"nothing")
    (root / "JPEGImages" / "000005.jpg").unlink()
    settings = [*SMALL, f"data.root={root}", "epochs=1"]
    (root / "JPEGImages" / "000101.jpg").write_bytes(b"nothing")
    named = r"3 of 14 images cannot be read: 000003: broken .*; 000005: missing; 000101: broken"
    with pytest.raises(UserError, match=named):
        run.run("voc", settings, out=str(tmp_path / "a"))
    _, config = recipes.load("voc", [*settings, "broken=skip"])
    task = DetectionTask(config, torch.device("cpu"))
    assert len(task.source.scenes) == len(task.objects) == 6
    assert "000003" not in task.source.scenes.names


def test_no_image_can_be_read(tmp_path):
    scenes.voc_set(tmp_path)
    for path in (tmp_path / "JPEGImages").glob("0001*"):
        path.write_bytes(b"x")
    _, config = recipes.load("voc", [*SMALL, f"data.root={tmp_path}", "broken=skip"])
    with pytest.raises(UserError, match=r"^--data: 6 of 6 images cannot be read: 000100: broken"):
        DetectionTask(config, torch.device("cpu"))


def test_where_the_weights_cannot_be_fetched(monkeypatch):
    def fetch(*args, **kwargs):
        raise URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetch)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    with pytest.raises(
        UserError, match=r"^model\.weights: the library's weights of resnet18 cannot be fetched .*no route"
    ):
        model.build(Model(backbone="resnet18"), View(), regions=8, classes=["a"], seed=0)


@pytest.mark.parametrize("loss", ["ranking", "cross_entropy"])
def test_a_run_that_diverges_says_so(root, tmp_path, loss):
    """Whether the ranks notice it first (NaN has none) or the loss."""
    settings = [*SMALL[:-1], f"loss={loss}", f"data.root={root}", "lr=1e6", "optim.clip=0", "warmup=0"]
    with pytest.raises(UserError, match=r"^loss: (nan|inf) at step 2 \(epoch 1, learning rate .*Try a lower lr"):
        run.run("voc", settings, out=str(tmp_path / "a"))
    assert [row["step"] for row in rows(tmp_path / "a")] == ["1"]


def test_a_folder_whose_name_is_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scenes.voc_set(tmp_path / "2007")
    seen = []
    monkeypatch.setattr(run, "run", lambda recipe, overrides, **kwargs: seen.append(overrides) or sys.exit(0))
    for name in ("2007", "a #2", 'quo"te'):
        with pytest.raises(SystemExit):
            main(["train", "voc", "--data", name])
        assert recipes.load("voc", seen[-1])[1].data.root == name


def test_the_first_batch_decides_nothing():
    """torchvision guesses the scales of its pooling once, from the height of the first images: 40 of 64 rows."""
    net, _ = model.build(Model(backbone="tiny", weights="none"), View(), regions=8, classes=["a"], seed=0)
    net.eval()
    low, square = torch.randn(1, 3, 64, 128), torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        before = net.regions(square, [(128, 128)])
        again, _ = model.build(Model(backbone="tiny", weights="none"), View(), regions=8, classes=["a"], seed=0)
        again.eval()
        again.regions(low, [(40, 128)])
        after = again.regions(square, [(128, 128)])
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    theirs = FasterRCNN(net.backbone, 2).roi_heads.box_roi_pool
    theirs(net.backbone(square), [torch.tensor([[0.0, 0, 9, 9]])], [(128, 128)])
    ours = net.roi_heads.box_roi_pool
    assert ours.scales == theirs.scales and vars(ours.map_levels) == vars(theirs.map_levels)


def test_anchors_of_many_shapes(monkeypatch):
    """Kept while there is room; the oldest goes first."""
    monkeypatch.setattr(model, "_SHAPES", 2)
    net, _ = model.build(Model(backbone="tiny", weights="none"), View(), regions=8, classes=["a"], seed=0)
    with torch.no_grad():
        for side in (32, 64, 96, 64):
            net.eval().regions(torch.randn(1, 3, side, 64), [(side, 64)])
    assert [key[0][0] for key in net.rpn.anchor_generator._made] == [64, 96]


def test_settings_that_do_not_fit(root):
    with pytest.raises(UserError, match=r"batch.size: expected at most the 12 images"):
        DetectionTask(recipes.load("voc", [*SMALL, f"data.root={root}", "batch.size=50"])[1], torch.device("cpu"))
    with pytest.raises(UserError, match=r"model.backbone: unknown name 'resnet5', did you mean 'resnet50'"):
        model.build(Model(backbone="resnet5"), View(), regions=8, classes=["a"], seed=0)
    with pytest.raises(UserError, match="torchvision has no weights of resnext101_32x4d"):
        model.build(Model(backbone="resnext101_32x4d"), View(), regions=8, classes=["a"], seed=0)
    with pytest.raises(UserError, match=r"view\.short"):
        recipes.load("voc", ["view.short=2000"])
    with pytest.raises(UserError, match="did you mean 'log_ap'"):
        recipes.load("voc", ["loss.form=logap"])


@pytest.mark.parametrize("name", ["voc", "voc07", "voc0712", "coco"])
def test_recipes_are_valid(name):
    _, config = recipes.load(name)
    assert isinstance(config, Config)
    assert config.data.name == name
    assert config.scoring() == RegionLoss(**config.loss.options()).scores == "softmax"
    _, alone = recipes.load(name, ["loss.cross_entropy=0"])
    assert alone.scoring() == RegionLoss(**alone.loss.options()).scores == alone.loss.ranked
    assert recipes.load(name, ["loss=cross_entropy"])[1].scoring() == "softmax"
    assert recipes.load(name, ["scores=odds"])[1].scoring() == "odds"
    assert recipes.load(name, ["loss.ranked=logits"])[1].scorings() == ("softmax", "odds", "logits")
    assert recipes.load(name, ["loss=cross_entropy", "loss.ranked=logits"])[1].scorings() == ("softmax", "odds")


def test_frozen_norms_are_torchvisions():
    ours, theirs = model.FrozenNorm(5), FrozenBatchNorm2d(5)
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(5) + 0.5
        for norm in (ours, theirs):
            getattr(norm, name).copy_(value)
    x = torch.randn(2, 5, 4, 4, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    half = ours(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), theirs(x), atol=0.05, rtol=0.02)
    half.float().sum().backward()
    assert x.grad is not None


def test_boxes_stay_float32_in_half_precision():
    """Under autocast torchvision would round anchors and proposals to 8 bits; here they are whole pixels apart."""
    small = Model(backbone="tiny", weights="none", pyramid=16, hidden=32, proposals=40)
    network, _ = model.build(small, View(short=64, long=96), regions=16, classes=["a", "b"], seed=0)
    network.eval()
    images = torch.randn(1, 3, 288, 288)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits, regression, proposals = network.regions(images, [(288, 288)])
    assert {logits.dtype, regression.dtype, proposals[0].dtype} == {torch.float32}
    assert not torch.equal(proposals[0], proposals[0].bfloat16().float())


@pytest.mark.parametrize("name", list(voc.ROWS))
def test_benchmark_rows_are_valid(name):
    _, config = recipes.load("voc07", voc.ROWS[name].split())
    if config.loss.name == "ranking":
        RegionLoss(**config.loss.options())


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
    """A row chooses its loss, and what was said of the loss before is gone."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(voc.side_by_side, "train", lambda jobs, **how: asked.extend(jobs))
    arguments = ["voc.py", "--data", "D", "--rows", "^CE . 0.3 log_ap$"]
    monkeypatch.setattr(sys, "argv", [*arguments, "lr=0.03"])
    voc.main()
    assert recipes.load("voc07", asked[0].settings)[1].optim.lr == 0.03
    monkeypatch.setattr(sys, "argv", [*arguments, "loss.margin=3"])
    with pytest.raises(
        UserError, match=r"^settings: expected what no row sets .* received loss\.margin=3; see row"
    ):
        voc.main()


def test_an_automatic_margin():
    """As in the library; what is neither a number nor auto is refused."""
    _, config = recipes.load("voc07", ["loss.margin=auto", "loss.lam=null"])
    loss = RegionLoss(**config.loss.options())
    assert (loss.ranking.margin, loss.ranking.lam) == ("auto", None)
    with pytest.raises(UserError, match=r"^loss\.margin: .*received 'wide'; loss\.margin: .* auto$"):
        recipes.load("voc07", ["loss.margin=wide"])


def test_a_detector_is_not_compiled():
    assert recipes.load("voc07", ["compile=false"])[1].compile is False
    with pytest.raises(UserError, match=r"^compile: a detector is not compiled, .*; received true$"):
        recipes.load("voc07", ["compile=true"])


def test_settings_of_a_detector_that_do_not_fit_each_other():
    with pytest.raises(UserError, match=r"^view\.short = 900 must not exceed view\.long = 700$"):
        recipes.load("voc07", ["view.short=900", "view.long=700"])
    with pytest.raises(
        UserError, match=r"^view: jitter: expected the smaller factor first, received \[1\.2, 0\.6\]$"
    ):
        recipes.load("voc07", ["view.jitter=[1.2,0.6]"])
    with pytest.raises(UserError, match=r"^loss: lam = 0\.5 and window = 2 exclude each other, say lam=null$"):
        recipes.load("voc07", ["loss.window=2"])


def test_recipes_and_loss_have_the_same_defaults():
    for name in ("voc", "voc07", "voc0712", "coco"):
        loss = recipes.load(name)[1].loss
        assert loss.options() == Loss().options()
    given = inspect.signature(RegionLoss).parameters
    assert {key: given[key].default for key in Loss().options()} == Loss().options()


BOX_LOSSES = {
    "giou": ["boxes=giou", "box_weight=10"],
    "by score": ["boxes=giou", "by_score=true"],
    "balanced": ["boxes=giou", "by_score=true", "balanced=true"],
    "balanced smooth L1": ["balanced=true"],
    "all": ["boxes=giou", "by_score=true", "balanced=true", "loss.thresholds=true", "loss.order_weight=0.2"],
}


@pytest.mark.parametrize("name", list(BOX_LOSSES))
@pytest.mark.parametrize("loss", ["ranking", "cross_entropy"])
def test_box_losses(root, name, loss):
    """Beside torchvision's smooth L1 on the same regions: only the loss of the boxes changes."""
    if name == "all" and loss == "cross_entropy":
        return
    settings = [*SMALL[:-1], f"data.root={root}"]
    found = {}
    for which in ("plain", name):
        changed = BOX_LOSSES[name] if which == name else [s for s in BOX_LOSSES[name] if s.startswith("loss.")]
        _, config = recipes.load("voc", [*settings, f"loss={loss}", *changed])
        torch.manual_seed(0)
        task = DetectionTask(config, torch.device("cpu"))
        task.network.train()
        torch.manual_seed(0)
        value = task.batch_loss(task.network, 0)
        value.backward()
        layer = task.network.roi_heads.box_predictor
        gradients = layer.cls_score.weight.grad, layer.bbox_pred.weight.grad
        assert all(bool(g.isfinite().all()) and float(g.abs().sum()) > 0 for g in gradients)
        found[which] = dict(task.parts), gradients
    (before, (classes, boxes)), (after, (same, other)) = found.values()
    for part in ("loss_classifier", "loss_objectness", "loss_rpn_box_reg"):
        assert torch.equal(before[part], after[part]), part
    assert torch.equal(classes, same)  # scores are weights without a gradient
    assert not torch.equal(boxes, other)
    if "balanced" in name or name == "all":
        torch.testing.assert_close(after["loss_box_reg"], 1 - torch.exp(-after["loss_classifier"]))
    if name == "balanced smooth L1":
        factor = (1 - torch.exp(-after["loss_classifier"])) / before["loss_box_reg"]
        torch.testing.assert_close(other, factor * boxes)


def test_box_settings_that_do_not_fit():
    with pytest.raises(UserError, match=r"^boxes: by_score: expected the loss giou, received smooth_l1$"):
        recipes.load("voc", ["by_score=true"])
    with pytest.raises(UserError, match=r"^boxes: box_weight: has no effect on a balanced loss, received 10$"):
        recipes.load("voc", ["boxes=giou", "balanced=true", "box_weight=10"])


@pytest.mark.parametrize("scores", ["", "softmax", "odds", "logits"])
def test_the_giou_of_a_run_is_that_of_its_regions(root, monkeypatch, scores):
    """Weight times the loss of what the heads sampled and the predictor said, by the score that judges the run."""
    by = ["by_score=true", f"scores={scores}"] if scores else []
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}", "boxes=giou", "box_weight=10", *by])
    task = DetectionTask(config, torch.device("cpu"))
    heads, seen = task.network.train().roi_heads, {}
    torch.nn.init.normal_(heads.box_predictor.cls_score.weight)  # scores that differ
    heads.box_predictor.register_forward_hook(
        lambda module, inputs, output: seen.update(logits=output[0].detach(), said=output[1])
    )
    choose = type(heads).select_training_samples

    def look(self, *given):
        seen["sampled"] = choose(self, *given)
        return seen["sampled"]

    monkeypatch.setattr(type(heads), "select_training_samples", look)
    task.batch_loss(task.network, 0)
    regions, _, labels, targets = (torch.cat(part) for part in seen["sampled"])
    front = [row for row, label in enumerate(labels.tolist()) if label]
    each = {
        "": lambda z, c: 1.0,
        "softmax": lambda z, c: float(z.softmax(0)[c]),
        "odds": lambda z, c: float((z[c] - z[0]).sigmoid()),
        "logits": lambda z, c: float(z[c].sigmoid()),
    }
    weight = {row: each[scores](seen["logits"][row], int(labels[row])) for row in front}
    mean = sum(weight.values()) / len(front)
    total = 0.0
    for row, label in enumerate(labels.tolist()):
        if label:
            own = seen["said"][row, 4 * label : 4 * label + 4].unsqueeze(0)
            region = regions[row : row + 1]
            box, there = (heads.box_coder.decode_single(one, region) for one in (own, targets[row : row + 1]))
            total += weight[row] / mean * float(generalized_box_iou_loss(box, there).detach())
    assert float(task.parts["loss_box_reg"]) == pytest.approx(10 * total / len(labels), rel=1e-4)
    assert "_taken" not in vars(heads)


def test_settings_that_an_older_version_saved():
    _, config = recipes.load("voc")
    settings = config.model_dump(mode="json")
    loss = settings["loss"]
    old = {**loss, "rank": loss.pop("ranked"), "weight": 0.7, "lam": None}
    del old["ranking_weight"]
    _, again = recipes.checked({**settings, "loss": old}, saved=True)
    assert again == config.model_copy(update={"loss": config.loss.model_copy(update={"ranking_weight": 0.7})})
    _, window = recipes.checked({**settings, "loss": {**old, "window": 2.0}}, saved=True)
    assert (window.loss.lam, window.loss.window) == (None, 2.0)
    with pytest.raises(UserError, match=r"^loss\.rank: unknown setting, did you mean 'ranked'\?"):
        recipes.checked({**settings, "loss": {**old}})


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
        assert list(steps) == ["cross entropy", "cross entropy again", "ranking", "ranking by boxes", *more]
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
    plain, again, ranked, by_boxes, with_rpn = found.values()
    assert plain == again and len({losses[0] for losses in found.values()}) == 3
    assert ranked[1] == by_boxes[1] == plain[1] != with_rpn[1] and with_rpn[0] == ranked[0]


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


def test_a_checkpoint_is_judged_on_its_own_classes(trained, tmp_path):
    other = scenes.voc_set(tmp_path / "other")
    for path in other.rglob("*.xml"):
        path.write_text(path.read_text().replace(f"<name>{scenes.NAMES[0]}</name>", "<name>zebra</name>"))
    weights, notes = checkpoint.load_weights(trained / "last.safetensors")
    kind, config = recipes.checked(notes["config"], [f"data.root={other}"])
    with pytest.raises(UserError, match=r"--data: .* unknown class 'zebra'"):
        kind.evaluate_checkpoint(config, weights, notes, torch.device("cpu"))
    fewer = scenes.voc_set(tmp_path / "fewer")  # no object of the first class, and nothing to train on
    (fewer / "ImageSets/Main/trainval.txt").unlink()
    for path in fewer.rglob("*.xml"):
        path.write_text(
            path.read_text().replace(f"<name>{scenes.NAMES[0]}</name>", f"<name>{scenes.NAMES[1]}</name>")
        )
    _, config = recipes.checked(notes["config"], [f"data.root={fewer}", "data.test_limit=4"])
    assert kind.evaluate_checkpoint(config, weights, notes, torch.device("cpu")).keys() >= {
        "AP50 softmax",
        "AP50 odds",
    }


def test_eval_with_another_network_than_the_checkpoint_has(trained):
    with pytest.raises(SystemExit, match=r"model: expected the settings .* trained with; size mismatch for .*fc6"):
        main(["eval", str(trained / "last.safetensors"), "hidden=48"])
