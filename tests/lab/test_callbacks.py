"""Callbacks of a run: what they receive, TensorBoard's files, and how Weights & Biases and MLflow are called."""

import math
import sys
import types
from typing import ClassVar

import pytest

from rankgrad.lab import callbacks
from rankgrad.lab.callbacks import Callback
from rankgrad.lab.callbacks.tensorboard import TensorBoard
from rankgrad.lab.recipes import run
from rankgrad.lab.training.errors import UserError

from runs import rows, stop_after

SHORT = ["epochs=2", "save_minutes=0", "evaluate_first=false", "device=cpu"]
ROWS = [
    {"step": 1.0, "epoch": 1.0, "loss": 2.5, "R@1": 0.5},
    {"step": 2.0, "epoch": 1.0, "loss": 2.0, "R@1": math.nan},
]


class Listener(Callback):
    """Notes every call; ``heard`` is of the class, because the loop makes the object."""

    heard: ClassVar[list] = []

    def begin(self, folder, settings, step):
        self.heard.append(("begin", folder.name, settings["loss"]["name"], step))

    def log(self, part, rows):
        self.heard.extend((part, row) for row in rows)

    def end(self):
        self.heard.append(("end",))


def test_a_callback_receives_the_rows_of_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(Listener, "heard", [])
    named = f"callbacks=['{__name__}:Listener']"
    folder, _ = run.run("digits", [*SHORT, named], out=str(tmp_path / "a"))
    first, *between, last = Listener.heard
    assert first[:2] == ("begin", "a") and first[3] == 0 and last == ("end",)
    for part, table in (("train", "steps"), ("evaluation", "evaluations")):
        told = [{k: float(v) for k, v in row.items()} for row in rows(folder, table)]
        assert [row for heard, row in between if heard == part] == told
    assert not (folder / "tensorboard").exists()


def test_a_resumed_run_begins_after_its_last_step_and_may_have_others(tmp_path, monkeypatch):
    monkeypatch.setattr(Listener, "heard", [])
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", [*SHORT, "callbacks=[]"], out=str(tmp_path / "a"))
    run.run("digits", [*SHORT, f"callbacks=['{__name__}:Listener']"], out=str(tmp_path / "a"), resume=True)
    assert Listener.heard[0][3] == 3
    assert Listener.heard[1][0] == "train" and Listener.heard[1][1]["step"] == 4


def test_a_broken_run_ends_its_callbacks(tmp_path, monkeypatch):
    monkeypatch.setattr(Listener, "heard", [])
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", [*SHORT, f"callbacks=['{__name__}:Listener']"], out=str(tmp_path / "a"))
    assert Listener.heard[-1] == ("end",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "callbacks: unknown value 'tensorbord', did you mean 'tensorboard'?, or say module:Class"),
        ("nothing_here:Class", "callbacks: nothing_here:Class: No module named 'nothing_here'"),
        ("json:JSONDecoder", "callbacks: expected a subclass of rankgrad.lab.callbacks.Callback, received 'json:"),
    ],
)
def test_names_that_are_no_callbacks(name, message):
    with pytest.raises(UserError) as caught:
        callbacks.build([name])
    assert str(caught.value).startswith(message)


def test_a_callback_in_the_current_folder(tmp_path, monkeypatch):
    """The command has no current folder among its paths, as ``python -m`` has."""
    (tmp_path / "my_callbacks.py").write_text(
        "from rankgrad.lab.callbacks import Callback\nclass Mine(Callback): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (made,) = callbacks.build(["my_callbacks:Mine"])
    assert type(made).__name__ == "Mine"
    monkeypatch.delitem(sys.modules, "my_callbacks")


def test_tensorboard_that_is_not_installed_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = TensorBoard()
    board.begin(tmp_path, {}, 0)
    board.log("train", ROWS)
    board.end()
    assert "tensorboard is not installed (pip install tensorboard)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_tensorboard_draws_what_is_known(tmp_path):
    board = TensorBoard()
    board.begin(tmp_path, {}, 0)
    board.log("train", ROWS)
    board.log("evaluation", ROWS[:1])
    board.end()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert points == {
        "train/loss": [(1, 2.5), (2, 2.0)],
        "train/R@1": [(1, 0.5)],
        "evaluation/loss": [(1, 2.5)],
        "evaluation/R@1": [(1, 0.5)],
    }


def fake(monkeypatch, name, **members):
    module = types.SimpleNamespace(**members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_weights_and_biases(tmp_path, monkeypatch):
    calls = []

    class Run:
        id = "abc"

        def __getattr__(self, name):
            return lambda *a, **k: calls.append((name, a, k))

    fake(monkeypatch, "wandb", init=lambda **k: calls.append(("init", (), k)) or Run())
    for step in (0, 7):
        (one,) = callbacks.build(["wandb"])
        one.begin(tmp_path, {"lr": 1}, step)
        one.log("train", ROWS)
        one.end()
    begun = [k for name, _, k in calls if name == "init"]
    assert [k["id"] for k in begun] == [None, "abc"] and begun[1]["resume"] == "allow"
    assert begun[0]["config"] == {"lr": 1} and begun[0]["dir"] == str(tmp_path)
    logged = [a[0] for name, a, _ in calls if name == "log"]
    assert logged[:2] == [
        {"train/loss": 2.5, "train/R@1": 0.5, "step": 1, "epoch": 1.0},
        {"train/loss": 2.0, "step": 2, "epoch": 1.0},
    ]
    assert [name for name, *_ in calls].count("finish") == 2


def test_mlflow(tmp_path, monkeypatch):
    calls = []

    def noted(name):
        return lambda *a, **k: calls.append((name, a, k))

    def start_run(**k):
        calls.append(("start_run", (), k))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="xyz"))

    names = ("log_params", "log_metrics", "end_run")
    fake(monkeypatch, "mlflow", start_run=start_run, **{name: noted(name) for name in names})
    for step in (0, 7):
        (one,) = callbacks.build(["mlflow"])
        one.begin(tmp_path, {"optim": {"lr": 1}, "seed": 0}, step)
        one.log("evaluation", ROWS)
        one.end()
    assert [k["run_id"] for name, _, k in calls if name == "start_run"] == [None, "xyz"]
    assert [a for name, a, _ in calls if name == "log_params"] == [({"optim.lr": 1, "seed": 0},)]
    assert [(a[0], k) for name, a, k in calls if name == "log_metrics"][:2] == [
        ({"evaluation/loss": 2.5, "evaluation/R_at_1": 0.5}, {"step": 1}),
        ({"evaluation/loss": 2.0}, {"step": 2}),
    ]
    assert [name for name, *_ in calls].count("end_run") == 2
