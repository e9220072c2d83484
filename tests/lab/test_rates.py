"""A learning rate that is chosen on held-out training classes, before the run that it is for."""

import json
import shlex

import pytest
from safetensors.torch import save_file

from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images import model, rates
from rankgrad.lab.training.errors import TrainingError, UserError
from rankgrad.lab.training.loop import Trainer

import images
from runs import cli, rows, same_weights, stop_after

SMALL = ["backbone=tiny", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2", "epochs=2", "device=cpu"]
SMALL += ["view.resize=16", "view.crop=12", "view.test_crop=12", "save_minutes=0"]


@pytest.mark.parametrize(
    ("scores", "best", "tried"),
    [  # R@1 and mAP@R of each rate
        ([(69.0, 17.5), (74.3, 22.5), (73.0, 22.0)], 1e-4, 3),  # Stanford Cars
        ([(69.0, 17.5), (74.3, 22.5), (75.3, 23.5)], 3e-4, 3),
        ([(96.0, 63.0), (94.4, 60.0), (99.0, 99.0)], 3e-5, 2),  # Flowers 102: what is not better ends it
        ([(83.3, 48.1), (83.1, 50.6), None], 1e-4, 3),  # by mAP@R
        ([(82.0, 40.0), (82.9, 41.0), (99.0, 99.0)], 3e-5, 2),  # by less than a point in the mean
        ([(82.0, 40.0), None, (99.0, 99.0)], 3e-5, 2),  # the second collapsed
        ([None, (0.5, 0.5), (99.0, 99.0)], 3e-5, 2),
    ],
)
def test_the_first_rate_that_the_next_does_not_beat(scores, best, tried):
    config = recipes.load("folder", ["data.root=x"])[1]
    assert config.rates == (3e-5, 1e-4, 3e-4)
    asked = []

    def train(name, settings):
        asked.append(name)
        assert settings.optim.lr == config.rates[len(asked) - 1] and settings.rates == ()
        score = scores[len(asked) - 1]
        return {"R@1": score[0], "mAP@R": score[1]} if score else {}

    rate, told = rates.choose(config, train)
    assert rate == best and asked == ["lr-3e-05", "lr-0.0001", "lr-0.0003"][:tried]
    assert told.startswith(f"lr={best:g} chosen on held-out training classes, R@1 / mAP@R at 3e-05: ")
    assert told.count("failed") == scores[:tried].count(None)


def test_trials_differ_from_the_run_in_rate_and_classes_alone():
    config = recipes.load("folder", ["data.root=x", "seed=3"])[1]
    trial = rates.trial(config, 1e-4)
    changed = {key: value for key, value in trial.model_dump().items() if value != config.model_dump()[key]}
    assert set(changed) == {"data", "optim", "rates", "evaluate_first", "evaluate_every", "callbacks"}
    assert trial.data == config.data.model_copy(update={"hold_out": 0.5})
    assert trial.optim == config.optim.model_copy(update={"lr": 1e-4})
    assert (trial.rates, trial.evaluate_every, trial.callbacks) == ((), config.epochs, ())


def test_when_rates_are_tried():
    """A pretrained network whose rate nobody gave; on the test classes alone is there something to choose for."""
    for more, tried in (
        ([], (3e-5, 1e-4, 3e-4)),
        (["lr=auto", "rates=[1e-5,2e-5]"], (1e-5, 2e-5)),
        (["rates=[]"], ()),
        (["lr=3e-5"], ()),
        (["weights=none"], ()),
        (["hold_out=0.5"], ()),
    ):
        assert recipes.load("folder", more)[1].rates == tried
    assert recipes.load("cub-proxy")[1].rates == ()
    with pytest.raises(UserError, match=r"^data.hold_out = 0.5 and rates = \[1e-05\] exclude each other"):
        recipes.load("folder", ["hold_out=0.5", "rates=[1e-5]"])


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A pretrained network and a folder of images; so few are enough here."""
    monkeypatch.setattr(rates, "FEWEST_ITEMS", 20)
    monkeypatch.setattr(rates, "FEWEST_CLASSES", 4)
    save_file(model.tiny().state_dict(), tmp_path / "w.safetensors")
    root = images.folder_set(tmp_path / "data", classes=12)
    return [
        *SMALL,
        f"weights={tmp_path / 'w.safetensors'}",
        f"data.root={root}",
        "batch_norm=train",
        "rates=[1e-4,1e-3]",
    ]


def test_a_run_with_its_trials(tmp_path, settings, capsys):
    folder, results = run.run("folder", settings, out=str(tmp_path / "a"))
    trials = sorted((folder / run.TRIALS).glob("lr-*"))
    assert [trial.name for trial in trials] == ["lr-0.0001", "lr-0.001"]
    scores = []
    for trial in trials:
        scores.append(json.loads((trial / "result.json").read_text())["last"])
        assert not list(trial.glob("*.safetensors")) and not list(trial.glob("*.pt"))
        assert json.loads((trial / "data.json").read_text())["counts"]["test classes"] == 3
    first, second = ((one["R@1"] + one["mAP@R"]) / 2 for one in scores)
    best = 1e-3 if second >= first + 1 else 1e-4
    told = f"lr={best:g} chosen on held-out training classes, R@1 / mAP@R at 0.0001: "
    out = capsys.readouterr().out
    assert told in out and out.count("trains on a part of the training data first") == 2
    assert told in (folder / "report.html").read_text()
    assert recipes.load(str(folder))[1].optim.lr == best
    plain, _ = run.run("folder", [*settings, f"lr={best}", "rates=[]"], out=str(tmp_path / "b"))
    assert rows(plain) == rows(folder) and same_weights(plain / "last.safetensors", folder / "last.safetensors")
    assert not (plain / run.TRIALS).exists()
    # once more, and it goes on with what it chose
    _, more = run.run("folder", settings, out=str(folder), resume=True)
    assert more[0].last == results[0].last and told in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--resume: .*lr-0.0001 was started with other settings: epochs was 2"):
        run.run("folder", [*settings, "epochs=3"], out=str(folder), resume=True)


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("steps", [3, 7, 13])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path, settings, monkeypatch, seeds, steps):
    """In the first trial, in the second, in the run itself: all ends as if nothing had been."""
    whole, _ = run.run("folder", settings, out=str(tmp_path / "whole"), seeds=seeds)
    place = tmp_path / "broken off"
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", settings, out=str(place), seeds=seeds)
    told = run.resume_command("folder", str(place), seeds).removeprefix("resume with: rankgrad ")
    assert told.startswith(f"train {shlex.quote(str(place / run.TRIALS))} --out" if steps < 9 else "train ")
    assert cli(*shlex.split(told)) == 0
    runs = [path.parent.relative_to(whole) for path in whole.rglob("steps.csv")]
    assert len(runs) == 2 + seeds
    for one in runs:
        assert rows(place / one) == rows(whole / one)
    assert len(list(place.glob("seed-*"))) == (seeds if seeds > 1 else 0)


def test_a_rate_that_fails_is_not_chosen(tmp_path, settings, monkeypatch, capsys):
    inner = Trainer.fit

    def fit(self, **options):
        if self.config.optim.lr == 1e-3:
            raise TrainingError("loss: nan at step 1")
        return inner(self, **options)

    monkeypatch.setattr(Trainer, "fit", fit)
    folder, _ = run.run("folder", settings, out=str(tmp_path / "a"))
    assert recipes.load(str(folder))[1].optim.lr == 1e-4
    out = capsys.readouterr().out
    assert "loss: nan at step 1" in out and "0.001: failed" in out


def test_few_images_train_at_once(tmp_path, settings, monkeypatch):
    for name, number in (("FEWEST_ITEMS", 37), ("FEWEST_CLASSES", 7)):  # six classes of six images to train on
        with monkeypatch.context() as patch:
            patch.setattr(rates, name, number)
            folder, _ = run.run("folder", settings, out=str(tmp_path / name))
        assert not (folder / run.TRIALS).exists()
        assert recipes.load(str(folder))[1].optim.lr == 3e-5
