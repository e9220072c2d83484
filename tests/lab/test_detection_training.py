"""A detector from a VOC folder to the report: training, an exact continuation, evaluation."""

import json
import math
import re
import shutil

import pytest
import torch
from torchvision.models.detection import FasterRCNN

from rankgrad.lab import recipes
from rankgrad.lab.cli import main
from rankgrad.lab.detection import model
from rankgrad.lab.detection import task as task_module
from rankgrad.lab.detection.task import DetectionTask
from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint
from rankgrad.lab.training.errors import UserError

import scenes
from runs import rows, same_weights, stop_after, with_removed
from scenes import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_other_data_is_not_resumed_on(root, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run.run("voc", [*SMALL, f"data.root={root}"], out=str(tmp_path / "a"))
    other = tmp_path / "other"
    shutil.copytree(root, other)
    (listed,) = other.rglob("trainval.txt")
    listed.write_text("\n".join(listed.read_text().split("\n")[::-1]).strip())
    with pytest.raises(
        UserError, match=r"on other data: the names, classes, grades or order of the items differ$"
    ):
        run.run("voc", [*SMALL, f"data.root={other}"], out=str(tmp_path / "a"), resume=True)


def test_a_checkpoint_is_torchvisions(trained):
    """The weights load into a stock FasterRCNN of the same shape, and eval measures what training measured."""
    weights, metadata = checkpoint.load_weights(trained / "last.safetensors")
    _, config = recipes.checked(metadata["config"])
    ours = model.rebuild(config.model, config.view, regions=32, metadata=metadata, weights=weights)
    assert metadata["classes"] == list(scenes.NAMES)
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


def test_a_run_with_settings_that_were_removed(trained, root, tmp_path, capsys):
    """As 0.2 saved it before its release, all of them off: it is judged and shown, and finds objects, as ever."""
    folder = shutil.copytree(trained, tmp_path / "before")
    for name in ("best", "last"):
        weights, metadata = checkpoint.load_weights(folder / f"{name}.safetensors")
        _, config = recipes.checked(metadata["config"])
        network = model.rebuild(config.model, config.view, regions=32, metadata=metadata, weights=weights)
        metadata = {**metadata, "config": with_removed(metadata["config"])}
        checkpoint.save_weights(folder / f"{name}.safetensors", network, metadata)
    settings = recipes.yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(recipes.yaml.safe_dump(with_removed(settings)))
    (folder / "report.html").unlink()

    def said(*words):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        assert not ended.value.code
        return capsys.readouterr().out

    metrics = [re.findall(r"AP\S* \w+ [\d.]+", said("eval", one, "--data", root)) for one in (trained, folder)]
    assert metrics[0] == metrics[1] != []
    said("report", folder)
    assert (folder / "report.html").is_file()
    said("detect", folder, root / "JPEGImages", "--out", tmp_path / "drawn", "--score", 0)
    assert any(json.loads((tmp_path / "drawn" / "detections.json").read_text()).values())
    with pytest.raises(UserError, match="was started by an older version"):
        run.run("voc", [*SMALL, f"data.root={root}"], out=str(folder), resume=True)


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


@pytest.mark.parametrize("loss", ["ranking", "cross_entropy"])
def test_a_run_that_diverges_says_so(root, tmp_path, loss):
    """Whether the ranks notice it first (NaN has none) or the loss."""
    settings = [*SMALL[:-1], f"loss={loss}", f"data.root={root}", "lr=1e6", "optim.clip=0", "warmup=0"]
    with pytest.raises(UserError, match=r"^loss: (nan|inf) at step 2 \(epoch 1, learning rate .*Try a lower lr"):
        run.run("voc", settings, out=str(tmp_path / "a"))
    assert [row["step"] for row in rows(tmp_path / "a")] == ["1"]


def test_a_checkpoint_is_judged_on_its_own_classes(trained, tmp_path):
    other = scenes.voc_set(tmp_path / "other")
    for path in other.rglob("*.xml"):
        path.write_text(path.read_text().replace(f"<name>{scenes.NAMES[0]}</name>", "<name>zebra</name>"))
    kind, last = recipes.of_checkpoint(trained / "last.safetensors", [f"data.root={other}"])
    with pytest.raises(UserError, match=r"--data: .* unknown class 'zebra'"):
        kind.evaluate_checkpoint(last, torch.device("cpu"))
    fewer = scenes.voc_set(tmp_path / "fewer")  # no object of the first class, and nothing to train on
    (fewer / "ImageSets/Main/trainval.txt").unlink()
    for path in fewer.rglob("*.xml"):
        path.write_text(
            path.read_text().replace(f"<name>{scenes.NAMES[0]}</name>", f"<name>{scenes.NAMES[1]}</name>")
        )
    settings = [f"data.root={fewer}", "data.test_limit=4"]
    kind, last = recipes.of_checkpoint(trained / "last.safetensors", settings)
    assert kind.evaluate_checkpoint(last, torch.device("cpu")).keys() >= {
        "AP50 softmax",
        "AP50 odds",
    }


def test_eval_with_another_network_than_the_checkpoint_has(trained):
    with pytest.raises(SystemExit, match=r"model: expected the settings .* trained with; size mismatch for .*fc6"):
        main(["eval", str(trained / "last.safetensors"), "hidden=48"])
