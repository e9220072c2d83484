"""Settings of a detector: recipes, defaults, and what is refused by name."""

import inspect
import sys

import pytest
import torch

from rankgrad.detection import RegionLoss
from rankgrad.lab import recipes
from rankgrad.lab.cli import main
from rankgrad.lab.detection import model
from rankgrad.lab.detection.config import Config, Loss, Model, View
from rankgrad.lab.detection.task import DetectionTask
from rankgrad.lab.recipes import run
from rankgrad.lab.training.errors import UserError

import scenes
from runs import with_removed
from scenes import SMALL


def test_a_folder_whose_name_is_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scenes.voc_set(tmp_path / "2007")
    seen = []
    monkeypatch.setattr(run, "run", lambda recipe, overrides, **kwargs: seen.append(overrides) or sys.exit(0))
    for name in ("2007", "a #2", 'quo"te'):
        with pytest.raises(SystemExit):
            main(["train", "voc", "--data", name])
        assert recipes.load("voc", seen[-1])[1].data.root == name


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


def test_settings_that_were_removed():
    """Runs of 0.2 before its release have them: off, they are dropped; on, they are refused by name."""
    _, config = recipes.load("voc")
    saved = with_removed(config.model_dump(mode="json"))
    _, again = recipes.checked(saved, saved=True)
    assert again == config and saved["loss"]["order_weight"] == 0  # what was given is not changed
    for name, key, value in (
        ("loss", "thresholds", "weighted"),
        ("loss", "order_weight", 0.2),
        ("boxes", "by_score", True),
        ("boxes", "balanced", True),
    ):
        on = {**saved, name: {**saved[name], key: value}}
        message = rf"^{name}\.{key}: expected (False|0), received {value!r}; the setting was removed"
        with pytest.raises(UserError, match=message):
            recipes.checked(on, saved=True)
        with pytest.raises(UserError, match=rf"^{name}\.{key}: unknown setting"):
            recipes.load("voc", [f"{name}.{key}={value}".lower()])
    every = {**saved, "batch": {**saved["batch"], "regions": 0}}
    with pytest.raises(UserError, match=r"^batch\.regions: "):
        recipes.checked(every, saved=True)


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
