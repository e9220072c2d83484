"""Readers on small sets in the official layouts, and images from file to crop."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images import augment, data
from rankgrad.lab.retrieval.images.config import Data, View
from rankgrad.lab.retrieval.images.source import ImageSource, decode
from rankgrad.lab.retrieval.images.task import ImageTask, read_sources
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.training import reuse
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.images import MEAN, STD, PackedImages

import images

CPU = torch.device("cpu")
TINY = ["backbone=tiny", "weights=none", "precision=fp32", "view.resize=16", "view.crop=12", "device=cpu"]
SMALL = View(resize=16, crop=12, mean=MEAN, std=STD, scale=0.2, flip=True)


def read(name, root, **settings):
    return data.read(Data(name=name, root=str(root), **{"counts": "any", **settings}))


def labels_and_names(split):
    return list(zip(split.labels.tolist(), split.names, strict=True))


def test_cub(tmp_path):
    splits = read("cub", images.cub_set(tmp_path))
    assert (len(splits.train), splits.train.classes(), len(splits.query), splits.gallery) == (15, 3, 15, None)
    assert all(int(name[:3]) <= 100 for name in splits.train.names)
    assert all(int(name[:3]) > 100 for name in splits.query.names)
    for split in (splits.train, splits.query):
        assert len({(label, name[:3]) for label, name in labels_and_names(split)}) == 3
    assert read("cub", tmp_path / "CUB_200_2011").train.names == splits.train.names


def test_sop(tmp_path):
    splits = read("sop", images.sop_set(tmp_path))
    assert (len(splits.train), splits.train.classes(), len(splits.query), splits.query.classes()) == (
        36,
        12,
        36,
        12,
    )
    assert splits.train.super_labels.unique().tolist() == [0, 1, 2]
    for (label, name), over in zip(labels_and_names(splits.train), splits.train.super_labels, strict=True):
        assert name.startswith(f"kind{over + 1}_final/{label + 1}_")


def test_inshop(tmp_path):
    splits = read("inshop", images.inshop_set(tmp_path))
    assert (len(splits.train), len(splits.query), len(splits.gallery)) == (16, 8, 8)
    assert splits.train.super_labels.unique().numel() == 2
    items = {name.split("/")[3]: label for label, name in labels_and_names(splits.query)}
    assert items == {name.split("/")[3]: label for label, name in labels_and_names(splits.gallery)}
    assert not set(splits.query.labels.tolist()) & set(splits.train.labels.tolist())
    assert all(path.is_file() for part in (splits.train, splits.query, splits.gallery) for path in part.sources)


def test_folder_keeps_classes_apart(tmp_path):
    root = images.folder_set(tmp_path, classes=10, each=3)
    splits = read("folder", root, test_share=0.3)
    assert (splits.train.classes(), splits.query.classes()) == (7, 3)
    assert not {n.split("/")[0] for n in splits.train.names} & {n.split("/")[0] for n in splits.query.names}
    assert read("folder", root, test_share=0.3).query.names == splits.query.names
    assert any(
        read("folder", root, test_share=0.3, split_seed=s).query.names != splits.query.names for s in (1, 2)
    )


def test_folder_with_train_and_test(tmp_path):
    images.folder_set(tmp_path / "train", classes=3, each=2)
    images.folder_set(tmp_path / "test", classes=2, each=4)
    splits = read("folder", tmp_path)
    assert (len(splits.train), len(splits.query)) == (6, 8)


def test_digits_and_held_out_training_classes():
    splits = data.read(Data(name="digits"))
    assert (len(splits.train), len(splits.query), splits.query.classes()) == (899, 898, 10)
    held = data.read(Data(name="digits", hold_out=0.3))
    assert (held.train.classes(), held.query.classes()) == (7, 3)
    assert set(held.query.names) <= set(splits.train.names)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("cub", images.cub_set, "training images 15 instead of 5,864.*test classes 3 instead of 100"),
        ("sop", images.sop_set, "training images 36 instead of 59,551.*test classes 12 instead of 11,316"),
        ("inshop", images.inshop_set, "training images 16 instead of 25,882.*queries 8 instead of 14,218"),
    ],
)
def test_counts_are_checked(tmp_path, name, make, message):
    with pytest.raises(UserError, match=message):
        read(name, make(tmp_path), counts="protocol")


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match=r"--data: the data set 'cub' needs a folder"):
        data.read(Data(name="cub"))
    (tmp_path / "birds").mkdir()
    with pytest.raises(UserError, match=r"no such folder.*did you mean 'birds'"):
        read("cub", tmp_path / "brids")
    with pytest.raises(UserError, match=r"expected CUB_200_2011/images\.txt or images\.txt"):
        read("cub", tmp_path)
    with pytest.raises(UserError, match=r"no images in"):
        read("folder", tmp_path)
    root = images.sop_set(tmp_path / "sop")
    listing = root / "Stanford_Online_Products" / "Ebay_test.txt"
    listing.write_text(listing.read_text() + "99 5\n")
    with pytest.raises(UserError, match=r"Ebay_test\.txt line 38: expected 4 fields, received '99 5'"):
        read("sop", root)


@pytest.mark.parametrize("cache", ["ram", "none"])
def test_missing_and_broken_files_are_named_and_counted(tmp_path, cache):
    splits = read("cub", images.cub_set(tmp_path))
    split = splits.train
    split.sources[2].unlink()
    split.sources[4].write_bytes(split.sources[4].read_bytes()[:60])
    splits.query.sources[1].write_bytes(b"")
    settings = Data(name="cub", cache=cache, root=str(tmp_path), counts="any")
    named = (
        r"3 of 30 images cannot be read: .*Bird_2\.jpg: missing; .*Bird_4\.jpg: broken .*; .*Bird_1\.jpg: broken"
    )
    with pytest.raises(UserError, match=named):  # of all splits at once
        read_sources(settings, SMALL, CPU, train=True)
    skipping = settings.model_copy(update={"broken": "skip"})
    source, query, _ = read_sources(skipping, SMALL, CPU, train=True)
    assert len(query) == 14
    assert (len(source), len(source.store.faults)) == (13, 2)
    kept = [i for i in range(15) if i not in (2, 4)]
    assert source.items.labels.tolist() == split.labels[kept].tolist()
    assert torch.equal(source.store.fetch(torch.tensor([2])).image(0), decode(split.sources[3], SMALL))


def test_a_file_that_breaks_while_training_is_named(tmp_path):
    split = read("cub", images.cub_set(tmp_path)).train
    source = ImageSource(split, Data(name="cub", cache="none"), SMALL, CPU)
    split.sources[1].unlink()
    with pytest.raises(UserError, match=r"Bird_1\.jpg: missing while training"):
        source.store.fetch(torch.tensor([0, 1]))


@pytest.mark.parametrize("cache", ["ram", "device", "none"])
def test_fetch_gives_the_same_images_wherever_they_are_kept(tmp_path, cache):
    split = read("folder", images.folder_set(tmp_path)).train
    source = ImageSource(split, Data(name="folder", cache=cache), SMALL, CPU)
    rows = torch.tensor([7, 0, 7, 3])
    for _ in range(2):  # the second time from what was read ahead
        batch = source.store.fetch(rows, rows)
        for at, row in enumerate(rows.tolist()):
            assert torch.equal(batch.image(at), decode(split.sources[row], SMALL))


def test_decoding_goes_by_content_and_resizes_the_short_side(tmp_path):
    images.image(tmp_path / "a.jpg", 0, 0, size=(64, 32), kind="PNG")
    with Image.open(tmp_path / "a.jpg") as file:
        assert file.format == "PNG"
        expected = np.array(file.resize((32, 16), Image.Resampling.BILINEAR))
    assert torch.equal(decode(tmp_path / "a.jpg", SMALL), torch.from_numpy(expected))
    assert decode(tmp_path / "a.jpg", View(resize=16, crop=12, shape="square")).shape == (16, 16, 3)
    Image.new("L", (20, 30), 7).save(tmp_path / "grey.png")
    assert decode(tmp_path / "grey.png", SMALL).shape == (24, 16, 3)


def ragged(*shapes):
    return PackedImages.of([torch.randint(256, (h, w, 3), dtype=torch.uint8) for h, w in shapes])


def plain_crop(image, box, crop):
    """What torchvision would do, one image at a time."""
    left, top, right, bottom = (int(v) for v in box)
    cut = image[top:bottom, left:right].permute(2, 0, 1).float()
    if cut.shape[1:] != (crop, crop):
        cut = v2.functional.resize(cut, [crop, crop], antialias=True)
    return v2.functional.normalize(cut / 255, MEAN, STD)


def test_crops_of_a_batch_equal_crops_of_each_image():
    batch = ragged((16, 30), (40, 16), (16, 16))
    boxes = augment.centre_boxes(batch.height, batch.width, 12)
    out = augment.crops(batch, boxes, None, SMALL)
    for at in range(3):
        torch.testing.assert_close(out[at], plain_crop(batch.image(at), boxes[at], 12), atol=1e-5, rtol=1e-5)
    flipped = augment.crops(batch, boxes, torch.tensor([True, False, True]), SMALL)
    assert torch.equal(flipped[0], out[0].flip(2)) and torch.equal(flipped[1], out[1])


def test_resized_crops_are_close_to_an_antialiased_resize():
    y, x = torch.meshgrid(torch.arange(64), torch.arange(96), indexing="ij")
    smooth = (127 + 120 * torch.sin(x / 9) * torch.cos(y / 7)).to(torch.uint8)
    batch = PackedImages.of([smooth[..., None].expand(-1, -1, 3)] * 2)
    boxes = torch.tensor([[3.0, 5.0, 51.0, 61.0], [10.0, 10.0, 30.0, 26.0]])  # one shrinks, one grows
    out = augment.crops(batch, boxes, None, View(crop=24, mean=MEAN, std=STD))
    for at in range(2):
        assert (out[at] - plain_crop(batch.image(at), boxes[at], 24)).abs().max() < 0.15


def test_random_boxes_stay_inside_and_follow_the_law():
    g = torch.Generator().manual_seed(0)
    height, width = torch.randint(30, 60, (4000,)), torch.randint(30, 200, (4000,))
    boxes = augment.resized_boxes(height, width, 0.2, g)
    left, top, right, bottom = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()
    ratio, area = (right - left) / (bottom - top), (right - left) * (bottom - top) / (height * width)
    assert ratio.min() > 0.7 and ratio.max() < 1.43
    square = augment.resized_boxes(torch.full((4000,), 256), torch.full((4000,), 256), 0.2, g)
    area = (square[:, 2] - square[:, 0]) * (square[:, 3] - square[:, 1]) / 256**2
    transform, blank = v2.RandomResizedCrop(8, scale=(0.2, 1)), [torch.zeros(3, 256, 256)]
    drawn = [transform.make_params(blank) for _ in range(1000)]
    theirs = torch.tensor([p["height"] * p["width"] for p in drawn]).float() / 256**2
    assert abs(area.mean() - theirs.mean()) < 0.03
    assert abs(area.std() - theirs.std()) < 0.02
    fixed = augment.random_boxes(height, width, 24, g)
    assert (fixed[:, :2] >= 0).all() and (fixed[:, 2] <= width).all() and (fixed[:, 3] <= height).all()
    assert (fixed[:, 2] - fixed[:, 0] == 24).all() and fixed[:, 0].unique().numel() > 100


def test_a_image_may_be_decoded_already():
    held = Items([torch.zeros(8, 8, 3, dtype=torch.uint8)], torch.zeros(1, dtype=torch.int64), None, ["a"])
    source = ImageSource(held, Data(name="digits"), View(resize=8, crop=8), CPU)
    assert source.store.fetch(torch.tensor([0])).image(0).shape == (8, 8, 3)
    assert decode(held.sources[0], View(resize=4, crop=4)).shape == (4, 4, 3)


def test_images_are_upright(tmp_path):
    """As they are shown: a camera lies, and says so."""
    pixels = np.zeros((30, 60, 3), np.uint8)
    pixels[:, :30] = (250, 20, 20)
    image = Image.fromarray(pixels)
    notes = image.getexif()
    notes[0x112] = 6  # to be turned by 90 degrees, clockwise
    image.save(tmp_path / "lying.jpg", exif=notes, quality=95)
    found = decode(tmp_path / "lying.jpg", View(resize=32, crop=28))
    assert found.shape == (64, 32, 3)
    assert int(found[5, 16, 0]) > 200 and int(found[60, 16, 0]) < 50  # the left is above now


def test_more_than_8_bits_are_refused(tmp_path):
    Image.fromarray(np.full((40, 40), 3000, np.uint16)).save(tmp_path / "a.png")
    Image.fromarray(np.full((40, 40), 0.5, np.float32)).save(tmp_path / "a.tif")
    for name in ("a.png", "a.tif"):
        with pytest.raises(ValueError, match="expected 8 bits a channel, received Pillow's mode"):
            decode(tmp_path / name, View(resize=32, crop=28))


def test_a_folder_with_images_for_validation(tmp_path, capsys):
    """They are left alone, and that is said."""
    for part, classes in (("train", "abc"), ("valid", "ab"), ("test", "de")):
        for name in classes:
            for k in range(2):
                images.image(tmp_path / part / name / f"{k}.png", ord(name), k)
    splits = data.read(Data(name="folder", root=str(tmp_path)))
    assert (splits.train.classes(), len(splits.train), splits.query.classes()) == (3, 6, 2)
    assert splits.note == "not used: valid (train is trained on, test is judged on)"
    _, config = recipes.load("folder", [*TINY, f"data.root={tmp_path}", "hold_out=0.4"])
    ImageTask(config, torch.device("cpu"))
    assert "not used: valid" in capsys.readouterr().out
    (tmp_path / "test").rename(tmp_path.parent / "elsewhere")
    splits = data.read(Data(name="folder", root=str(tmp_path)))  # torchvision's layout
    assert (splits.train.classes(), splits.query.classes()) == (3, 2)
    assert splits.note == "there is no test: valid is judged on"
    (tmp_path.parent / "elsewhere").rename(tmp_path / "test")
    images.image(tmp_path / "other" / "f" / "0.png", 7, 0)
    note = data.read(Data(name="folder", root=str(tmp_path))).note  # classes of odd names, with folders inside
    assert "not used" not in note and "4 in all" in note


def test_a_folder_too_high(tmp_path):
    images.folder_set(tmp_path / "data" / "birds", classes=4, each=2)
    with pytest.raises(
        UserError, match=r"^--data: expected a folder for each class in .*, 'birds'; .* --data .*/birds$"
    ):
        data.read(Data(name="folder", root=str(tmp_path / "data")))


def test_folders_inside_the_folders_of_classes_are_told(tmp_path):
    """alphabet/character/image: the alphabets are the classes, which may not be what is meant."""
    for name in ("a", "b", "c", "d"):
        images.folder_set(tmp_path / name, classes=2, each=2)
    splits = data.read(Data(name="folder", root=str(tmp_path)))
    assert splits.note.startswith(f"a class is a folder in {tmp_path}, 4 in all, with the images of the 8 folders")
    images.image(tmp_path / "a" / "beside.png", 7, 0)
    assert data.read(Data(name="folder", root=str(tmp_path))).note == ""


def test_classes_of_one_image_say_who_chose_them(tmp_path):
    """The settings did, unless the folder has train and test."""
    root = images.folder_set(tmp_path / "data", classes=3, each=2)
    for name in ("x", "y", "z"):
        images.image(root / name / "0.png", 7, 0)
    notes = ImageTask(recipes.load("folder", [*TINY, f"data.root={root}"])[1], torch.device("cpu")).notes
    (line,) = [line for line in notes if "single item" in line and "test classes" in line]
    assert line.endswith("; data.test_share and data.split_seed choose the classes to test on")
    for part in ("train", "test"):
        shutil.copytree(root, tmp_path / "split" / part)
    split = recipes.load("folder", [*TINY, f"data.root={tmp_path / 'split'}"])[1]
    assert not any("split_seed" in line for line in ImageTask(split, torch.device("cpu")).notes)


def test_a_pooling_that_cannot_be_replaced_is_told(tmp_path):
    root = images.folder_set(tmp_path / "data", classes=4, each=4)
    for more, noted in ((["pooling=auto"], True), (["pooling=own"], False), (["backbone=resnet18"], False)):
        settings = [*TINY, f"data.root={root}", "view.resize=32", "view.crop=32", *more]
        task = ImageTask(recipes.load("folder", settings)[1], torch.device("cpu"))
        assert ("tiny keeps its own pooling, which avg+max cannot replace" in task.notes) == noted


def test_what_is_read_is_what_is_on_disk(tmp_path):
    root = images.folder_set(tmp_path / "data")
    config = Data(name="folder", root=str(root))
    view = View(resize=16, crop=12, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    before = read_sources(config, view, CPU, train=True)
    images.image(root / "class0" / "new.png", 0, 99)
    (root / "class1" / "0.png").unlink()
    after = read_sources(config, view, CPU, train=True)
    names = [{*s.train.items.names, *s.query.items.names} for s in (before, after)]
    assert names[1] - names[0] == {"class0/new.png"} and names[0] - names[1] == {"class1/0.png"}


def test_seeds_read_once(tmp_path, monkeypatch):
    calls = []
    inner = data.read
    monkeypatch.setattr(data, "read", lambda config: calls.append(config) or inner(config))
    for _ in range(2):
        run.run("digits", ["epochs=1", "evaluate_first=false"], out=str(tmp_path / f"{len(calls)}"), seeds=2)
    assert len(calls) == 2
    reader = reuse.read_once(lambda *args, **kwargs: object())
    assert reader(1) is not reader(1)
    with reuse.shared():
        first = reader(1, a=2)
        assert reader(1, a=2) is first
        with reuse.shared():
            assert reader(1, a=2) is first
        assert reader(1, a=3) is not first and reader(1, a=2) is not first
    assert reader(1) is not reader(1)
