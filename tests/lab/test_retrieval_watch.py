"""Training that fails says so: collapsed embeddings, gradients that are zero, a network that got worse."""

import math

import pytest
import torch
from safetensors.torch import save_file

from rankgrad.lab import recipes
from rankgrad.lab.cli import main
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval import batches, watch
from rankgrad.lab.retrieval.config import Batch
from rankgrad.lab.retrieval.images.model import tiny
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.retrieval.splits import Items, by_items
from rankgrad.lab.training.errors import UserError

import images
from runs import rows, stop_after

SMALL = ["backbone=tiny", "weights=none", "precision=fp32", "embedding=8", "view.resize=16", "view.crop=12"]
SMALL += ["lr=1e-3", "device=cpu"]


def test_spread():
    one = torch.tensor([[3.0, 4.0]])
    assert watch.spread(one.repeat(5, 1)).item() == pytest.approx(0, abs=1e-6)
    assert watch.spread(torch.cat([one, -2 * one])).item() == pytest.approx(1)
    right = torch.tensor([[1.0, 0.0], [0.0, 7.0]])
    assert watch.spread(right).item() == pytest.approx(1 - math.sqrt(0.5))


def test_zero_share():
    assert watch.zero_share(torch.tensor([[0.0, 0.0], [0.0, 1e-30], [0.0, 0.0], [1.0, 1.0]])).item() == 0.5


def steps(spreads, still=0.0, loss=1.0):
    return [
        {"step": s + 1.0, "epoch": 1.0, "lr": 0.1, "loss": loss, "spread": value, "zero_gradients": still}
        for s, value in enumerate(spreads)
    ]


def test_a_collapse_is_an_error_with_advice():
    seen = watch.Watch("", 1000)
    assert seen.read(steps([0.4] * 40)) == []
    with pytest.raises(UserError, match=r"collapsed at step 1[12]\d .* 0\.400 to 0\.0010\. .*lower lr.*memory"):
        seen.read(steps([0.001] * 200))
    low = watch.Watch("", 1000)  # an untrained network starts low, and may rise
    assert low.read(steps([0.001] * 30 + [0.002] * 30 + [0.3] * 30)) == []
    short = watch.Watch("", 1000)  # embeddings that part again have not collapsed
    assert short.read(steps([0.4] * 20 + [0.0001] * 100 + [0.1] * 20)) == []


@pytest.mark.parametrize("total", [15, 40, 75])
def test_a_collapse_in_a_short_run(total):
    """One that is over before a long run's patience would be."""
    with pytest.raises(UserError, match=r"the embeddings collapsed at step"):
        watch.Watch("", total).read(steps([0.4] * 4 + [0.001] * (total - 4)))
    assert watch.Watch("", total).read(steps([0.4] * 4 + [0.001] * 9 + [0.3] * (total - 13))) == []


def test_a_run_whose_embeddings_collapse_stops(tmp_path, monkeypatch):
    calls = []

    def falling(embeddings):
        calls.append(0.3 if len(calls) < 25 else 1e-4)
        return torch.tensor(calls[-1])

    monkeypatch.setattr(watch, "spread", falling)
    with pytest.raises(UserError, match=r"the embeddings collapsed at step [45][0-9]"):
        run.run("digits", ["epochs=10", "device=cpu", "evaluate_first=false"], out=str(tmp_path / "a"))
    assert len(calls) == len(rows(tmp_path / "a")) < 60


def test_a_run_that_goes_on_remembers_how_spread_it_was(tmp_path, monkeypatch):
    settings = ["epochs=6", "device=cpu", "evaluate_first=false", "evaluate_every=6", "save_minutes=0"]
    monkeypatch.setattr(watch, "PATIENCE", 3)
    monkeypatch.setattr(watch, "spread", lambda embeddings: torch.tensor(0.3))
    with monkeypatch.context() as patch:
        stop_after(patch, 25)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", settings, out=str(tmp_path / "a"))
    monkeypatch.setattr(watch, "spread", lambda embeddings: torch.tensor(1e-4))
    with pytest.raises(UserError, match=r"fell from 0\.300"):
        run.run("digits", settings, out=str(tmp_path / "a"), resume=True)


