"""Names of files with bytes that are no UTF-8, escape sequences, ends of lines, marks of other tools."""

import json
import os

import pytest

from rankgrad.lab.cli import main
from rankgrad.lab.training import run_files
from rankgrad.lab.training.errors import UserError

import images
import scenes
from runs import cli

NO_UTF8 = os.fsdecode(b"caf\xe9 \xff")
TINY = ["epochs=1", "backbone=tiny", "weights=none", "batch.size=8", "batch.per_class=2", "device=cpu"]
TINY += ["view.resize=24", "view.crop=20"]


def test_names_that_are_no_utf8(tmp_path, monkeypatch, capfd):
    """As folders of data and runs, as files of embeddings, indices and pages."""
    monkeypatch.chdir(tmp_path)
    images.folder_set(tmp_path / NO_UTF8, classes=6, each=4)
    settings = [*TINY, "callbacks=[]", "--data", NO_UTF8, "--out", "run" + NO_UTF8]
    assert cli("train", "folder", *settings) == 0
    assert cli("train", "run" + NO_UTF8, "--resume") == 0
    assert cli("eval", f"run{NO_UTF8}/best.safetensors") == 0
    assert cli("report", "run" + NO_UTF8) == 0
    index = ["--out", f"{NO_UTF8}.npz", "--index", f"{NO_UTF8}.index"]
    assert cli("embed", "run" + NO_UTF8, NO_UTF8, *index) == 0
    found = f"{NO_UTF8}/class0/0.png"
    assert cli("search", f"{NO_UTF8}.index", found, "--page", f"{NO_UTF8}.html", "--nearest", "2") == 0
    out = capfd.readouterr().out
    assert "1.000  caf\\udce9 \\udcff/class0/0.png" in out and "page: caf\\udce9 \\udcff.html" in out


def test_tensorboard_needs_utf8(tmp_path):
    pytest.importorskip("tensorboard")
    code = cli("train", "digits", "epochs=1", "device=cpu", "--out", tmp_path / NO_UTF8)
    assert code.startswith("rankgrad: --out: ") and "callbacks=[]" in code and "\\udce9" in code


def test_names_that_are_other_tools_marks(tmp_path, monkeypatch, capfd):
    """Of rich's styles, of a terminal, and the end of a line."""
    monkeypatch.chdir(tmp_path)
    name = "[/red]\x1b[2J\nx"
    images.folder_set(tmp_path / name, classes=6, each=4)
    assert cli("train", "folder", *TINY, "--data", name, "--out", "run" + name) == 0
    assert cli("embed", "run" + name, name, "--out", f"{name}.npz", "--index", f"{name}.index") == 0
    assert cli("search", f"{name}.index", f"{name}/class0/0.png", "--page", f"{name}.html") == 0
    assert cli("report", "run" + name) == 0
    out = capfd.readouterr().out
    shown = "[/red]\\x1b[2J\\nx"
    for line in (
        f"report: run{shown}/report.html",
        f" in {shown}.npz",
        f"index: {shown}.index",
        f"{shown}/class0",
    ):
        assert line in out
    assert "\x1b[2J" not in out


def test_an_end_of_a_line_in_an_annotation(tmp_path):
    root = scenes.coco_set(tmp_path)
    file = root / "annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"][0]["file_name"] = "a\n\x1b[2Jb.jpg"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as caught:
        main(["train", "coco", "weights=none", "--data", str(root), "--out", str(tmp_path / "out")])
    assert caught.value.code.isprintable() and "a\\n\\x1b[2Jb.jpg: missing" in caught.value.code


def test_json_with_bytes_that_are_no_utf8():
    names = [NO_UTF8, "\U0001f600", "plain"]
    assert run_files.checked_json(json.dumps(names), list[str], "a.json") == names
    with pytest.raises(UserError, match=r"^a\.json: invalid JSON \(Expecting"):
        run_files.checked_json(r'["\udcff"', list[str], "a.json")
    with pytest.raises(UserError, match=r"^a\.json: 0: input should be a valid "):
        run_files.checked_json(r'["\udcff"]', list[int], "a.json")
