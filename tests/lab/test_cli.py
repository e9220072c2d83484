"""The command line: verbs, messages, exit codes, and what happens without the extra packages."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.cli import _extra_with
from rankgrad.lab.recipes import run
from rankgrad.lab.recipes.commands import explained
from rankgrad.lab.retrieval.images.task import ImageTask, read_sources
from rankgrad.lab.training import checkpoint
from rankgrad.lab.training.config import flat

import images
from runs import cli, stop_after


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = images.folder_set(tmp_path_factory.mktemp("data"))
    settings = ["backbone=tiny", "weights=none", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2"]
    settings += ["view.resize=16", "view.crop=12", "lr=1e-3", "epochs=2", "device=cpu", f"data.root={root}"]
    out = tmp_path_factory.mktemp("runs") / "mine"
    folder, (result,) = run.run("folder", settings, out=str(out))
    return folder, result, root


def test_ls_names_everything(capsys):
    assert cli("ls") == 0
    out = capsys.readouterr().out
    for word in [*recipes.recipe_names(), "recall", "ap", "pml:NAME", "digits", "folder", "cub", "sop", "inshop"]:
        assert f"{word} " in out


@pytest.mark.parametrize("command", ["ls", "show voc", "show folder", "--help", "--version"])
def test_verbs_that_only_print_are_light(command):
    """Networks and their libraries take seconds to import."""
    code = (
        "import sys; from rankgrad.lab.cli import main\n"
        f"try: main({command.split()!r})\n"
        "except SystemExit: print('loaded', *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(out.rpartition("loaded ")[2].split())
    assert "rankgrad" in loaded
    heavy = {"torchvision", "timm", "pytorch_metric_learning", "sentence_transformers", "matplotlib", "sklearn"}
    assert not loaded & (heavy | {"numba", "PIL", "torch._dynamo"})


def test_show_prints_the_recipe(capsys):
    assert cli("show", "cub") == 0
    out = capsys.readouterr().out
    assert out.startswith(recipes.recipe_text("cub"))
    assert recipes.parse("RECIPE", out) == recipes.parse("RECIPE", recipes.recipe_text("cub"))  # still a recipe
    assert re.search(r"#   optim\.lr = 5e-06 +the learning rate", out)
    assert re.search(r"#   loss\.lam = 0\.2 +Interpolation strength", out)


@pytest.mark.parametrize("recipe", recipes.recipe_names())
def test_every_setting_has_a_meaning(recipe, capsys):
    _, config = recipes.load(recipe)
    found = explained(recipe)
    assert {key for key, _, _ in found} >= set(flat(config.model_dump(mode="json"))) and len(found) > 25
    assert [key for key, _, meaning in found if not meaning] == []
    assert cli("show", recipe) == 0
    assert capsys.readouterr().out.count("#   ") >= len(found)


def test_places_are_checked_before_anything_else(tmp_path, monkeypatch, capsys):
    def reading(*args, **kwargs):
        pytest.fail("read data, or built a network")

    monkeypatch.setattr(ImageTask, "sources", reading)
    monkeypatch.setattr(ImageTask, "build", reading)
    (tmp_path / "file").write_text("")
    told = cli("train", "digits", "--out", tmp_path / "file" / "x")
    assert told == f"rankgrad: --out: expected a folder, {tmp_path / 'file'} is a file"
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    told = cli("train", "digits", "--out", tmp_path / "a" / "b")
    assert told == f"rankgrad: --out: cannot write to {tmp_path}"
    monkeypatch.undo()
    monkeypatch.setattr(ImageTask, "sources", reading)
    monkeypatch.setattr(run, "ROOM", 1 << 60)
    told = cli("train", "digits", "--out", tmp_path / "a")
    assert told.startswith("rankgrad: --out: expected ") and "MiB for checkpoints" in told
    monkeypatch.undo()
    monkeypatch.setattr(ImageTask, "sources", reading)
    told = cli("train", "digits", "backbone=resnet5", "--out", tmp_path / "a")
    assert told.startswith("rankgrad: model.backbone: unknown name 'resnet5'")
    assert not (tmp_path / "a").exists()


def test_the_command_that_goes_on(tmp_path, monkeypatch):
    place = tmp_path / "a b"
    assert run.resume_command("digits", str(place), 1) == "nothing has been trained yet"
    settings = ["epochs=2", "device=cpu", "evaluate_every=2", "save_minutes=0"]
    for seeds in (1, 2):
        out = place / str(seeds)
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            told = ""
            with pytest.raises(KeyboardInterrupt):
                run.run("digits", settings, out=str(out), seeds=seeds)
        told = run.resume_command("digits", str(out), seeds)
        assert told.startswith("resume with: rankgrad train ")
        assert cli(*shlex.split(told.removeprefix("resume with: rankgrad "))) == 0
        assert len(list(out.rglob("result.json"))) == seeds


def test_eval_gives_what_training_saw(trained, capsys):
    folder, result, root = trained
    assert cli("eval", folder / "best.safetensors") == 0
    out = capsys.readouterr().out
    assert f"R@1 {result.best['R@1']:.1f}" in out and f"mAP@R {result.best['mAP@R']:.1f}" in out
    assert re.search(r"^tests on \d+ images of \d+ classes$", out, re.MULTILINE)
    moved = root.with_name("elsewhere")
    root.rename(moved)
    try:
        assert "no such folder" in cli("eval", folder / "last.safetensors")
        assert cli("eval", folder / "last.safetensors", "--data", moved) == 0
    finally:
        moved.rename(root)


def test_embed(trained, tmp_path, capsys):
    folder, _, root = trained
    out = tmp_path / "e.npz"
    files = sorted((root / "class1").iterdir())
    assert cli("embed", folder / "best.safetensors", root / "class1", files[0], "--out", out) == 0
    assert "7 embeddings of length 8" in capsys.readouterr().out
    found = np.load(out)
    assert list(found["names"]) == [str(f) for f in [*files, files[0]]]
    assert np.allclose(np.linalg.norm(found["embeddings"], axis=1), 1, atol=1e-5)
    assert np.array_equal(found["embeddings"][0], found["embeddings"][6])
    assert not np.allclose(found["embeddings"][0], found["embeddings"][1])
    (tmp_path / "bad.png").write_text("not an image")
    assert "IMAGES: " in (told := cli("embed", folder / "best.safetensors", tmp_path / "bad.png"))
    assert "bad.png: broken" in told
    assert "no such file" in cli("embed", folder / "best.safetensors", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no images in" in cli("embed", folder / "best.safetensors", tmp_path / "empty")


def test_report_can_be_written_again(trained, capsys):
    folder, _, _ = trained
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert cli("report", folder) == 0
    assert (folder / "report.html").read_text() == page
    assert "report.html" in capsys.readouterr().out
    assert "no run in" in cli("report", folder.parent)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "cubb"], "rankgrad: RECIPE: no recipe, YAML file or run folder 'cubb', did you mean 'cub'?"),
        (["train", "cub"], "rankgrad: --data: the data set 'cub' needs a folder, say --data DIR"),
        (["train", "digits", "lrr=1"], "rankgrad: lrr: unknown setting, did you mean 'lr'?"),
        (["train", "cub", "lamm=3"], "rankgrad: lamm: unknown setting, did you mean 'lam'?"),
        (["train", "digits", "device=tpu"], "rankgrad: device: unknown value 'tpu', say auto, cpu or cuda"),
        (["train", "digits", "device=mps"], "rankgrad: device: unknown value 'mps', say auto, cpu or cuda"),
        (
            ["train", "digits", "loss.thresh=1"],
            "rankgrad: loss.thresh: unknown argument of ProxyRankingLoss, did you mean 'threshold'?",
        ),
        (
            ["train", "digits", "sampler=superlabels", "batch.size=80"],
            "rankgrad: batch.sampler: the data set has no super-labels, use classes",
        ),
        (
            ["train", "digits", "milestones=[1,"],
            "rankgrad: milestones: expected YAML, received '[1,' (line 1: expected the node content, but found "
            "'<stream end>')",
        ),
        (["eval", "no.safetensors"], "rankgrad: RUN: no such file or folder 'no.safetensors'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli(*arguments) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    assert cli("train", "digits", "device=cuda") == "rankgrad: device: expected a GPU for 'cuda', torch finds none"


def test_a_checkpoint_of_another_program(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert "was not written by rankgrad" in cli("eval", tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_text("hello")
    assert "expected a safetensors file" in cli("eval", tmp_path / "b.safetensors")


def test_checkpoints_carry_their_settings(trained):
    folder, result, _ = trained
    weights, notes = checkpoint.load_weights(folder / "best.safetensors")
    assert notes["config"]["loss"]["name"] == "proxy" and notes["metrics"]["R@1"] == result.best["R@1"]
    assert weights["embedding.weight"].shape == (8, 512)


def without(*packages):
    """Run the command in a Python that lacks some packages."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\nfrom rankgrad.lab.cli import main; main()"
    )
    return lambda *a: subprocess.run([sys.executable, "-c", code, *a], capture_output=True, text=True)