def test_no_gradient_is_said_once():
    seen = watch.Watch(watch.advice("recall", {"lam": 0.2}), 1000)
    said = seen.read(steps([0.4] * 60, still=0.99, loss=0.5))
    assert len(said) == 1 and seen.read(steps([0.4] * 60, still=0.99)) == []
    assert said[0].startswith("step 20: 99% of the embeddings get no gradient, the loss is 0.5; ")
    assert "loss.margin" in said[0] and "loss.lam" in said[0]
    assert "loss.threshold" in watch.advice("proxy", {})
    assert "loss.window" in watch.advice("ap", {}) and "miner" in watch.advice("pml:TripletMarginLoss", {})
    assert watch.Watch("", 1000).read(steps([0.4] * 60, still=0.9)) == []


def test_a_loss_that_reaches_nothing_is_reported(tmp_path, capsys):
    settings = ["loss=ap", "loss.window=1e-9", "loss.margin=0", "epochs=3", "device=cpu", "evaluate_every=3"]
    folder, _ = run.run("digits", settings, out=str(tmp_path / "a"))
    assert capsys.readouterr().out.count("of the embeddings get no gradient") == 1
    assert min(float(row["zero_gradients"]) for row in rows(folder)) > 0.95


def test_a_run_that_ends_below_its_start_says_so_in_its_last_line(tmp_path, capsys):
    for settings, below in ((["optim=sgd", "lr=1000", "loss=recall", "loss.lam=4"], True), ([], False)):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["train", "digits", "epochs=1", "device=cpu", *settings, "--out", str(tmp_path / str(below))])
        last = capsys.readouterr().out.splitlines()[-1]
        assert ("below its start" in last) == below, last
        if below:
            assert "R@1 88.1 before" in last and last.endswith("; try a lower lr, or more epochs")
        assert ("this run ended below" in (tmp_path / str(below) / "report.html").read_text()) == below


@pytest.mark.parametrize(
    ("weights", "lr", "advice"),
    [
        ("w.safetensors", "3e-5", "try a lower lr"),
        ("none", "3e-5", "try a higher lr, or more epochs"),
        ("none", "0.1", "try a lower lr, or more epochs"),
    ],
)
def test_advice_fits_what_the_network_starts_from(tmp_path, weights, lr, advice):
    """A rate for pretrained networks is too low from scratch: a lower one would not help."""
    save_file(tiny().state_dict(), tmp_path / "w.safetensors")
    root = images.folder_set(tmp_path / "data", classes=4, each=4)
    given = "none" if weights == "none" else tmp_path / weights
    settings = [*SMALL, f"data.root={root}", f"weights={given}", f"lr={lr}"]
    task = ImageTask(recipes.load("folder", settings)[1], torch.device("cpu"))
    assert task.describe()["advice"] == advice


# ------------------------------------------------------------------------------------------- small data


def items(*counts):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Items([""] * len(labels), labels, None, [""] * len(labels))


@pytest.mark.parametrize(
    ("counts", "size", "per_class"),
    [
        ([20] * 10, 40, 4),
        ([40] * 10, 80, 8),
        ([400] * 10, 120, 12),
        ([3] * 10, 30, 3),
        ([2] * 40, 80, 2),
        ([3] * 60, 126, 3),
        ([1] * 20 + [9], 42, 2),
        ([20] * 32, 128, 4),
        ([50, 60], 20, 10),
        ([1, 1, 30], 6, 2),
    ],
)
def test_batches_fit_the_classes_there_are(counts, size, per_class):
    batch, told = batches.fitted(Batch(), items(*counts))
    assert (batch.size, batch.per_class) == (size, per_class)
    assert bool(told) == (size != 128) and (not told or f"batches of {size}" in told)
    batches.sampler_of(batch, items(*counts), 0).at(0)


def test_a_fitted_batch_is_told_with_the_one_of_the_settings():
    """64 x 2 are 128 as well: the size alone does not say that per_class is another one."""
    batch, told = batches.fitted(Batch(size=128, per_class=1), items(*[30] * 64))
    assert (batch.size, batch.per_class) == (128, 2)
    assert told == "batches of 128, all 64 classes x 2, instead of 128, 128 classes x 1"


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_a_fitted_batch_can_be_shared_among_processes(processes):
    """The user has not set its size, so its size is no reason to refuse a run."""
    for counts in ([20] * 11, [40] * 7, [3] * 9, [2] * 13):
        batch, told = batches.fitted(Batch(), items(*counts), processes)
        assert batch.size % processes == 0 == batch.size % batch.per_class and f"batches of {batch.size}" in told
        assert batch.size >= 0.7 * batches.fitted(Batch(), items(*counts))[0].size
        batches.sampler_of(batch, items(*counts), 0).at(0)


