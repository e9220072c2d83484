"""What a finished run is used for: loaded in Python, exported, indexed and searched, boxes drawn."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import rankgrad
from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Exportable
from rankgrad.lab.use import exporting, index, load

from runs import cli


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    random = np.random.default_rng(0)
    lines = [f"{random.integers(3)} qid:{q} 1:{random.normal():.3f} 2:{random.normal():.3f}" for q in range(30)]
    lines += [f"{row % 3} qid:{q} 1:{row} 2:{random.normal():.3f}" for q in range(30) for row in range(4)]
    path = tmp_path_factory.mktemp("data") / "a.txt"
    path.write_text("\n".join(lines))
    out = tmp_path_factory.mktemp("runs") / "ranker"
    return run.run(
        "ranker", [f"data.root={path}", "epochs=1", "hidden=[4]", "device=cpu", "baselines=[]"], out=str(out)
    )[0]


def test_a_run_in_python(embedder, tmp_path):
    """The five lines, and the command: the same embeddings."""
    folder, root = embedder
    files = sorted((root / "class1").iterdir())
    embeddings = load(folder).embed(files)
    assert embeddings.shape == (6, 8) and torch.allclose(embeddings.norm(dim=1), torch.ones(6))
    assert cli("embed", folder, root / "class1", "--out", tmp_path / "e.npz") == 0
    assert np.array_equal(np.load(tmp_path / "e.npz")["embeddings"], embeddings.numpy())
    assert torch.equal(load(folder / "best.safetensors").embed(files), embeddings)
    assert load(folder, weights="last").network is not None
    with pytest.raises(UserError, match="weights: unknown value 'bets', did you mean 'best'"):
        load(folder, weights="bets")
    with pytest.raises(UserError, match=r"RUN: no finished run in .*\(it has no best.safetensors\)"):
        load(folder.parent)
    with pytest.raises(UserError, match="IMAGES: no such file nothing"):
        load(folder).embed(["nothing"])
    with pytest.raises(UserError, match="expected images, received none"):
        load(folder).embed([])


def test_a_ranker_in_python(ranker):
    network = load(ranker)
    assert network.features == ["1", "2"]
    items = [[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]]
    scores = network.score(items)
    assert scores.shape == (3,) and torch.allclose(scores, network.network(torch.tensor(items)).detach())
    with pytest.raises(UserError, match=r"features: expected \[N, 2\], received \[3, 1\]"):
        network.score([[1.0]] * 3)
    with pytest.raises(UserError, match=r"expected finite numbers, received nan \(row 1, feature 2\)"):
        network.score([[1.0, 2.0], [1.0, float("nan")]])
    for wrong in ("hello", [["a", "b"]], [[1.0, 2.0], [1.0]], None):
        with pytest.raises(UserError, match=r"features: expected \[N, 2\] numbers \("):
            network.score(wrong)


@pytest.mark.parametrize("form", list(exporting.ENDINGS))
def test_export(embedder, ranker, tmp_path, capsys, form):
    """Read again by other means, for another number of images than was traced."""
    folder, root = embedder
    files = sorted((root / "class1").iterdir())
    out = tmp_path / f"n{exporting.ENDINGS[form]}"
    assert cli("export", folder, "--to", form, "--out", out) == 0
    assert "same outputs as the network" in (said := capsys.readouterr().out) and "[N, 3, 12, 12]" in said
    network = load(folder)
    seen = []
    network.network.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    wanted = network.embed(files)
    view = network.config.view
    pixels = seen[0] * torch.tensor(view.std)[:, None, None] + torch.tensor(view.mean)[:, None, None]
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(out)
        assert "of unit length" in session.get_modelmeta().custom_metadata_map["rankgrad"]
        found = torch.from_numpy(session.run(None, {"images": pixels.numpy()})[0])
    else:
        found = torch.export.load(out).module()(pixels)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert cli("export", ranker, "--to", form) == 0
    assert (ranker / f"network{exporting.ENDINGS[form]}").is_file()


def test_an_export_says_how_images_are_prepared(embedder):
    """A pretrained network is tested on a centre crop that is enlarged: its input is no crop of that size."""
    network = load(embedder[0])
    told = network.exportable().inputs["images"]
    assert told.endswith("RGB in [0, 1], resized to a short side of 16, of that the centre 12 x 12")
    view = network.config.view.model_copy(update={"test_crop": 20, "shape": "square"})
    network.config = network.config.model_copy(update={"view": view})
    told = network.exportable().inputs["images"]
    assert told.startswith("[N, 3, 20, 20]")
    assert told.endswith("resized to 16 x 16, of that the centre 12 x 12, resized to 20 x 20")


def test_an_export_that_differs_is_not_written(tmp_path, monkeypatch):
    wanted = Exportable(torch.nn.Linear(3, 2), lambda rows: (torch.rand(rows, 3),), {"a": "b"}, ("c", "d"))
    inner = exporting._torch_export
    monkeypatch.setattr(exporting, "_torch_export", lambda *a: lambda given: inner(*a)(given) + 1e-3)
    with pytest.raises(UserError, match="gives other outputs than the network"):
        exporting.export(wanted, "torch-export", tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported(detector, embedder):
    assert "cannot be exported" in cli("export", detector[0])
    assert cli("export", embedder[0], "--to", "onx").startswith("rankgrad: --to: unknown value 'onx', did you m")


def test_search(embedder, tmp_path, capsys):
    """Every image finds itself first, and the others in the order of their similarity."""
    folder, root = embedder
    made = tmp_path / "all.faiss"
    assert cli("embed", folder, root, "--out", tmp_path / "e.npz", "--index", made) == 0
    found = np.load(tmp_path / "e.npz")
    capsys.readouterr()
    query = found["names"][7]
    page = tmp_path / "s.html"
    assert cli("search", made, query, found["names"][3], "--nearest", 4, "--page", page) == 0
    scores = found["embeddings"] @ found["embeddings"][7]
    order = np.argsort(-scores, kind="stable")[:4]
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert lines[0][1:] == ["1.000", str(query)] and lines[2][2] == found["names"][3]
    opened = index.read(made)
    nearest = opened.nearest(found["embeddings"][7:8], 4)[0]
    assert [score for _, score in nearest] == pytest.approx(scores[order].tolist(), abs=1e-5)
    text = page.read_text()
    assert text.count("<img") == 10 and "data:image/jpeg;base64," in text
    assert len(opened.nearest(found["embeddings"][:2], 1000)[1]) == len(found["names"])


def test_without_faiss_nothing_is_embedded(embedder, tmp_path, monkeypatch):
    folder, root = embedder
    monkeypatch.setitem(sys.modules, "faiss", None)
    message = cli("embed", folder, root, "--out", tmp_path / "e.npz", "--index", tmp_path / "a.faiss")
    assert message == "rankgrad: faiss is not installed: pip install faiss-cpu (or the extra search)"
    assert not list(tmp_path.iterdir())


def test_an_index_that_cannot_be_searched(embedder, tmp_path):
    folder, root = embedder
    made = tmp_path / "all.faiss"
    message = cli("search", made, "x")
    assert message.startswith(
        "rankgrad: INDEX: expected an index that `rankgrad embed --index FILE` wrote; found no"
    )
    weights = tmp_path / "w.safetensors"
    weights.write_bytes((folder / "best.safetensors").read_bytes())
    assert cli("embed", weights, root / "class1", "--out", tmp_path / "e.npz", "--index", made) == 0
    assert "IMAGES: no such file" in cli("search", made, tmp_path / "x.png")
    assert "IMAGES: expected files, received a folder, " in cli("search", made, tmp_path)
    weights.write_bytes((folder / "last.safetensors").read_bytes() + b" ")
    assert "has changed since" in cli("search", made, root)
    weights.unlink()
    assert "is gone" in cli("search", made, root)
    made.write_bytes(b"hello")
    assert "is damaged" in cli("search", made, root)


def test_many_items_make_a_graph(embedder, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "EXACT_UP_TO", 10)
    embeddings = torch.nn.functional.normalize(torch.randn(500, 16), dim=1).numpy()
    names = [str(number) for number in range(500)]
    index.write(tmp_path / "a.faiss", embeddings, names, embedder[0] / "best.safetensors", "image")
    found = index.read(tmp_path / "a.faiss").nearest(embeddings[:50], 1)
    assert [one[0][0] for one in found] == names[:50]


def test_detect(detector, tmp_path, capsys):
    folder, files = detector
    assert "RUN: expected a run that embeds, received a detector; use `rankgrad detect`" in cli(
        "embed", folder, files
    )
    out = tmp_path / "drawn"
    assert cli("detect", folder, files, "--out", out, "--score", 0) == 0
    told = json.loads((out / "detections.json").read_text())
    said = capsys.readouterr().out
    assert len(told) == 18 and f"on 18 images in {out}" in said
    assert f"all {sum(map(len, told.values()))} boxes: {out}/detections.json" in said
    path = sorted(files.iterdir())[0]
    found = load(folder).detect([path])[0]
    scores = [one["score"] for one in told[str(path)]]
    assert scores == pytest.approx(found["scores"].tolist(), abs=1e-5)  # beside other images, in another canvas
    drawn, before = Image.open(out / f"{path.stem}.png"), Image.open(path).convert("RGB")
    assert drawn.size == before.size
    assert (drawn.tobytes() != before.tobytes()) == bool(told[str(path)])
    assert any(told.values())
    large = tmp_path / "large.png"
    before.resize((before.width * 8, before.height * 8)).save(large)
    boxes = load(folder).detect([large])[0]["boxes"]  # reduced while it is read; boxes in pixels of the file
    assert float(boxes.max()) > 2 * max(before.size) and bool((boxes <= 8 * max(before.size)).all())
    assert cli("detect", folder, path, "--out", out, "--score", 2) == 0
    assert Image.open(out / f"{path.stem}.png").tobytes() == before.tobytes()


def test_networks_of_other_tasks(detector, embedder, tmp_path):
    assert "expected a detector, received a network of the task 'retrieval'" in cli(
        "detect", embedder[0], tmp_path
    )
    assert "RUN: expected a run that embeds, received a detector; use `rankgrad detect`" in cli(
        "embed", detector[0], tmp_path
    )


def test_version_and_completion():
    def said(*arguments, **variables):
        code = "import sys; sys.argv[0] = 'rankgrad'; from rankgrad.lab.cli import main; main()"
        out = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **variables},
        )
        return out.stdout.split()

    assert said("--version") == ["rankgrad", rankgrad.__version__]
    verbs = said(_RANKGRAD_COMPLETE="complete_bash", COMP_WORDS="rankgrad se", COMP_CWORD="1")
    assert verbs == ["search"]
    recipes = said(_RANKGRAD_COMPLETE="complete_bash", COMP_WORDS="rankgrad train cub", COMP_CWORD="2")
    assert recipes == ["cub", "cub-proxy"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embeddings_that_are_no_numbers_are_not_written(embedder, tmp_path, value):
    folder, root = embedder
    weights, notes = checkpoint.load_weights(folder / "best.safetensors")
    lost = {name: tensor * (value if tensor.is_floating_point() else 1) for name, tensor in weights.items()}
    network = SimpleNamespace(state_dict=lambda: lost)
    checkpoint.save_weights(tmp_path / "a.safetensors", network, notes)
    code = cli("embed", tmp_path / "a.safetensors", root, "--out", tmp_path / "a.npz")
    assert code.startswith("rankgrad: RUN: the network produced NaN or infinite embeddings for 36 of 36 items")
    assert os.listdir(tmp_path) == ["a.safetensors"]