def test_missing_packages_are_named_with_the_extra(tmp_path):
    for package in ("typer", "rich", "yaml", "pydantic"):
        out = without(package)("ls")
        assert out.returncode == 1
        wanted = {"yaml": "pyyaml"}.get(package, package)
        assert out.stderr == f"rankgrad: {package} is not installed: pip install {wanted} (or the extra train)\n"
    out = without("torchvision", "torchvision.ops")("train", "digits", "--out", str(tmp_path / "a"))
    assert "torchvision is not installed: pip install torchvision (or the ext" in out.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("distribution", "extra"),
    [
        ("faiss-cpu", "search"),
        ("lightgbm", "ranker"),
        ("mlflow-skinny", "mlflow"),
        ("onnx", "export"),
        ("onnxruntime", "export"),
        ("pytorch-metric-learning", "train"),
        ("sentence-transformers", "sentence-transformers"),
        ("torch", None),
        ("a-callback-of-mine", None),
    ],
)
def test_the_extra_with_a_package(distribution, extra):
    assert _extra_with(distribution) == (f" (or the extra {extra})" if extra else "")


SMALL = ["backbone=tiny", "weights=none", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2"]
SMALL += ["view.resize=16", "view.crop=12", "lr=1e-3", "epochs=1", "device=cpu"]


def test_a_data_folder_named_as_the_recipe(tmp_path, monkeypatch):
    """Not mistaken for a run, and nothing is written among the images."""
    monkeypatch.chdir(tmp_path)
    images.folder_set(tmp_path / "folder")
    before = sorted(tmp_path.rglob("*"))
    assert cli("train", "folder", "--data", "folder", *SMALL) == 0
    assert sorted((tmp_path / "folder").rglob("*")) == [p for p in before if p != tmp_path / "folder"]
    assert (tmp_path / "runs" / "folder" / "result.json").is_file()


def test_seeds_go_on_as_seeds(tmp_path):
    images.folder_set(tmp_path / "data")
    out = tmp_path / "out"
    assert cli("train", "folder", "--data", tmp_path / "data", "--out", out, "--seeds", 2, *SMALL) == 0
    told = cli("train", "folder", "--data", tmp_path / "data", "--out", out, "--resume", *SMALL)
    assert told == f"rankgrad: --resume: {out} was started with --seeds: give the same --seeds again"
    (out / "seed-0" / "state.pt").write_bytes(b"")
    again = ["train", "folder", "--data", tmp_path / "data", "--out", out, "--resume", "--seeds", 2, *SMALL]
    assert cli(*again).startswith(f"rankgrad: --resume: {out / 'seed-0' / 'state.pt'} is damaged")


def test_names_of_files_that_are_no_utf8(tmp_path):
    root = images.folder_set(tmp_path / "data")
    for path in [next(folder.glob("*")) for folder in root.iterdir()]:
        path.rename(os.fsdecode(os.fsencode(path.parent) + b"/caf\xe9.png"))
    assert cli("train", "folder", "--data", root, "--out", tmp_path / "out", *SMALL) == 0
    assert "caf\\udce9.png" in (tmp_path / "out" / "report.html").read_text()


def test_folders_that_cannot_be_meant(tmp_path):
    for part in ("training", "val"):
        images.folder_set(tmp_path / "parts" / part)
    told = cli("train", "folder", "--data", tmp_path / "parts", *SMALL)
    assert told == "rankgrad: --data: expected train and test, or a folder for each class; found training, val"
    assert cli("train", "digits", "--data", tmp_path).startswith("rankgrad: --data: the digits need no folder")
    alone = images.folder_set(tmp_path / "alone")
    for folder in alone.iterdir():
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
    told = cli("train", "folder", "--data", alone, *SMALL)
    assert told.startswith(
        "rankgrad: --data: expected classes to train on, two at least, and two images of one; found"
    )


def test_places_that_cannot_be_written(trained, tmp_path):
    _, _, root = trained
    (tmp_path / "file").write_text("")
    told = cli("train", "folder", "--data", root, "--out", tmp_path / "file" / "x", *SMALL)
    assert told.startswith("rankgrad: ") and "file" in told
    assert cli(
        "embed", trained[0] / "best.safetensors", root, "--device", "tpu", "--out", tmp_path / "e.npz"
    ).startswith("rankgrad: device: unknown value 'tpu'")


def test_eval_on_all_of_another_folder(trained):
    seen = []
    for share in ([], ["test_share=1"]):
        settings = [f"data.root={trained[2]}", *share]
        _, found = recipes.of_checkpoint(trained[0] / "best.safetensors", settings)
        seen.append(len(read_sources(found.config.data, found.config.view, torch.device("cpu"), train=False)[1]))
        assert ImageTask.evaluate_checkpoint(found, torch.device("cpu"))
    assert seen[1] == 2 * seen[0] == len([p for p in trained[2].rglob("*") if p.is_file()])
    told = cli("train", "folder", "--data", trained[2], "test_share=1", *SMALL)
    assert "found 0 images of 0 classes; data.test_share and data.split_seed choose" in told


def test_eval_where_nothing_can_be_found(trained, tmp_path):
    """No class has two images: there is no result, which is not the worst one."""
    for number, path in enumerate(sorted(trained[2].rglob("*.*"))[:3]):
        (tmp_path / f"class{number}").mkdir()
        shutil.copy(path, tmp_path / f"class{number}")
    told = cli("eval", trained[0] / "best.safetensors", "--data", tmp_path, "test_share=1")
    assert told.startswith("rankgrad: --data: expected classes with two test items at least")


def test_eval_takes_a_folder_or_a_file(trained, tmp_path, capsys):
    assert cli("eval", trained[0]) == 0
    of_the_folder = capsys.readouterr().out
    assert cli("eval", trained[0] / "best.safetensors") == 0
    assert capsys.readouterr().out.splitlines()[-1] == of_the_folder.splitlines()[-1]
    assert cli("eval", trained[0].parent).startswith("rankgrad: RUN: no finished run in ")
    seed = shutil.copytree(trained[0], tmp_path / "a" / "seed-0")
    assert cli("eval", tmp_path / "a").endswith(f"(it has no best.safetensors); one is {seed}")
    for verb in ("eval", "export"):
        assert cli(verb, "nothere") == "rankgrad: RUN: no such file or folder 'nothere'"


def test_eval_of_what_is_no_checkpoint_of_these_settings(trained):
    told = cli("eval", trained[0] / "best.safetensors", "backbone=resnet18")
    assert told.startswith("rankgrad: model: expected the settings that the checkpoint was trained with")
    assert len(told) < 400


@pytest.mark.parametrize("verb", [[], ["complexity"], ["reach"]])
def test_threads_of_a_benchmark_are_counted(verb, capsys):
    assert cli("bench", *verb, "--threads", "-3") == 2
    assert "than or equal to 0" in capsys.readouterr().err
