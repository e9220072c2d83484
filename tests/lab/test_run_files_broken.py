"""Files of a run that hold something else than they should: one line that names the file and the place."""

import json

import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.training import checkpoint, log
from rankgrad.lab.training.errors import printable

from runs import message_of

BROKEN = {
    "config.yaml": [
        b"\xff\xfe\x00task",
        b"task: [1]",
        b"task: {a: 1}",
        b"a: " + b"[" * 3000 + b"]" * 3000,
        b"seed: 1" + b"0" * 400,
        b"seed: 1" + b"0" * 5000,
        b"seed: 0x1" + b"0" * 5000,
        b"a: &a [1]\nb: [*a, *a]",
        b"seed: 2020-13-45",
        b"a: \x00",
        b"a: 'b\xc2\x85\n\n",
        b"- 1",
        b"",
        b"1",
        b"task: retrieval\ndata: {name: digits}\nloss: 3",
        b"task: retrieval\n? [1, 2]\n: 3",
    ],
    "machine.json": [b"{", b"[]", b"\xff", b'{"started": 1}', b"[" * 5000],
    "result.json": [
        b"",
        b"[1]",
        b'{"best": 3}',
        b'{"best": {"R@1": 3}}',
        b'{"best": {"epoch": 1, "step": 1, "R@1": "x"}}',
        b'{"seconds": Infinity}',
        b'{"seconds": -1}',
    ],
    "steps.csv": [b"step,loss\n1,x\n2,0.5\n", b"\xff\xfe", b"step,loss\n1\n2,3\n", b"a\x00b\n1\n", b"a,b\n1,2\n"],
    "evaluations.csv": [b"step,epoch,R@1\n1,2,3,4\n1,2,3\n", b"\xffstep\n1\n", b"R@1\n3\n"],
    "examples.json": [b"{}", b"3", b'{"examples": [{}], "hardest": []}', b"\x80"],
}


@pytest.mark.parametrize(("name", "content"), [(name, c) for name, all_of in BROKEN.items() for c in all_of])
def test_broken_run_files_are_one_line_that_names_them(copied, name, content):
    (copied / name).write_bytes(content)
    message = message_of("report", copied)
    assert str(copied / name) in message
    assert "\n" not in message and len(message) < len(str(copied)) + 300


def test_broken_seeds(tmp_path):
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "config.yaml").write_text("")
    for content in (b"{}", b'[{"metric": 1}]', b"\xff"):
        (tmp_path / "seeds.json").write_bytes(content)
        (tmp_path / "seed-0" / "config.yaml").write_bytes(recipes.recipe_text("digits").encode())
        assert f"{tmp_path}/seeds.json" in message_of("report", tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "machine.json", "steps.csv", "evaluations.csv"])
def test_broken_run_files_are_reported_when_a_run_resumes(copied, name):
    for content in BROKEN[name][:5]:
        (copied / name).write_bytes(content)
        assert str(copied / name) in message_of("train", copied, "--resume")


@pytest.mark.parametrize(
    "state",
    [
        [1, 2],
        "text",
        {},
        {"step": -1},
        {"step": "3", "network": {}, "loss": {}, "optimizer": {}, "scaler": {}, "result": 3},
        {"step": 3, "network": {}, "loss": {}, "optimizer": {}, "scaler": {}, "result": {}},
        {"step": 3, "network": [], "loss": {}, "optimizer": {}, "scaler": {}, "result": {}},
    ],
)
def test_states_of_another_kind(copied, state):
    (copied / "state.previous.pt").unlink()
    checkpoint.save_state(copied / "state.pt", state)
    message = message_of("train", copied, "--resume")
    assert f"{copied}/state.pt" in message and "\n" not in message


WRONG = [({"step": -1}, "step"), ({"step": "x"}, "step"), ({"result": {"last": {"a": 1}}}, "result.last")]


@pytest.mark.parametrize(("change", "place"), WRONG)
def test_a_state_with_a_wrong_value_is_told_with_its_place(copied, change, place):
    """The weights of this one fit."""
    checkpoint.save_state(copied / "state.pt", checkpoint.load_state(copied / "state.pt") | change)
    assert f"{copied}/state.pt: {place}: " in message_of("train", copied, "--resume")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"x" * 5000])
def test_states_that_are_none(copied, content):
    (copied / "state.pt").write_bytes(content)
    assert f"{copied}/state.pt is damaged" in message_of("train", copied, "--resume")


@pytest.mark.parametrize("metadata", ["no JSON", "3", "{}", '{"config": 3, "metrics": {}}', '{"config": {}}'])
def test_metadata_of_another_kind(tmp_path, metadata, monkeypatch):
    path = tmp_path / "a.safetensors"
    monkeypatch.setattr(
        json, "dumps", lambda value, _dumps=json.dumps, **k: metadata if value == 7 else _dumps(value, **k)
    )
    checkpoint.save_weights(path, torch.nn.Linear(2, 3), 7)
    message = message_of("eval", path)
    assert f"RUN: {path}, metadata: " in message and "\n" not in message


def test_a_checkpoint_without_a_task(tmp_path):
    checkpoint.save_weights(tmp_path / "a.safetensors", torch.nn.Linear(2, 3), {"config": {}, "metrics": {}})
    assert "task: unknown value None" in message_of("eval", tmp_path / "a.safetensors")


def test_yaml_bombs_are_refused_at_once(tmp_path):
    import time

    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    begin = time.monotonic()
    message = message_of("train", tmp_path / "bomb.yaml")
    assert f"{tmp_path}/bomb.yaml" in message and "line 2" in message and "alias" in message
    assert time.monotonic() - begin < 5


def test_names_with_escape_sequences(tmp_path, capfd):
    evil = "\x1b[2J\x07\u202eevil\udcff\n"
    assert printable(evil) == "\\x1b[2J\\x07\\u202eevil\\udcff\\n"
    message = message_of("train", tmp_path / evil)
    assert "\n" not in message and "\x1b" not in message and "\\x1b[2J" in message
    with log.progress(f"{evil}{{x}}[bold]", 3, 0, show=True) as bar:
        bar.say(f"skipped {evil} [red]")
    out = capfd.readouterr().out
    assert "\x1b[2J" not in out and "\\x1b[2J" in out and "[red]" in out and "{x}[bold]" in out
