"""Where the model of the task text comes from: a folder, or the Hugging Face hub."""

import shutil

import pytest
import torch

pytest.importorskip("sentence_transformers")

import text_files as texts
from rankgrad.lab.text.config import Model
from rankgrad.lab.text.model import build, check

from runs import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return texts.tiny_model(tmp_path_factory.mktemp("model"))


def test_models_that_are_none(tmp_path, model):
    path = texts.labelled(tmp_path / "data.csv")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    for name in ("modules.json", "config.json"):
        (tmp_path / "bare" / name).write_text((model / name).read_text())
    changed = {
        "cut": ("model.safetensors", lambda whole: whole[:3000]),
        "odd": ("modules.json", lambda whole: b"3"),
    }
    for name, (file, change) in changed.items():
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / file).write_bytes(change((model / file).read_bytes()))
    shutil.copytree(model, tmp_path / "wordless", ignore=shutil.ignore_patterns("*token*", "vocab*"))
    for given, message in (
        ([], "model: the task text needs a sentence-transformers model"),
        ([f"model={tmp_path / 'nowhere'}"], "is neither the folder of a sentence-transformers model nor the name"),
        ([f"model={tmp_path / 'empty'}"], "has neither modules.json nor config.json"),
        ([f"model={tmp_path / 'bare'}"], "has no weights (expected model.safetensors)"),
        ([f"model={tmp_path / 'wordless'}"], "has no tokenizer (expected tokenizer.json)"),
        ([f"model={tmp_path / 'cut'}"], "is not a sentence-transformers model that loads (Error while deser"),
        ([f"model={tmp_path / 'odd'}"], "is not a sentence-transformers model that loads ('int' object is"),
    ):
        told = cli("train", "text", "--data", path, *given, "--out", tmp_path / "run")
        assert message in told and "\n" not in told, told
    assert not (tmp_path / "run").exists()


def test_a_model_by_its_name_on_the_hub(tmp_path, model, monkeypatch):
    """The hub is replaced by a folder: what is asked of it, and what is done with its answer."""
    asked = []

    def snapshot(repository, allow_patterns):
        asked.append((repository, [pattern for pattern in allow_patterns if pattern.endswith(("tensors", "bin"))]))
        if "unknown" in repository:
            raise FileNotFoundError("404: no such repository\nwith more lines")
        return str(tmp_path / "old" if "old" in repository else model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    shutil.copytree(model, tmp_path / "old")
    weights = tmp_path / "old" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    for name, repository, kinds in (
        ("tiny", "sentence-transformers/tiny", [["*.safetensors"]]),
        ("somebody/tiny", "somebody/tiny", [["*.safetensors"]]),
        ("somebody/old", "somebody/old", [["*.safetensors"], ["*pytorch_model*.bin"]]),
    ):
        asked.clear()
        check(Model(name=name))
        assert asked == [(repository, kind) for kind in kinds]
    assert torch.equal(build(Model(name="tiny"), 0)(["word1"]), build(Model(name=str(model)), 0)(["word1"]))
    told = cli("train", "text", "--data", texts.labelled(tmp_path / "data.csv"), "model=unknown")
    assert "'unknown' is neither the folder" in told and "(404: no such repository)" in told
