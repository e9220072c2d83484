"""The files of a run: whole or not there, with a checksum, and what happens to damaged ones."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint, log
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.loop import Trainer

from runs import message_of, rows, stop_after

SHORT = ["epochs=1", "save_minutes=0", "evaluate_first=false", "device=cpu"]


def flipped(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_state_is_what_was_saved_and_torch_reads_it_too(tmp_path):
    state = {"step": 3, "tensor": torch.arange(5.0), "nested": {"a": [1, 2.5, None]}}
    checkpoint.save_state(tmp_path / "s.pt", state)
    for found in (checkpoint.load_state(tmp_path / "s.pt"), torch.load(tmp_path / "s.pt", weights_only=True)):
        assert torch.equal(found.pop("tensor"), state["tensor"])
        assert found == {"step": 3, "nested": {"a": [1, 2.5, None]}}


@pytest.mark.parametrize("name", ["state.pt", "best.safetensors"])
def test_every_flipped_bit_is_noticed(copied, name):
    path = copied / name
    load = checkpoint.load_state if name == "state.pt" else checkpoint.load_weights
    load(path)
    whole, draw = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [draw.randrange(8 * len(whole)) for _ in range(40)]
    places += [draw.randrange(8 * header) for _ in range(40)] if name != "state.pt" else []
    places += [8 * whole.find(b"sha256") + n for n in range(8 * 8)] if name != "state.pt" else []
    places += [8 * len(whole) - 1 - n for n in range(0, 8 * 100, 37)]  # the end, where a state has its checksum
    for bit in places:
        flipped(path, bit)
        with pytest.raises(UserError, match=str(path)) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=str(path)):
            load(path)


def test_the_same_weights_are_the_same_bytes(tmp_path):
    """In several processes: the order of a Rust map differs from one to the next."""
    code = (
        "import sys, pathlib, torch; from rankgrad.lab.training import checkpoint\n"
        "torch.manual_seed(0); net = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(9)])\n"
        "for n in range(4):\n"
        "    checkpoint.save_weights(pathlib.Path(f'{sys.argv[1]}{n}'), net, {'config': {}, 'b': [1]})"
    )
    for process in "ab":
        subprocess.run([sys.executable, "-c", code, str(tmp_path / process)], check=True)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert len(list(tmp_path.iterdir())) == 8


def test_weights_of_version_01_have_no_checksum(tmp_path):
    from safetensors.torch import save_file

    notes = {"format": "pt", "rankgrad": json.dumps({"config": {}, "metrics": {}})}
    save_file({"weight": torch.ones(3)}, tmp_path / "a.safetensors", metadata=notes)
    tensors, metadata = checkpoint.load_weights(tmp_path / "a.safetensors")
    assert tensors["weight"].tolist() == [1, 1, 1] and metadata == {"config": {}, "metrics": {}}


def test_safetensors_reads_our_files(tmp_path):
    from safetensors import safe_open

    network = torch.nn.Linear(2, 3)
    checkpoint.save_weights(tmp_path / "a.safetensors", network, {"config": {}, "metrics": {}})
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata().keys() == {"format", "rankgrad", "sha256"}
        assert torch.equal(file.get_tensor("weight"), network.weight)


def test_a_damaged_state_offers_the_one_before(tmp_path, monkeypatch):
    whole, _ = run.run("digits", SHORT, out=str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", SHORT, out=str(tmp_path / "cut"))
    cut = tmp_path / "cut"
    flipped(cut / "state.pt", 8 * 4000)
    message = message_of("train", cut, "--resume")
    assert message == (
        f"rankgrad: --resume: {cut}/state.pt is damaged (its checksum does not match its content); --resume "
        "--previous continues from the checkpoint before it, of step 4"
    )
    run.run(str(cut), resume=True, previous=True)
    assert rows(cut) == rows(whole)
    assert (cut / "last.safetensors").read_bytes() == (whole / "last.safetensors").read_bytes()
    for name in ("state.pt", "state.previous.pt"):  # neither is the damaged one
        checkpoint.load_state(cut / name)


def test_two_damaged_states_are_both_refused(copied):
    for name in ("state.pt", "state.previous.pt"):
        flipped(copied / name, 8 * 4000)
    assert "the previous checkpoint is missing or damaged" in message_of("train", copied, "--resume")
    assert f"{copied}/state.previous.pt is damaged" in message_of("train", copied, "--resume", "--previous")
    (copied / "state.previous.pt").unlink()
    assert "--previous: there is no checkpoint" in message_of("train", copied, "--resume", "--previous")
    assert "--previous: expected --resume" in message_of("train", copied, "--previous")


def test_a_damaged_best_checkpoint_is_reported_before_training(copied, monkeypatch):
    flipped(copied / "best.safetensors", 8 * 5000)
    assert f"{copied}/best.safetensors is damaged" in message_of("train", copied, "--resume")


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2, 3):
        checkpoint.save_state(tmp_path / "s.pt", {"step": step})
    assert checkpoint.load_state(tmp_path / "s.pt") == {"step": 3}
    assert checkpoint.load_state(tmp_path / "s.previous.pt") == {"step": 2}


def test_a_run_that_only_has_the_previous_state_goes_on(copied):
    (copied / "state.pt").unlink()
    run.run(str(copied), resume=True)
    assert checkpoint.load_state(copied / "state.pt")["step"] == 8


@pytest.mark.parametrize("limit", [100, 2_000, 30_000, 300_000])
def test_a_full_disk_is_one_line(tmp_path, limit):
    """A limit on the size of files fails as a full disk does: the message names the file, old ones stay."""
    out = tmp_path / "a"
    run.run("digits", SHORT, out=str(out))
    before = (out / "state.pt").read_bytes()
    code = (
        "import resource, sys; from rankgrad.lab.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "train", str(out), "epochs=1", "--out", str(tmp_path / "b")]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith(f"rankgrad: {tmp_path}/b/") and "cannot be written (File too large)" in line
    assert "it needs" in line and "are free" in line
    assert not list(tmp_path.glob("b/.*.part"))
    assert (out / "state.pt").read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.pt"
    checkpoint.save_state(path, {"step": 1})
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written .*it needs .* MB.*that was there is unchanged"):
            checkpoint.save_state(path, {"step": 2, "much": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoint.load_state(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_folder_is_whole_or_not_there(tmp_path):
    """Whatever the writer raises (safetensors has errors of its own), and when the folder cannot be moved."""

    def write(text, error=None):
        def inside(folder):
            folder.mkdir()
            (folder / "a").write_text(text)
            if error is not None:
                raise error

        return inside

    path = tmp_path / "model"
    for text in ("first", "second"):
        checkpoint.write_folder(path, write(text), 10)
        assert (path / "a").read_text() == text and os.listdir(tmp_path) == ["model"]
    for error in (OSError(errno.ENOSPC, "No space left"), RuntimeError("I/O error: No space left")):
        with pytest.raises(UserError, match=rf"^{path}: cannot be written \(.*No space left"):
            checkpoint.write_folder(path, write("third", error), 10)
        assert (path / "a").read_text() == "second" and os.listdir(tmp_path) == ["model"]


def test_a_folder_that_cannot_be_moved_leaves_the_old_one(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"model: cannot be written \(No such file"):
        checkpoint.write_folder(tmp_path / "model", lambda beside: None, 10)
    assert os.listdir(tmp_path) == ["model"]


def test_a_place_that_is_no_file(tmp_path):
    for path, message in ((Path("/"), "expected the name of a file"), (tmp_path, "cannot be written")):
        with pytest.raises(UserError, match=message):
            checkpoint.write_text(path, "")


def test_parts_of_killed_runs_are_removed(tmp_path):
    (tmp_path / "a").mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = [tmp_path / "a" / f".state.pt.{process}.part" for process in (dead.pid, os.getpid())]
    kept = [tmp_path / "a" / f".state.pt.{os.getppid()}.part", tmp_path / "a" / ".mine.part"]
    for path in (*old, *kept):
        path.write_text("half")
    old.append(tmp_path / "a" / f".model.{dead.pid}.part")
    (old[-1] / "inside").mkdir(parents=True)
    run.run("digits", SHORT, out=str(tmp_path / "a"), resume=True)
    assert not any(path.exists() for path in old) and all(path.exists() for path in kept)


def test_tables(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step,loss\n1,0.5\n2,0.2")
    assert log.read_table(path) == [{"step": 1.0, "loss": 0.5}, {"step": 2.0, "loss": 0.2}]
    for torn in ("step,loss\n1,0.5\n2", "step,loss\n1,0.5\n2,", "step,loss\n1,0.5\n2,0.e"):
        path.write_text(torn)
        assert log.read_table(path) == [{"step": 1.0, "loss": 0.5}]
    for empty in ("", "step,loss\n"):
        path.write_text(empty)
        assert log.read_table(path) == []


def test_a_run_killed_between_an_evaluation_and_its_checkpoint(tmp_path, monkeypatch):
    """The row of the evaluation is in the table, the state does not know it: it is evaluated again, once."""
    settings = [*SHORT, "epochs=2"]
    whole, _ = run.run("digits", settings, out=str(tmp_path / "whole"))
    inner, saves = Trainer._save, []

    def save(self):
        if self.result.last and not saves:
            saves.append(1)
            raise KeyboardInterrupt
        inner(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", save)
        with pytest.raises(KeyboardInterrupt):
            run.run("digits", settings, out=str(tmp_path / "cut"))
    assert len(rows(tmp_path / "cut", "evaluations")) == 1
    cut, _ = run.run("digits", settings, out=str(tmp_path / "cut"), resume=True)
    assert rows(cut, "evaluations") == rows(whole, "evaluations") and rows(cut) == rows(whole)
    assert (cut / "best.safetensors").read_bytes() == (whole / "best.safetensors").read_bytes()


def test_the_notes_of_older_runs_are_read(copied):
    """They are called ``told`` in their ``data.json``."""
    notes = json.loads((copied / "data.json").read_text())
    line = notes["notes"][0]
    notes["told"] = notes.pop("notes")
    (copied / "data.json").write_text(json.dumps(notes))
    assert line in run.write_report(copied).read_text()
