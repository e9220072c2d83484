"""Folders of images as users have them: what is read, what is left out, and what the messages and notes say."""

import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.retrieval.images import data
from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.training.errors import UserError

import images

TINY = ["backbone=tiny", "weights=none", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2"]
TINY += ["view.resize=16", "view.crop=12", "device=cpu"]


def read(root):
    return data.read(Data(name="folder", root=str(root)))


def notes(root):
    return ImageTask(recipes.load("folder", [*TINY, f"data.root={root}"])[1], torch.device("cpu")).notes


@pytest.mark.parametrize(("train", "test"), [("train", "test"), ("Train", "Test"), ("TRAIN", "Val")])
def test_parts_in_any_case_beside_folders_without_images(tmp_path, train, test):
    images.folder_set(tmp_path / train, classes=3, each=2)
    images.folder_set(tmp_path / test, classes=2, each=4)
    (tmp_path / "annotations" / "2024").mkdir(parents=True)
    (tmp_path / "annotations" / "2024" / "all.json").write_text("{}")
    splits = read(tmp_path)
    assert (len(splits.train), len(splits.query)) == (6, 8)
    assert "not used: 1 folder without images (annotations)" in splits.note
    assert [path.parts[-3] for path in data.sample(Data(name="folder", root=str(tmp_path)))] == [train] * 3
    assert not any("split_seed" in line for line in notes(tmp_path))


def test_what_is_left_out_is_told(tmp_path, capsys):
    """Images beside the folders of classes, folders without images, and files that do not look like images."""
    root = images.folder_set(tmp_path / "data", classes=4, each=4)
    assert read(root).note == ""
    for number in range(7):
        (root / f"empty{number}").mkdir()
    images.image(root / "alone.png", 0, 0)
    for name in ("class0/a.heic", "class0/b.HEIC", "class1/notes.txt", "empty2/c.txt", "class1/.hidden"):
        (root / name).write_bytes(b"hello")
    note = read(root).note
    assert "1 image beside the folders of the classes" in note
    assert "7 folders without images (empty0, empty1, empty2, empty3, empty4, ...)" in note
    assert "4 files of other kinds (.heic, .txt)" in note and "hidden" not in note
    notes(root)
    assert "not used: " in capsys.readouterr().out


def test_images_without_folders(tmp_path):
    for number in range(3):
        images.image(tmp_path / f"{number}.png", 0, number)
    with pytest.raises(
        UserError, match=r"--data: no images in .*/<class>/ .*; 3 images are in .* itself: put those"
    ):
        read(tmp_path)


def test_a_folder_far_too_high(tmp_path):
    images.folder_set(tmp_path / "a" / "b" / "c", classes=4, each=2)
    (tmp_path / "a" / "docs").mkdir()
    with pytest.raises(UserError, match=rf"in one of them, 'a'; .* say --data {tmp_path}/a/b/c$"):
        read(tmp_path)


def test_fewer_than_four_classes(tmp_path):
    """Their images are split, which no setting chooses."""
    three = images.folder_set(tmp_path / "three", classes=3, each=4)
    assert read(three).note == "fewer than 4 classes: every other image of each is to test on"
    two = images.folder_set(tmp_path / "two", classes=2, each=2)
    with pytest.raises(UserError, match=r"found 2 images of 2 classes$"):
        notes(two)


def test_jpegs_as_windows_names_them(tmp_path):
    for label in range(4):
        for number in range(2):
            images.image(tmp_path / f"c{label}" / f"{number}.jfif", label, number, kind="JPEG")
    assert len(read(tmp_path).train) == 4
