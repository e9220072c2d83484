"""A learning rate that is chosen on held-out training classes, before the run that it is for."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images import data, model, rates
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.retrieval.splits import Items, by_classes
from rankgrad.lab.training.errors import TrainingError, UserError
from rankgrad.lab.training.loop import Trainer

import images
from runs import cli, rows, same_weights, stop_after

SMALL = ["backbone=tiny", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2", "epochs=2", "device=cpu"]
SMALL += ["view.resize=16", "view.crop=12", "view.test_crop=12", "save_minutes=0"]


@pytest.mark.parametrize(
    ("scores", "best", "tried"),
    [  # R@1 and mAP@R of each rate
        ([(64.7, 13.3), (70.0, 18.2), (75.6, 23.3), (75.1, 25.1)], 1e-4, 4),  # Stanford Cars, seeds 0 and 2
        ([(64.4, 13.3), (70.1, 18.1), (75.3, 23.7), (77.4, 26.1)], 3e-4, 4),
        ([(94.8, 56.9), (94.6, 55.5), (99.0, 99.0)], 1e-5, 2),  # Flowers 102: what is not better ends it
        ([(81.7, 42.4), (82.5, 43.9), (81.2, 41.5), (99.0, 99.0)], 3e-5, 3),  # CUB
        ([(83.3, 48.1), (83.1, 50.6), None], 3e-5, 3),  # by mAP@R
        ([(82.0, 40.0), (82.6, 40.7), (99.0, 99.0)], 1e-5, 2),  # by less than 0.7 in the mean
        ([(82.0, 40.0), (82.8, 40.7), None], 3e-5, 3),
        ([(82.0, 40.0), None, (99.0, 99.0)], 1e-5, 2),  # the second collapsed
        ([None, (0.3, 0.3), (99.0, 99.0)], 1e-5, 2),
    ],
)
def test_the_first_rate_that_the_next_does_not_beat(scores, best, tried):
    config = recipes.load("folder", ["data.root=x"])[1]
    assert config.rates == (1e-5, 3e-5, 1e-4, 3e-4)
    asked = []

    def train(name, settings):
        asked.append(name)
        assert settings.optim.lr == config.rates[len(asked) - 1] and settings.rates == ()
        score = scores[len(asked) - 1]
        return {"R@1": score[0], "mAP@R": score[1]} if score else {}

    rate, told = rates.choose(config, train)
    assert rate == best and asked == ["lr-1e-05", "lr-3e-05", "lr-0.0001", "lr-0.0003"][:tried]
    assert told.startswith(f"lr={best:g} chosen on held-out training classes, R@1 / mAP@R at 1e-05: ")
    assert told.count("failed") == scores[:tried].count(None)
    assert told.endswith("; a lower one was not tried") == (best == 1e-5)
    assert told.endswith("; a higher one was not tried") == (best == 3e-4)


def test_rates_in_another_order_and_a_single_one():
    config = recipes.load("folder", ["data.root=x", "rates=[1e-4,3e-5]"])[1]
    scores = iter([(74.3, 22.5), (69.0, 17.5)])
    rate, told = rates.choose(config, lambda *run: dict(zip(("R@1", "mAP@R"), next(scores), strict=True)))
    assert rate == 1e-4 and told.endswith("; a higher one was not tried")
    one = recipes.load("folder", ["data.root=x", "rates=[1e-4]"])[1]
    chosen, notes = ImageTask.chosen(one, torch.device("cpu"), lambda *run: pytest.fail("trained"), print)
    assert (chosen.optim.lr, chosen.rates, notes) == (1e-4, (), [])


def test_where_all_rates_fail():
    config = recipes.load("folder", ["data.root=x"])[1]
    rate, told = rates.choose(config, lambda name, settings: {})
    assert rate == 1e-5
    assert told == "lr=1e-05: rates could not be compared, training failed with each of 2"


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
        ([], (1e-5, 3e-5, 1e-4, 3e-4)),
        (["lr=auto", "rates=[1e-5,2e-5]"], (1e-5, 2e-5)),
        (["rates=[]"], ()),
        (["lr=3e-5"], ()),
        (["weights=none"], ()),
        (["hold_out=0.5"], ()),
    ):
        assert recipes.load("folder", more)[1].rates == tried
    assert recipes.load("cub-proxy")[1].rates == ()
    with pytest.raises(UserError, match=r"^rates = \[1e-05, 0.0001, 1e-05\]: expected each rate once$"):
        recipes.load("folder", ["rates=[1e-5,1e-4,1e-5]"])
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
        data = json.loads((trial / "data.json").read_text())
        assert data["counts"]["test classes"] == 3
        assert data["notes"][0].endswith(" images of 3 classes, held out of the training classes (data.hold_out)")
    first, second = ((one["R@1"] + one["mAP@R"]) / 2 for one in scores)
    best = 1e-3 if second >= first + rates.GAIN else 1e-4
    told = f"lr={best:g} chosen on held-out training classes, R@1 / mAP@R at 0.0001: "
    out = capsys.readouterr().out
    assert told in out and out.count("to choose settings, on a part of the training data: ") == 2
    assert out.index("trains on 36 images") < out.index("compares lr=") < out.index("trains a pretrained network")
    assert "compares lr=0.0001 and 0.001 on held-out training classes first. " in out
    assert "; lr=3e-05 trains at once\n" in out
    assert out.count("72/72") == 1  # images are read once, and notes told once
    assert out.count("trains on 36 images") == 1
    report = (folder / "report.html").read_text()
    assert told in report and ", after trials of " in report
    assert recipes.load(str(folder))[1].optim.lr == best
    plain, _ = run.run("folder", [*settings, f"lr={best}", "rates=[]"], out=str(tmp_path / "b"))
    assert rows(plain) == rows(folder) and same_weights(plain / "last.safetensors", folder / "last.safetensors")
    assert not (plain / run.TRIALS).exists()
    capsys.readouterr()
    for name, given in (("folder", settings), (str(folder), [])):  # once more: what was chosen stays, and is told
        _, more = run.run(name, given, out=str(folder), resume=True)
        out = capsys.readouterr().out
        assert more[0].last == results[0].last and told in out and "compares lr" not in out
        assert told in (folder / "report.html").read_text()
    with pytest.raises(UserError, match=r"^--resume: .*a was started with other settings: epochs was 2, now 3$"):
        run.run("folder", [*settings, "epochs=3"], out=str(folder), resume=True)
    with pytest.raises(
        UserError, match=r"^--resume: .*a was started with other settings: optim.lr was .*, now 0.02$"
    ):
        run.run(str(folder), ["lr=0.02"], out=str(folder), resume=True)
    other, _ = run.run(str(folder), ["lr=0.02"], out=str(tmp_path / "c"))
    assert recipes.load(str(other))[1].optim.lr == 0.02 and not (other / run.TRIALS).exists()


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
    begun = place / "seed-0" if seeds > 1 and steps >= 12 else place
    assert told.startswith(f"train {shlex.quote(str(begun))} --"), told
    assert cli(*shlex.split(told)) == 0
    runs = [path.parent.relative_to(whole) for path in whole.rglob("steps.csv")]
    assert len(runs) == 2 + seeds
    for one in runs:
        assert rows(place / one) == rows(whole / one)
    assert len(list(place.glob("seed-*"))) == (seeds if seeds > 1 else 0)


def test_a_refused_resume_leaves_interrupted_trials_as_they_are(tmp_path, settings, monkeypatch, capsys):
    whole, _ = run.run("folder", settings, out=str(tmp_path / "whole"))
    place = tmp_path / "a"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", settings, out=str(place))
    with pytest.raises(UserError, match=r"^--resume: .*lr-0.0001 was started with .*: seed was 0, now 5$"):
        run.run("folder", [*settings, "seed=5"], out=str(place), resume=True)
    with pytest.raises(UserError, match=r"^RUN: no run in .*; interrupted in its trials: --resume continues it"):
        run.write_report(place)
    with pytest.raises(UserError, match=r"^RECIPE: no recipe, YAML file or run folder"):
        run.run(str(place / run.TRIALS), resume=True)
    run.run(str(place), resume=True)
    assert rows(place) == rows(whole)
    with pytest.raises(UserError, match=r"^--resume: .*a was started with .*: rates was \[0.0001, 0.001\]"):
        run.run("folder", [*settings, "rates=[1e-2,3e-2]"], out=str(place), resume=True)


def test_a_run_with_a_rate_goes_on_with_it(tmp_path, settings, monkeypatch):
    """A run of before, or of one seed: nothing is tried in the middle of it."""
    fixed = [*settings, "rates=[]", "lr=0.003"]
    whole, _ = run.run("folder", fixed, out=str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", fixed, out=str(tmp_path / "a"))
    run.run("folder", settings, out=str(tmp_path / "a"), resume=True)
    assert rows(tmp_path / "a") == rows(whole) and not (tmp_path / "a" / run.TRIALS).exists()
    seeds, _ = run.run("folder", settings, out=str(tmp_path / "seeds"), seeds=2)
    before = rows(seeds / "seed-1")
    run.run(str(seeds / "seed-1"), resume=True)
    assert rows(seeds / "seed-1") == before and not (seeds / "seed-1" / run.TRIALS).exists()


def test_the_checkpoint_before_of_a_trial(tmp_path, settings, monkeypatch):
    whole, _ = run.run("folder", settings, out=str(tmp_path / "whole"))
    place = tmp_path / "a"
    with monkeypatch.context() as patch:
        stop_after(patch, 9)  # in the second
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", settings, out=str(place))
    (place / run.TRIALS / "lr-0.001" / "state.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"--resume --previous continues from the checkpoint before it, of step 2"):
        run.run("folder", settings, out=str(place), resume=True)
    run.run("folder", settings, out=str(place), resume=True, previous=True)
    assert rows(place) == rows(whole)
    with pytest.raises(UserError, match=r"^--previous: there is no checkpoint "):
        run.run("folder", [*settings, "rates=[]"], out=str(tmp_path / "new"), resume=True, previous=True)


def test_a_rate_that_fails_is_not_chosen(tmp_path, settings, monkeypatch, capsys):
    inner, fits = Trainer.fit, []

    def fit(self, **options):
        fits.append(self.config.optim.lr)
        if self.config.optim.lr == 1e-3:
            raise TrainingError("loss: nan at step 1", "Try a lower lr.")
        return inner(self, **options)

    monkeypatch.setattr(Trainer, "fit", fit)
    folder, _ = run.run("folder", settings, out=str(tmp_path / "a"))
    assert recipes.load(str(folder))[1].optim.lr == 1e-4
    out = capsys.readouterr().out
    assert "lr-0.001: loss: nan at step 1\n" in out and "0.001: failed" in out and fits == [1e-4, 1e-3, 1e-4]
    assert (folder / run.TRIALS / "lr-0.001" / run.FAILED).read_text() == "loss: nan at step 1\n"
    (folder / "config.yaml").unlink()  # interrupted between the trials and the run
    run.run("folder", settings, out=str(folder), resume=True)
    assert fits[3:] == [1e-4]  # what failed is not tried again


def test_a_trial_is_a_run_on_held_out_classes(tmp_path, settings):
    """Its images are rows of those that were read for the run: the same as if they had been read for it."""
    folder, _ = run.run("folder", settings, out=str(tmp_path / "a"))
    trial = folder / run.TRIALS / "lr-0.0001"
    given = ["rates=[]", "lr=1e-4", "data.hold_out=0.5", "evaluate_first=false", "evaluate_every=2"]
    plain, _ = run.run("folder", [*settings, *given], out=str(tmp_path / "b"))
    assert rows(plain) == rows(trial)
    assert (plain / "data.json").read_text() == (trial / "data.json").read_text()
    for cache in ("none", "device"):
        other, _ = run.run("folder", [*settings, f"cache={cache}"], out=str(tmp_path / cache))
        assert rows(other / run.TRIALS / "lr-0.0001") == rows(trial)


def test_broken_images_to_test_on_are_reported_before_the_trials(tmp_path, settings, capsys):
    root = images.folder_set(tmp_path / "broken", classes=12)
    config = recipes.load("folder", [*settings, f"data.root={root}"])[1]
    tested = data.read(config.data).query.sources[0]
    tested.write_bytes(tested.read_bytes()[:60])
    given = [*settings, f"data.root={root}"]
    with pytest.raises(UserError, match=r"^--data: 1 of 72 images cannot be read: .*data\.broken=skip leaves"):
        run.run("folder", given, out=str(tmp_path / "a"))
    assert not list((tmp_path / "a").rglob("steps.csv")) and "compares" not in capsys.readouterr().out
    folder, _ = run.run("folder", [*given, "broken=skip"], out=str(tmp_path / "a"), resume=True)
    assert capsys.readouterr().out.count("skipped 1 images: ") == 1
    assert len(list((folder / run.TRIALS).glob("lr-*"))) == 2


def test_classes_of_one_image_are_not_counted(monkeypatch):
    items = Items(list("abcdefg"), torch.tensor([0, 0, 1, 1, 1, 2, 3]), None, list("abcdefg"))
    for least, classes, expected in ((5, 2, True), (6, 2, False), (5, 3, False)):
        monkeypatch.setattr(rates, "FEWEST_ITEMS", least)
        monkeypatch.setattr(rates, "FEWEST_CLASSES", classes)
        assert rates.enough(items) is expected


@pytest.mark.slow
def test_two_processes_whose_second_rate_fails(tmp_path, settings):
    """All end, for one of them may not have met the failure; the run goes on without that rate."""
    few = "from rankgrad.lab.retrieval.images import rates; rates.FEWEST_ITEMS, rates.FEWEST_CLASSES = 20, 4"
    call = "import sys; from rankgrad.lab.cli import main; main(sys.argv[1:])"
    (tmp_path / "few.py").write_text(f"{few}\n{call}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(tmp_path / "few.py"), "train", "folder", *settings, "rates=[1e-4,1e18]"]
    command += ["--out", str(tmp_path / "a"), "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120) for _ in range(2)
    )
    assert first.returncode != 0 and "--resume leaves it out and goes on" in first.stderr, first.stderr
    assert second.returncode == 0 and "1e+18: failed" in second.stdout, second.stderr
    assert recipes.load(str(tmp_path / "a"))[1].optim.lr == 1e-4


def test_few_images_train_at_once(tmp_path, settings, monkeypatch):
    for name, number in (("FEWEST_ITEMS", 37), ("FEWEST_CLASSES", 7)):  # six classes of six images to train on
        with monkeypatch.context() as patch:
            patch.setattr(rates, name, number)
            folder, _ = run.run("folder", settings, out=str(tmp_path / name))
        assert not (folder / run.TRIALS).exists()
        assert recipes.load(str(folder))[1].optim.lr == 3e-5


def test_a_part_of_the_data_that_cannot_be_judged_on(tmp_path, settings, capsys):
    """Held-out classes of one image each: the run itself has enough, and begins with the first rate."""
    root = tmp_path / "ones"
    for label in range(25):
        for number in range(1 if label < 20 else 4):
            images.image(root / "train" / f"c{label:02d}" / f"{number}.png", label, number)
        images.image(root / "test" / f"d{label // 2}" / f"{label}.png", label, 0)
    labels = torch.tensor([*range(20), *(label for label in range(20, 25) for _ in range(4))])
    seed = next(s for s in range(1000) if int(labels[by_classes(labels, rates.HELD_OUT, s)[1]].max()) < 20)
    given = [*settings, f"data.root={root}", f"split_seed={seed}"]
    folder, _ = run.run("folder", given, out=str(tmp_path / "a"))
    assert capsys.readouterr().out.count("expected classes with two test items at least, found none") == 2
    assert recipes.load(str(folder))[1].optim.lr == 1e-4


def test_a_wrong_setting_is_said_once_before_anything_is_trained(tmp_path, settings, capsys):
    with pytest.raises(UserError, match=r"^model\.weights: .*nowhere"):
        run.run("folder", [*settings, f"weights={tmp_path}/nowhere.safetensors"], out=str(tmp_path / "a"))
    assert not list((tmp_path / "a").rglob("steps.csv")) and "nowhere" not in capsys.readouterr().out
