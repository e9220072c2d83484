"""The whole way: settings, training, checkpoints, an exact continuation, a stop when a loss is lost."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from rankgrad import distributed
from rankgrad.lab import recipes
from rankgrad.lab.cli import main
from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint, log, optim
from rankgrad.lab.training.config import Optim
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.loop import Trainer
from rankgrad.lab.training.seeding import seed_step

import images
from runs import rows, same_weights, stop_after

SHORT = ["epochs=2", "save_minutes=0", "evaluate_first=false", "device=cpu"]
FOLDER = [
    "data.cache=ram",
    "backbone=tiny",
    "pooling=own",
    "weights=none",
    "precision=fp32",
    "embedding=8",
    "batch.size=6",
    "per_class=2",
    "view.resize=16",
    "view.crop=12",
    "lr=1e-3",
    "epochs=2",
    "save_minutes=0",
    "evaluate_first=false",
]


def test_digits_learn(tmp_path):
    folder, (result,) = run.run("digits", ["epochs=3"], out=str(tmp_path / "a"))
    first = rows(folder, "evaluations")[0]
    assert float(first["mAP@R"]) < 45
    assert result.last["mAP@R"] > 75
    assert result.best["R@1"] > 95
    assert len(rows(folder)) == 24
    assert 2400 / result.seconds < result.speed < 1e6  # evaluations apart
    assert {p.name for p in folder.iterdir()} >= {
        "best.safetensors",
        "last.safetensors",
        "state.pt",
        "config.yaml",
        "report.html",
        "tensorboard",
    }
    assert recipes.load(str(folder))[1].epochs == 3
    assert not list(folder.glob(".*.part"))


@pytest.mark.parametrize(
    "settings",
    [
        ["data=folder", "loss=recall", "loss.memory=2"],
        ["data=folder", "loss=pml:ProxyAnchorLoss", "optim=adamw", "lr=1e-3", "view.augment=crop"],
        [
            "data=folder",
            "loss=ap",
            "optim=sgd",
            "lr=1e-2",
            "warmup=3",
            "clip=0.1",
            "batch_norm=train",
            "precision=bf16",
        ],
    ],
)
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_resume_is_exact_to_the_bit(tmp_path, monkeypatch, settings, stop):
    """In the middle of an epoch, with memory, proxies, schedule and augmentation."""
    root = images.folder_set(tmp_path / "data", classes=8, each=8)
    settings = [*FOLDER, *settings, f"data.root={root}", "test_share=0.25"]
    steps = 2 * (48 // 6)
    whole, (expected,) = run.run("folder", settings, out=str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", settings, out=str(tmp_path / "cut"))
    assert len(rows(tmp_path / "cut")) == stop
    cut, (found,) = run.run("folder", settings, out=str(tmp_path / "cut"), resume=True)
    assert rows(cut) == rows(whole) and len(rows(whole)) == steps
    assert rows(cut, "evaluations") == rows(whole, "evaluations")
    assert (found.best, found.last) == (expected.best, expected.last)
    assert same_weights(cut / "last.safetensors", whole / "last.safetensors")
    assert same_weights(cut / "best.safetensors", whole / "best.safetensors")


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, monkeypatch):
    settings = ["epochs=1", "save_minutes=1000", "evaluate_first=true", "device=cpu"]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", settings, out=str(tmp_path / "a"))
    run.run("digits", settings, out=str(tmp_path / "a"), resume=True)
    assert [row["step"] for row in rows(tmp_path / "a", "evaluations")] == ["0", rows(tmp_path / "a")[-1]["step"]]


def test_embeddings_that_are_no_numbers_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "rankgrad.lab.retrieval.task.embed", lambda *args, **kwargs: torch.full((898, 8), torch.nan)
    )
    with pytest.raises(UserError, match="embeddings: expected finite numbers, received others: the network"):
        run.run("digits", ["epochs=1", "evaluate_first=true", "device=cpu"], out=str(tmp_path / "a"))


def test_killed_at_any_moment_and_continued(tmp_path):
    """A real SIGKILL while checkpoints are being written, twice; then the same losses as without."""
    whole, _ = run.run("digits", SHORT, out=str(tmp_path / "whole"))
    command = [
        sys.executable,
        "-m",
        "rankgrad",
        "train",
        "digits",
        *SHORT,
        "--out",
        str(tmp_path / "cut"),
        "--resume",
    ]
    for wanted in (3, 9):
        threads = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads())
        }  # they decide the last bit of sums
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=threads, **quiet)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(log.read_table(tmp_path / "cut" / "steps.csv")) >= wanted:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        process.wait()
    cut, _ = run.run("digits", SHORT, out=str(tmp_path / "cut"), resume=True)
    assert rows(cut) == rows(whole)
    assert same_weights(cut / "last.safetensors", whole / "last.safetensors")


def test_files_change_by_one_rename(tmp_path, monkeypatch):
    """Stopped before the rename the old file is there, whole; nothing writes into the file itself."""
    path = tmp_path / "a.txt"
    checkpoint.write_text(path, "old")

    def killed(source, target):
        assert source.read_text() == "new"
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(UserError, match="killed"):
        checkpoint.write_text(path, "new")
    assert path.read_text() == "old"


def test_weights_have_the_permissions_of_the_other_files(tmp_path):
    checkpoint.write_text(tmp_path / "a.txt", "a")
    checkpoint.save_weights(tmp_path / "a.safetensors", torch.nn.Linear(2, 3), {"config": {"b": 1}, "metrics": {}})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.txt").stat().st_mode
    assert checkpoint.load_weights(tmp_path / "a.safetensors")[1] == {"config": {"b": 1}, "metrics": {}}


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    from rankgrad.lab.retrieval.task import RetrievalTask

    inner = RetrievalTask.batch_loss
    monkeypatch.setattr(
        RetrievalTask,
        "batch_loss",
        lambda self, net, step: inner(self, net, step) * (torch.nan if step == 5 else 1),
    )
    with pytest.raises(UserError, match=r"^loss: nan at step 6 \(epoch 1, learning rate .*state\.pt"):
        run.run("digits", SHORT, out=str(tmp_path / "a"))
    assert checkpoint.load_state(tmp_path / "a" / "state.pt")["step"] == 5
    assert len(rows(tmp_path / "a")) == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_stops_the_run(tmp_path, monkeypatch, value):
    """At once: no checkpoint would be the best one by it, which is told after all training otherwise."""
    from rankgrad.lab.retrieval.task import RetrievalTask

    inner = RetrievalTask.evaluate
    monkeypatch.setattr(RetrievalTask, "evaluate", lambda self: {**inner(self), self.headline: value})
    with pytest.raises(UserError, match=rf"^R@1: {value} after step 8 \(epoch 1\), training stopped"):
        run.run("digits", SHORT, out=str(tmp_path / "a"))
    assert len(rows(tmp_path / "a")) == 8


def test_nan_embeddings_stop_the_run(tmp_path):
    with pytest.raises(UserError, match=r"^loss: nan at step"):
        run.run("digits", [*SHORT, "lr=1e18", "optim.schedule=constant"], out=str(tmp_path / "a"))


def test_a_run_goes_on_with_the_settings_it_began_with(tmp_path):
    run.run("digits", [*SHORT, "epochs=1"], out=str(tmp_path / "a"))
    with pytest.raises(UserError, match=r"other settings: loss\.pairs was None, now 1; optim\.lr was 0\.003"):
        run.run("digits", [*SHORT, "epochs=1", "loss.pairs=1", "lr=1e-2"], out=str(tmp_path / "a"), resume=True)
    with pytest.raises(UserError, match=r"--out: .* already has a run; --resume continues it"):
        run.run("digits", SHORT, out=str(tmp_path / "a"))
    before = json.loads((tmp_path / "a" / "machine.json").read_text())
    (tmp_path / "a" / "machine.json").write_text(json.dumps({**before, "started": "yesterday", "hardware": "?"}))
    again, _ = run.run(str(tmp_path / "a"), ["save_minutes=3"], resume=True)
    assert again == tmp_path / "a"
    assert json.loads((again / "machine.json").read_text()) == {**before, "started": "yesterday"}


def test_runs_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(2):
        names.append(run.folder_for("digits", None, resume=False))
        names[-1].mkdir(parents=True)
    assert [str(name) for name in names] == ["runs/digits", "runs/digits-2"]
    assert run.folder_for("digits", None, resume=True) == names[1]


def test_seeds_report_mean_and_deviation(tmp_path):
    folder, results = run.run("digits", ["epochs=1", "evaluate_first=false"], out=str(tmp_path / "a"), seeds=2)
    values = [result.best["R@1"] for result in results]
    assert values[0] != values[1]
    told = json.loads((folder / "seeds.json").read_text())
    best = next(row for row in told if row["metric"] == "R@1" and row["of"] == "best")
    mean = sum(values) / 2
    assert best["mean"] == pytest.approx(mean)
    assert best["deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert (folder / "seed-0" / "best.safetensors").is_file() and (folder / "seed-1" / "report.html").is_file()
    assert f"{mean:.1f}" in (page := (folder / "report.html").read_text())
    for path in [folder / "report.html", *folder.glob("seed-*/report.html")]:
        path.unlink()
    assert run.write_report(folder).read_text() == page
    assert re.findall('href="([^"]*)"', page) == ["seed-0/report.html", "seed-1/report.html"]
    assert all((folder / link).is_file() for link in ("seed-0/report.html", "seed-1/report.html"))
    with pytest.raises(UserError, match=r"--beside: expected a single run as RUN, received several; .*seed-0"):
        run.write_report(folder, [folder / "seed-1"])


def test_every_data_set_trains_from_the_command_line(tmp_path, capsys):
    small = [s for s in FOLDER if s != "data.cache=ram"]
    for name, make in (("cub", images.cub_set), ("sop", images.sop_set), ("inshop", images.inshop_set)):
        root = make(tmp_path / name)
        per_class = ["batch.size=4", "per_class=2", "batches_per_pair=1"]
        cache = "none" if name == "cub" else "device"
        out = tmp_path / f"run-{name}"
        more = [*small, *per_class, "data.counts=any", "epochs=1", f"data.cache={cache}", "device=cpu"]
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["train", name, *more, "--data", str(root), "--out", str(out)])
        assert "report:" in capsys.readouterr().out
        (last,) = rows(out, "evaluations")
        assert list(last)[2:] == [f"R@{k}" for k in recipes.load(name)[1].recall_at] + ["mAP@R", "AP"]
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["eval", str(out / "last.safetensors")])
        shown = capsys.readouterr().out
        assert re.search(r"embedding .* (\d+)/\1 ", shown)  # queries and gallery, to the end
        assert log.in_words({metric: float(value) for metric, value in last.items()}) in shown


def test_the_bar_says_when_a_run_evaluates(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(log.Progress, "advance", lambda self, done, text="": said.append((done, text[:10])))
    root = images.folder_set(tmp_path / "data")
    settings = [*FOLDER, "device=cpu", "evaluate_first=false", f"data.root={root}"]
    _, (result,) = run.run("folder", settings, out=str(tmp_path / "a"))
    steps = int(result.last["step"])
    assert [done for done, text in said if text == "evaluating"] == [steps // 2, steps]
    assert said[-1] == (steps, f"R@1 {result.last['R@1']:.1f}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "steps", "milestones": [1], "decay": 0.3}, [1, 1, 0.3, 0.3]),
        ({"schedule": "steps", "milestones": [0.5, 1.5], "decay": 0.5}, [1, 0.5, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]),
        ({"schedule": "constant", "warmup": 4}, [0.25, 0.5, 0.75, 1]),
    ],
)
def test_learning_rates(settings, expected):
    config = Optim(lr=2.0, **settings)
    found = [optim.learning_rate(config, step, 2, 2) for step in range(4)]
    assert found == pytest.approx([2 * e for e in expected])


def test_parameter_groups(tmp_path):
    """Backbone, embedding and proxies at their own rates; nothing left out, nothing twice."""
    settings = ["loss=pml:ProxyNCALoss", "embedding_lr=7", "proxy_lr=0.05", "lr=1e-3"]
    kind, config = recipes.load("digits", settings)
    task = kind(config, torch.device("cpu"))
    trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
    optim.set_rates(trainer.optimizer, config.optim, 0, 8, 10)
    groups = trainer.optimizer.param_groups
    assert [g["lr"] for g in groups] == pytest.approx([1e-3, 7e-3, 5e-2])
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for m in (task.network, task.loss) for p in m.parameters())
    assert [tuple(p.shape) for p in groups[2]["params"]] == [(10, 16)]


def test_fp16_scales_the_loss_and_leaves_lambda_alone(tmp_path):
    """A GradScaler multiplies the loss by 65,536; the update must be that of the plain gradient."""
    kind, config = recipes.load("digits", ["optim=sgd", "lr=0.1", "loss=recall", "loss.lam=4"])
    task = kind(config, torch.device("cpu"))
    start = {n: t.clone() for n, t in task.network.state_dict().items()}
    found = []
    for scale in (1.0, 65536.0):
        task.network.load_state_dict(start)
        trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer._train_one(task.network)
        found.append([p.clone() for p in task.network.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert any(
        not torch.equal(a, start[n]) for (n, _), a in zip(task.network.named_parameters(), found[0], strict=True)
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_too(tmp_path, precision):
    _, (result,) = run.run("digits", ["epochs=2", f"precision={precision}", "device=cpu"], out=str(tmp_path / "a"))
    assert result.last["mAP@R"] > 70 and result.last["R@1"] > 94


def test_compiled_training_is_the_same(tmp_path, monkeypatch):
    """Through the tracer, without waiting for a compiler; the weights keep their names."""
    folders = [run.run("digits", SHORT, out=str(tmp_path / "plain"))[0]]
    monkeypatch.setattr(Trainer, "_wrapped", lambda self: torch.compile(self.task.network, backend="eager"))
    folders.append(run.run("digits", SHORT, out=str(tmp_path / "compiled"))[0])
    assert rows(folders[0]) == rows(folders[1])
    assert same_weights(*(folder / "last.safetensors" for folder in folders))


@pytest.mark.parametrize("several", [False, True])
def test_what_is_compiled_is_recorded_in_one_process(tmp_path, monkeypatch, several):
    kind, config = recipes.load("digits", [*SHORT, "compile=true"])
    task = kind(config, torch.device("cpu"))
    trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
    assert task.same_shapes and torch.backends.cudnn.benchmark
    task.same_shapes = False  # as a detector's
    Trainer(task, config, tmp_path, torch.device("cpu"))
    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch, "compile", lambda network, mode: (network, mode))
    assert trainer._wrapped() is task.network  # on a CPU nothing is compiled
    trainer.device = torch.device("cuda")
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda network, device_ids: network)
    monkeypatch.setattr(distributed, "active", lambda: several)
    assert trainer._wrapped() == (task.network, None if several else "reduce-overhead")
    trainer.config = recipes.load("digits", SHORT)[1]
    assert trainer._wrapped() is task.network  # nor what is not asked for


def test_every_step_seeds_every_generator():
    def draws(seed, step):
        seed_step(seed, step)
        return torch.rand(1).item(), np.random.rand(), random.random()

    assert draws(0, 3) == draws(0, 3)
    for other in (draws(0, 4), draws(1, 3)):
        assert all(a != b for a, b in zip(draws(0, 3), other, strict=True))


def test_every_step_draws_its_own_crops(monkeypatch):
    """Fixed by (seed, step): the same image is cut differently in every step, and alike in a repeated run."""
    from rankgrad.lab.retrieval.images import augment

    seen, inner = [], augment.crops

    def watched(images, boxes, flips, view):
        seen.append((boxes, flips))
        return inner(images, boxes, flips, view)

    monkeypatch.setattr(augment, "crops", watched)
    settings = ["view.resize=12", "view.augment=resized_crop", "view.flip=true"]
    for seed in (0, 0, 1):
        kind, config = recipes.load("digits", [*settings, f"seed={seed}"])
        task = kind(config, torch.device("cpu"))
        for step in (0, 1):
            task.batch_loss(task.network, step)
    first, second, *again, other, _ = seen
    for a, b in zip((first, second), again, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    for b in (second, other):
        assert not torch.equal(first[0], b[0]) and not torch.equal(first[1], b[1])


def test_logs(tmp_path):
    table = log.CsvLog(tmp_path / "t.csv", -1)
    table.append([{"step": s, "loss": s / 3} for s in range(1, 6)])
    with table.path.open("a") as file:
        file.write("6,0.")  # torn by a kill
    assert [r["step"] for r in log.read_table(table.path)] == [1, 2, 3, 4, 5, 6]
    table = log.CsvLog(table.path, 3)
    table.append([{"step": 4, "loss": 0.5}])
    assert log.read_table(table.path) == [
        {"step": 1.0, "loss": 1 / 3},
        {"step": 2.0, "loss": 2 / 3},
        {"step": 3.0, "loss": 1.0},
        {"step": 4.0, "loss": 0.5},
    ]