def test_a_small_folder_trains(tmp_path, capsys):
    """20 classes of 20 images with the settings as they are, and classes of one image; both are reported."""
    root = images.folder_set(tmp_path / "data", classes=20, each=20)
    for name in ("alone", "single"):
        images.image(root / name / "a.png", 30, 0)
    _, (result,) = run.run("folder", [*SMALL, "epochs=1", f"data.root={root}"], out=str(tmp_path / "a"))
    said = capsys.readouterr().out
    assert "batches of 44, all 11 classes x 4, instead of 128" in said
    assert "steps in all" not in said  # one epoch is a trial
    assert "classes with a single item" in said and ("alone" in said or "single" in said)
    assert "trains on 182 images of 11 classes, tests on 220 images of 11 classes" in said
    assert result.last["step"] >= 1


def test_too_few_steps_and_rates_that_are_none_are_told(tmp_path):
    root = images.folder_set(tmp_path / "data", classes=20, each=8)
    settings = [*SMALL, f"data.root={root}", "weights=none"]

    def notes(*more):
        _, config = recipes.load("folder", [*settings, *more])
        return " ".join(ImageTask(config, torch.device("cpu")).notes)

    said = notes("epochs=15", "lr=3e-5")
    assert "epochs=15 is 30 steps in all, which may be too few: try epochs=50" in said
    assert (
        "lr=3e-05 is a learning rate for pretrained networks, and this one starts from scratch (weights=none)"
        in said
    )
    assert not {"steps", "rate"} & set(notes("epochs=30", "lr=3e-4").split())
    alone = notes("loss=ap", "batch.size=8", "per_class=1")
    assert "per_class=1: no item has another one of its class in a batch" in alone and "try per_class=4" in alone
    assert "per_class" not in notes("loss=ap", "batch.size=8", "per_class=2")
    assert "per_class" not in notes("loss=proxy", "batch.size=8", "per_class=1")


def test_rate_and_epochs_follow_from_the_weights(tmp_path):
    """15 epochs at 3e-5 of a pretrained network; from scratch that lowers R@1. Saved as numbers, and told."""
    for more, lr, epochs in (
        ([], 3e-5, 15),
        (["weights=file"], 3e-5, 15),
        (["weights=none"], 3e-3, 90),
        (["weights=none", "lr=0.01"], 0.01, 90),
        (["weights=none", "epochs=2"], 3e-3, 2),
    ):
        _, config = recipes.load("folder", more)
        assert (config.optim.lr, config.epochs) == (lr, epochs)
        assert recipes.checked(config.model_dump(mode="json"))[1] == config
    root = images.folder_set(tmp_path / "data", classes=20, each=8)
    settings = [word for word in SMALL if not word.startswith("lr=")]
    _, config = recipes.load("folder", [*settings, f"data.root={root}"])
    notes = ImageTask(config, torch.device("cpu")).notes
    assert "trains a network from scratch: 90 epochs x 2 steps, lr=0.003, crops of 12 pixels" in notes
    _, config = recipes.load("folder", [*settings, f"data.root={root}", "epochs=1"])
    assert "1 epoch x 2 steps" in " ".join(ImageTask(config, torch.device("cpu")).notes)
    _, config = recipes.load("folder", [*settings, f"data.root={root}", "view.test_crop=16"])
    notes = ImageTask(config, torch.device("cpu")).notes
    assert any(line.endswith("lr=0.003, crops of 12 pixels, tested at 16 (view.test_crop)") for line in notes)
    with pytest.raises(UserError, match=r"^epochs: .*received 'auto'$"):
        recipes.load("voc07", ["epochs=auto"])


def test_few_classes_are_split_by_images(tmp_path):
    root = images.folder_set(tmp_path / "data", classes=2, each=8)
    folder, _ = run.run("folder", [*SMALL, "epochs=1", f"data.root={root}"], out=str(tmp_path / "a"))
    notes = (folder / "data.json").read_text()
    assert '"training classes": 2' in notes
    assert "2 of 2 test classes are training classes too" in notes
    training, testing = by_items(torch.tensor([1, 0, 1, 0, 1]))
    assert (training.tolist(), testing.tolist()) == ([0, 1, 4], [2, 3])


def test_a_single_test_class_is_reported(tmp_path):
    root = images.folder_set(tmp_path / "data", classes=4, each=6)
    _, config = recipes.load("folder", [*SMALL, "test_share=0.25", f"data.root={root}"])
    counts, *notes = ImageTask(config, torch.device("cpu")).notes
    assert counts == "trains on 18 images of 3 classes, tests on 6 images of 1 class"
    assert any(
        note.startswith("all test images are of one class, so every retrieved one is relevant; data.test_share")
        for note in notes
    )
