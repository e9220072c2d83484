"""What follows from the images of a folder: drawings are not mirrored, untrained networks see nothing enlarged."""

import numpy as np
import pytest
import torch
from PIL import Image

from rankgrad.lab import recipes
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.folders import given_images
from rankgrad.lab.vision.kinds import are_drawings, working_size

import images

SMALL = [
    "backbone=tiny",
    "weights=none",
    "embedding=4",
    "view.resize=16",
    "view.crop=12",
    "batch.size=8",
    "per_class=2",
]


def stroke(path, label, seed, *, blurred=False, mode="L"):
    """A line in black on white, 40 x 40; blurred: as a scanner or a smaller size leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((40, 40), 255, np.uint8)
    pixels[5:35, 5 + label : 8 + label] = 0
    pixels[8 + seed, 5:30] = 0
    if blurred:
        pixels[5:35, 4 + label] = pixels[5:35, 8 + label] = 128
    Image.fromarray(pixels).convert(mode).save(path)


def drawn_set(root, classes=8, each=4, **how):
    for label in range(classes):
        for seed in range(each):
            stroke(root / f"class{label}" / f"{seed}.png", label, seed, **how)
    return root


def task_of(root, *settings):
    _, config = recipes.load("folder", [*SMALL, f"data.root={root}", *settings])
    return ImageTask(config, torch.device("cpu"))


@pytest.mark.parametrize("how", [{}, {"mode": "1"}, {"mode": "RGB"}, {"blurred": True}])
def test_drawings_are_not_mirrored(tmp_path, how):
    task = task_of(drawn_set(tmp_path / "data", **how))
    assert task.config.view.flip is False
    assert any(line.endswith("not mirrored (view.flip)") for line in task.notes)
    assert recipes.checked(task.config.model_dump(mode="json"))[1] == task.config  # saved as it is


def test_a_setting_is_taken_as_it_is(tmp_path):
    assert task_of(drawn_set(tmp_path / "data"), "view.flip=true").config.view.flip is True


def test_photographs_are_mirrored(tmp_path):
    """In colour, and in grey."""
    task = task_of(images.folder_set(tmp_path / "colour", classes=8))
    assert task.config.view.flip is True and not any("mirrored" in line for line in task.notes)
    grey = images.folder_set(tmp_path / "grey", classes=8)
    for path in grey.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    assert task_of(grey).config.view.flip is True


def test_data_sets_of_photographs_are_not_looked_at():
    _, config = recipes.load("cub", ["data.root=/nowhere", "weights=none"])
    assert ImageTask.completed(config).view.flip is True


def test_a_logo_in_colours_is_no_drawing(tmp_path):
    paths = []
    for number in range(4):
        pixels = np.full((40, 40, 3), 255, np.uint8)
        pixels[5:35, 10:14] = (230, 0, 30)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    assert not are_drawings(paths)


def test_a_few_others_do_not_count(tmp_path):
    """Nine in ten decide; a broken file is neither, and is reported where all images are read."""
    drawn = sorted(drawn_set(tmp_path / "data", classes=5).rglob("*.png"))
    (tmp_path / "broken.png").write_bytes(b"no image")
    images.image(tmp_path / "photograph.png", 0, 0)
    assert are_drawings([*drawn[:9], tmp_path / "photograph.png", tmp_path / "broken.png"])
    assert not are_drawings([*drawn[:8], tmp_path / "photograph.png"])
    assert not are_drawings([tmp_path / "broken.png"]) and not are_drawings([])


def test_one_image_of_each_of_some_classes_is_looked_at(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("rankgrad.lab.vision.kinds.are_drawings", lambda paths: bool(seen.extend(paths)))
    root = tmp_path / "data"
    for part, classes in (("train", 70), ("test", 3)):
        for label in range(classes):
            for number in range(2):
                images.image(root / part / f"{label:02d}" / f"{number}.png", label, number)
    _, config = recipes.load("folder", [*SMALL, f"data.root={root}"])
    ImageTask.completed(config)
    assert [str(path.relative_to(root)) for path in seen] == [
        f"train/{label:02d}/0.png" for label in range(0, 70, 3)
    ]


def test_an_untrained_network_sees_no_enlarged_images(tmp_path):
    """40 pixels brought to 256 cost forty times the time and show nothing more."""
    root = drawn_set(tmp_path / "data")
    settings = [word for word in SMALL if not word.startswith("view")]
    for more, resize, crop in (
        ([], 40, 40),
        (["view.crop=20"], 23, 20),
        (["view.resize=64"], 64, 64),
        (["weights=mine.safetensors", "backbone=resnet18"], 256, 224),
    ):
        _, config = recipes.load("folder", [*settings, f"data.root={root}", *more])
        view = ImageTask.completed(config).view
        assert (view.resize, view.crop) == (resize, crop), more
    _, config = recipes.load("folder", [*settings, f"data.root={root}"])
    assert any(
        line.endswith("crops of 40 pixels, not mirrored (view.flip)")
        for line in task_of(root, "view.crop=40", "view.resize=40").notes
    )
    sizes = []
    for side in (10, 50, 900):
        images.image(tmp_path / f"{side}.png", 0, 0, size=(side, side + 5))
        sizes.append(working_size([tmp_path / f"{side}.png"]))
    assert sizes == [32, 50, 256]
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert working_size([tmp_path / "broken.png"]) is None


@pytest.mark.parametrize("suffix", [".pgm", ".ppm"])
def test_netpbm_images(tmp_path, suffix):
    root = images.folder_set(tmp_path / "data", classes=8)
    for path in root.rglob("*.png"):
        Image.open(path).convert("L" if suffix == ".pgm" else "RGB").save(path.with_suffix(suffix))
        path.unlink()
    assert len(task_of(root).source) == 24


def test_a_test_part_in_which_nothing_can_be_found(tmp_path):
    root = images.folder_set(tmp_path / "data" / "train", classes=8).parent
    for label in range(3):
        images.image(root / "test" / f"new{label}" / "0.png", label, 0)
    with pytest.raises(UserError, match=r"^--data: expected classes with two test items at least, found none"):
        task_of(root)


@pytest.mark.parametrize("backbone", ["vit_b_16", "alexnet", "timm:vit_tiny_patch16_224"])
def test_crops_that_a_backbone_does_not_take(tmp_path, backbone):
    root = images.folder_set(tmp_path / "data", classes=8)
    with pytest.raises(UserError, match=rf"^view\.crop: '{backbone}' does not take crops of 12 pixels \("):
        task_of(root, f"backbone={backbone}")


def test_one_image_by_its_name(tmp_path):
    images.image(tmp_path / "a.png", 0, 0)
    for one in (tmp_path / "a.png", str(tmp_path / "a.png"), [tmp_path / "a.png"]):
        assert given_images(one)[0] == [tmp_path / "a.png"]
