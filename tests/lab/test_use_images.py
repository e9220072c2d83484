"""Images that a trained network is given: broken files among them, and images of Pillow's instead of files."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from rankgrad.lab.retrieval.images import trained
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.use import load

from runs import cli


@pytest.fixture
def mixed(embedder, tmp_path):
    """36 images and 7 broken files, between them by name."""
    root = tmp_path / "mixed"
    shutil.copytree(embedder[1], root)
    for number in range(7):
        (root / f"class{number % 3}" / f"2-{number}.png").write_bytes(b"hello")
    return root


def test_what_can_be_read_is_embedded(embedder, mixed, tmp_path, capsys, monkeypatch):
    """In parts of five images, of which one has nothing but broken files."""
    folder, root = embedder
    monkeypatch.setattr(trained, "_AT_ONCE", 5)
    (mixed / "a").mkdir()
    for number in range(5):
        (mixed / "a" / f"{number}.png").write_bytes(b"hello")
    out, index = tmp_path / "e.npz", tmp_path / "a.faiss"
    assert cli("embed", folder, mixed, "--out", out, "--index", index) == 3
    said = capsys.readouterr()
    assert f"36 embeddings of length 8 in {out}" in said.out and f"index: {index}" in said.out
    (line,) = [line for line in said.err.splitlines() if line.startswith("rankgrad: ")]
    assert line.startswith("rankgrad: IMAGES: 12 of 48 images cannot be read: ")
    assert line.count("broken (") == 5 and "; and 7 more" in line and line.endswith(". The others are embedded.")
    found = np.load(out)
    files = sorted(root.rglob("*.png"))
    assert found["names"].tolist() == [str(mixed / file.relative_to(root)) for file in files]
    assert np.allclose(found["embeddings"], load(folder).embed(files).numpy(), atol=1e-6)

    query = found["names"][7]
    broken = mixed / "class0" / "2-0.png"
    assert cli("search", index, broken, query, "--nearest", 2, "--page", tmp_path / "s.html") == 3
    said = capsys.readouterr()
    assert "1 of 2 images cannot be read" in said.err and str(broken) not in said.out
    assert [line.split()[1:] for line in said.out.splitlines() if line.split()[:1] == ["1"]] == [["1.000", query]]


def test_nothing_can_be_read(embedder, tmp_path):
    (tmp_path / "a.png").write_bytes(b"hello")
    message = cli("embed", embedder[0], tmp_path, "--out", tmp_path / "e.npz")
    assert message.startswith("rankgrad: IMAGES: 1 of 1 images cannot be read: ")
    assert not (tmp_path / "e.npz").exists()


def test_in_python_rows_match_the_argument(embedder, mixed):
    """A broken file is an error; asked for, the rest is embedded, with its rows."""
    network, files = load(embedder[0]), sorted((mixed / "class0").iterdir())
    with pytest.raises(UserError, match=r"IMAGES: 3 of 9 images cannot be read: .*2-0.png: broken"):
        network.embed(files)
    embeddings, rows, faults = network.embed_readable(files)
    assert rows == [0, 1, 5, 6, 7, 8] and len(faults) == 3
    assert torch.equal(embeddings, network.embed([files[row] for row in rows]))


def test_images_of_pillow(embedder, tmp_path):
    """Files and images in one list; turned as EXIF says, and any mode that a file may have."""
    folder, root = embedder
    network, files = load(folder), sorted((root / "class1").iterdir())
    given = [Image.open(files[0]), files[1], Image.open(files[2])]
    assert torch.equal(network.embed(given), network.embed(files[:3]))
    assert torch.equal(network.embed(Image.open(files[0])), network.embed(files[:1]))
    one = Image.open(files[3])
    assert torch.equal(network.embed([one] * 40), network.embed([files[3]] * 40))
    turned = tmp_path / "turned.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(files[0]).save(turned, exif=exif)
    for mode in ("L", "RGBA", "CMYK", "P"):
        path = tmp_path / f"{mode}.tif"
        Image.open(files[0]).convert(mode).save(path)
        assert torch.equal(network.embed([Image.open(path)]), network.embed([path])), mode
    assert torch.equal(network.embed([Image.open(turned)]), network.embed([turned]))
    assert not torch.equal(network.embed([turned]), network.embed(files[:1]))
    with pytest.raises(UserError, match=r"1 of 2 images cannot be read: image 1: broken \(expected 8 bits"):
        network.embed([files[0], Image.new("I;16", (20, 20))])
    with pytest.raises(UserError, match="IMAGES: expected files or images of Pillow, received a ndarray"):
        network.embed([np.zeros((20, 20, 3), np.uint8)])


def test_detection(detector, tmp_path, capsys, monkeypatch):
    folder, files = detector
    monkeypatch.setattr("rankgrad.lab.detection.trained._AT_ONCE", 5)
    given = tmp_path / "given"
    shutil.copytree(files, given)
    (given / "000004-broken.jpg").write_bytes(b"hello")
    out = tmp_path / "drawn"
    assert cli("detect", folder, given, "--out", out, "--score", 0) == 3
    said = capsys.readouterr()
    assert f"on 18 images in {out}" in said.out and "1 of 19 images cannot be read" in said.err
    found = json.loads((out / "detections.json").read_text())
    assert sorted(found) == sorted(str(given / file.name) for file in files.iterdir())

    network, paths = load(folder), sorted(files.iterdir())
    large = Image.open(paths[0]).resize((8 * Image.open(paths[0]).width, 8 * Image.open(paths[0]).height))
    large.save(tmp_path / "large.png")
    by_file = network.detect([paths[0], tmp_path / "large.png"])
    by_image = network.detect([Image.open(paths[0]), large])
    assert any(len(one["scores"]) for one in by_file)
    for a, b in zip(by_file, by_image, strict=True):
        assert torch.equal(a["boxes"], b["boxes"]) and torch.equal(a["scores"], b["scores"])
    with pytest.raises(UserError, match="IMAGES: 1 of 2 images cannot be read"):
        network.detect([paths[0], given / "000004-broken.jpg"])
