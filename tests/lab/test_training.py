"""The whole way: settings, training, checkpoints, an exact continuation, a stop when a loss is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.cli import main
from rankgrad.lab.recipes import resuming, run
from rankgrad.lab.training import checkpoint, log
from rankgrad.lab.training.errors import UserError

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


def test_other_data_is_not_resumed_on(tmp_path, monkeypatch):
    """A class more would be another split: test items would be trained on, proxies stand for other classes."""
    root = images.folder_set(tmp_path / "data", classes=8, each=8)
    settings = [*FOLDER, "data=folder", "test_share=0.25", "loss=proxy"]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run.run("folder", [*settings, f"data.root={root}"], out=str(tmp_path / "cut"))
    before = (tmp_path / "cut" / "data.json").read_text()
    more = tmp_path / "more"
    shutil.copytree(root, more)
    shutil.copytree(root / "class0", more / "a new one")
    renamed = tmp_path / "renamed"
    shutil.copytree(root, renamed)
    (renamed / "class0").rename(renamed / "class9")
    for other, told in (
        (more, r"48 training items, now 56; 6 training classes, now 7$"),
        (renamed, "the names, classes, grades or order of the items differ$"),
    ):
        with pytest.raises(UserError, match=rf"^--resume: .*cut was started on other data: {told}"):
            run.run("folder", [*settings, f"data.root={other}"], out=str(tmp_path / "cut"), resume=True)
    assert (tmp_path / "cut" / "data.json").read_text() == before
    notes = json.loads(before)
    (tmp_path / "cut" / "data.json").write_text("{}")  # of a run that was started before these were written
    resuming.same_data(tmp_path / "cut", notes)
    (tmp_path / "cut" / "data.json").write_text(before)
    with pytest.raises(UserError, match=r"batches of 6, now they have 4; .* number of processes$"):
        resuming.same_data(tmp_path / "cut", notes | {"batch": 4})
    root.rename(tmp_path / "moved")
    run.run("folder", [*settings, f"data.root={tmp_path / 'moved'}"], out=str(tmp_path / "cut"), resume=True)


def test_eval_says_when_it_tests_on_training_classes(tmp_path, capsys):
    root = images.folder_set(tmp_path / "data", classes=8, each=8)
    settings = [*FOLDER, "data=folder", f"data.root={root}", "loss=ap", "data.hold_out=0.5", "epochs=1"]
    folder, _ = run.run("folder", settings, out=str(tmp_path / "a"))
    for more, told in (
        ([], ""),
        (["test_share=1"], "2 of 8 test classes are training classes too, by their names"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(folder), *more])
        assert not ended.value.code
        shown = capsys.readouterr().out
        assert told in shown and ("training classes too" in shown) == bool(told)


def test_processes_share_the_statistics_of_batch_norm_before_they_evaluate(tmp_path, monkeypatch):
    shared = []
    monkeypatch.setattr("rankgrad.distributed.share_buffers", shared.append)
    folder, _ = run.run("digits", ["epochs=2", "evaluate_first=true", "device=cpu"], out=str(tmp_path / "a"))
    assert len(shared) == len(rows(folder, "evaluations")) >= 2


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
    with pytest.raises(
        UserError, match="embeddings: expected finite numbers, received NaN or infinity: the network"
    ):
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


def test_of_evaluations_with_the_same_recall_the_best_is_the_one_with_more_map(tmp_path, monkeypatch):
    """An easy folder has R@1 100 before training: the best weights are still trained ones."""
    from rankgrad.lab.retrieval.task import RetrievalTask

    inner, given = RetrievalTask.evaluate, iter([60.0, 80.0, 70.0])
    monkeypatch.setattr(
        RetrievalTask, "evaluate", lambda self: {**inner(self), "R@1": 100.0, "mAP@R": next(given)}
    )
    settings = [*SHORT, "evaluate_first=true"]
    folder, (result,) = run.run("digits", settings, out=str(tmp_path / "a"))
    assert (result.best["epoch"], result.best["mAP@R"]) == (1, 80)
    assert checkpoint.load_weights(folder / "best.safetensors")[1]["metrics"]["epoch"] == 1


def test_of_equal_evaluations_the_best_is_the_last(tmp_path, monkeypatch, capsys):
    """Where nothing can be gained, the network to use is the trained one."""
    from rankgrad.lab.retrieval.task import RetrievalTask

    inner = RetrievalTask.evaluate
    monkeypatch.setattr(RetrievalTask, "evaluate", lambda self: {**inner(self), "R@1": 100.0, "mAP@R": 100.0})
    settings = [*SHORT, "evaluate_first=true"]
    _, (result,) = run.run("digits", settings, out=str(tmp_path / "equal"))
    assert result.best["epoch"] == 2 and "before training" not in capsys.readouterr().out
    falling = iter([90.0, 80.0, 70.0])
    monkeypatch.setattr(
        RetrievalTask, "evaluate", lambda self: {**inner(self), "R@1": 95.0, "mAP@R": next(falling)}
    )
    folder, (result,) = run.run("digits", settings, out=str(tmp_path / "worse"))
    assert result.best["epoch"] == 0
    (line,) = run.below_start(folder, [result])
    assert line == "best.safetensors is the network before training; the trained one is last.safetensors"
    better = replace(result, best=result.last)
    (line,) = run.below_start(folder, [better, result])  # of several seeds
    assert line.startswith("best.safetensors of run 2 of 2 is the network before training")
    worse = replace(better, last=better.last | {"R@1": 90.0})
    (line,) = run.below_start(folder, [worse, better])
    assert line.startswith("run 1 of 2 ended below its start: R@1 95.0 before training, 90.0 after it; ")


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
    values = [result.best["mAP@R"] for result in results]  # of 898 queries R@1 may be the same for both
    assert values[0] != values[1]
    told = json.loads((folder / "seeds.json").read_text())
    best = next(row for row in told if row["metric"] == "mAP@R" and row["of"] == "best")
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
