"""The VOC reader, batches by aspect ratio, and images on the canvas against torchvision's own transforms."""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.transforms import v2

from rankgrad.lab.detection import data, voc
from rankgrad.lab.detection.batches import AspectSampler, canvas, place_boxes, target_sizes
from rankgrad.lab.detection.config import Data, View
from rankgrad.lab.detection.task import SceneSource
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.images import MEAN, STD, PackedImages

import scenes


def read(root, **settings):
    return data.read(Data(**{"name": "voc", "root": str(root), **settings}))


def test_the_reader(tmp_path):
    scenes.voc_set(tmp_path)
    splits = read(tmp_path)
    assert splits.classes == scenes.NAMES
    assert (len(splits.train), len(splits.test)) == (12, 6)
    assert any(len(o.labels) == 0 for o in splits.train.objects)
    assert any(bool(o.difficult.any()) for o in splits.train.objects)
    assert read(tmp_path, test_limit=2).test.names == splits.test.names[:2]


@pytest.mark.parametrize(
    ("box", "edges"),
    [
        ((5, 7, 20, 30), (4, 6, 20, 30)),  # pixels 5 ... 20 are 16 wide
        ((5.68, 7.4, 20.36, 30.0), (4.68, 6.4, 20.36, 30.0)),
        ((0, 1, 70, 48), (0, 0, 64, 48)),  # outside the image is cut off
    ],
)
def test_boxes_are_edges(tmp_path, box, edges):
    path = tmp_path / "a.xml"
    path.write_text(scenes.annotation([("leaf", box, True)]))
    ((name, found, difficult),), size = voc.read_annotation(path, tmp_path / "a.jpg")
    assert size == (64, 48)
    assert (name, difficult) == ("leaf", True)
    assert found == pytest.approx(edges)


BROKEN = {
    "broken": "<annotation><object>",
    "not UTF-8": None,
    "document type": scenes.annotation([], extra='<!DOCTYPE x [<!ENTITY a "b">]>'),
    "an object without name": "<annotation><object><bndbox/></object></annotation>",
    "a box without xmin": "<annotation><object><name>leaf</name><bndbox/></object></annotation>",
    "xmin: expected a number of pixels up to 1,000,000, received 'a'": scenes.annotation(
        [("leaf", ("a", 1, 2, 3), False)]
    ),
    "a box of leaf with nothing of the 64 x 48 pixels in it (9, 9, 4, 12)": scenes.annotation(
        [("leaf", (9, 9, 4, 12), False)]
    ),
    "a box of leaf with nothing of the 64 x 48 pixels in it (1, 1, 1e-30, 12)": scenes.annotation(
        [("leaf", (1, 1, 1e-30, 12), False)]
    ),
    "a box of leaf with nothing of the 44 x 60 pixels in it (50, 9, 60, 12)": scenes.annotation(
        [("leaf", (50, 9, 60, 12), False)], size=(0, 0)
    ),
    "missing": "",
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_broken_annotations_are_named(tmp_path, fault):
    scenes.voc_set(tmp_path, train=4, test=2)
    path = tmp_path / "Annotations" / "000003.xml"
    if fault == "missing":
        path.unlink()
    elif BROKEN[fault] is None:
        path.write_text(scenes.annotation([], extra='<?xml version="1.0" encoding="utf-16"?>'), encoding="utf-16")
    else:
        path.write_text(BROKEN[fault])
    with pytest.raises(UserError, match=r"1 of 6 annotations cannot be read: 000003.xml: ") as caught:
        read(tmp_path)
    assert fault in str(caught.value) or fault == "not UTF-8"
    splits = read(tmp_path, broken="skip")
    assert len(splits.train) == 3
    assert len(splits.faults) == 1


def test_a_bomb_is_refused_as_defusedxml_does(tmp_path):
    defused = pytest.importorskip("defusedxml.ElementTree")
    bomb = '<!DOCTYPE b [<!ENTITY a "x"><!ENTITY b "&a;&a;&a;">]><annotation>&b;</annotation>'
    with pytest.raises(Exception, match="Entit"):
        defused.fromstring(bomb)
    with pytest.raises(ValueError, match="not allowed"):
        voc.parse(bomb.encode())
    good = scenes.annotation([("leaf", (1, 2, 3, 4), False)])
    ours, theirs = voc.parse(good.encode()), defused.fromstring(good)
    assert [e.text for e in ours.iter()] == [e.text for e in theirs.iter()]


def test_user_errors_are_printed_as_one_line(tmp_path):
    with pytest.raises(UserError, match="--data"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match="ImageSets/Main"):
        read(tmp_path)
    scenes.voc_set(tmp_path)
    with pytest.raises(UserError, match="did you mean 'trainval'"):
        read(tmp_path, train="trainva")
    with pytest.raises(UserError, match="VOCdevkit/VOC2007"):
        read(tmp_path, name="voc07")
    scenes.voc_set(tmp_path / "VOCdevkit" / "VOC2007")
    with pytest.raises(UserError, match=r"training images 12 instead of 5,011.*counts=any"):
        read(tmp_path, name="voc07")
    with pytest.raises(UserError, match="unknown class 'apple'"):
        read(tmp_path, name="voc07", counts="any")


@pytest.mark.parametrize(("part", "names"), [("train", "0000*.xml"), ("test", "0001*.xml")])
def test_nothing_to_train_or_test_on(tmp_path, part, names):
    """Known before the training, not after it."""
    scenes.voc_set(tmp_path)
    for hard in (True, None):
        for path in (tmp_path / "Annotations").glob(names):
            path.write_text(scenes.annotation([] if hard is None else [("leaf", (1, 1, 9, 9), hard)]))
        with pytest.raises(UserError, match=f"--data: no objects to {part} on"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("iso-8859-1", "iso-8859-1"),
        ("utf-8", "utf-8"),
        ("utf-8-sig", None),
        ("utf-8", "utf-16"),  # what the text was before it was written, .NET says
        ("utf-8", "gb2312"),
    ],
)
def test_encodings_of_annotations(tmp_path, encoding, said):
    scenes.voc_set(tmp_path)
    first = "" if said is None else f'<?xml version="1.0" encoding="{said}"?>'
    path = tmp_path / "Annotations" / "000001.xml"
    path.write_bytes(scenes.annotation([("Käfer", (1, 1, 9, 9), False)], extra=first).encode(encoding))
    assert "Käfer" in read(tmp_path).classes


@pytest.mark.parametrize(("said", "fault"), [("klingon", "unknown encoding: klingon"), (None, "can't decode")])
def test_unknown_encodings(tmp_path, said, fault):
    scenes.voc_set(tmp_path)
    first = "" if said is None else f'<?xml version="1.0" encoding="{said}"?>'
    path = tmp_path / "Annotations" / "000001.xml"
    path.write_bytes(scenes.annotation([("Käfer", (1, 1, 9, 9), False)], extra=first).encode("iso-8859-1"))
    with pytest.raises(UserError, match=f"000001.xml: broken .*{fault}"):
        read(tmp_path)


def test_names_with_spaces_and_lists_of_one_class(tmp_path):
    scenes.voc_set(tmp_path)
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "jpg")):
        (tmp_path / folder / f"000001.{suffix}").rename(tmp_path / folder / f"my image 1.{suffix}")
    lists = tmp_path / "ImageSets" / "Main"
    (lists / "leaf_trainval.txt").write_text("000000 -1\nmy image 1  1\n000002 0\n")
    (lists / "trainval.txt").write_text("000000\r\nmy image 1 \r\n\r\n000002\r\n")
    for part in ("trainval", "leaf_trainval"):
        assert read(tmp_path, train=part).train.names == ["000000", "my image 1", "000002"]


def test_boxes_end_where_the_image_does(tmp_path):
    """Without a size in the annotation too."""
    scenes.voc_set(tmp_path)
    path = tmp_path / "Annotations" / "000001.xml"
    path.write_text(re.sub("<size>.*</size>", "", scenes.annotation([("leaf", (40, 9, 99, 99), False)])))
    splits = read(tmp_path)
    assert splits.train.objects[1].boxes.tolist() == [[39, 8, 64, 48]] and splits.train.sizes[1] == (64, 48)


def test_for_the_classes_of_a_checkpoint_the_test_images_are_enough(tmp_path):
    scenes.voc_set(tmp_path)
    (tmp_path / "ImageSets/Main/trainval.txt").unlink()
    config = Data(name="voc", root=str(tmp_path))
    splits = data.read(config, ("sky", "apple", "leaf", "zebra"))
    assert splits.train is None and len(splits.test) == 6
    assert splits.classes == ("sky", "apple", "leaf", "zebra")
    with pytest.raises(UserError, match="unknown class 'sky'"):
        data.read(config, ("apple", "leaf"))
    with pytest.raises(
        UserError, match=r"no objects to test on .*; .*annotations cannot be read: .*unknown class"
    ):
        data.read(config.model_copy(update={"broken": "skip"}), ("zebra",))


def test_the_classes_are_those_of_all_images(tmp_path):
    scenes.voc_set(tmp_path)
    (tmp_path / "Annotations/000105.xml").write_text(scenes.annotation([("zebra", (1, 1, 9, 9), False)]))
    assert "zebra" in read(tmp_path, test_limit=1).classes


@pytest.mark.parametrize("suffix", [".JPEG", ".PNG", ".bmp", ".webp"])
def test_images_by_other_names(tmp_path, suffix):
    scenes.voc_set(tmp_path)
    for path in list((tmp_path / "JPEGImages").glob("*.jpg")):
        path.rename(path.with_suffix(suffix))
    names = (tmp_path / "ImageSets/Main/trainval.txt").read_text()
    (tmp_path / "ImageSets/Main/trainval.txt").write_text(names, encoding="utf-8-sig")  # as Windows' editor does
    found = read(tmp_path).train.sources
    assert len(found) == 12 and all(path.is_file() and path.suffix == suffix for path in found)


def test_images_that_are_not_what_they_seem(tmp_path):
    """Other sizes than in the annotation (turned by a camera, or resized), and more bits than 8."""
    scenes.voc_set(tmp_path)
    images = tmp_path / "JPEGImages"
    Image.open(images / "000001.jpg").resize((48, 64)).save(images / "000001.jpg", "PNG")
    Image.fromarray(np.full((48, 64), 3000, np.uint16)).save(images / "000002.jpg", "PNG")
    for size in ("<size><width>0</width><height>0</height></size>", ""):  # unknown: no fault
        path = tmp_path / "Annotations" / "000003.xml"
        path.write_text(re.sub("<size>.*</size>", size, path.read_text()))
        config = Data(name="voc", root=str(tmp_path), broken="skip")
        faults = SceneSource(data.read(config).train, config, 1000, torch.device("cpu"), lambda done: None).faults
        assert faults == [
            "000001: broken (48 x 64 pixels, 64 x 48 in the annotation)",
            "000002: broken (expected 8 bits a channel, received Pillow's mode I;16)",
        ]


def test_two_years_are_read_together(tmp_path):
    for year, train in (("2007", 3), ("2012", 4)):
        base = scenes.voc_set(tmp_path / "VOCdevkit" / f"VOC{year}", train=train, test=2)
        for path in (base / "Annotations").glob("*.xml"):
            text = path.read_text()
            for ours, theirs in zip(scenes.NAMES, ("cat", "dog", "boat"), strict=True):
                text = text.replace(ours, theirs)
            path.write_text(text)
    splits = read(tmp_path, name="voc0712", counts="any")
    assert splits.train.names[0].startswith("VOC2007/")
    assert splits.train.names[-1].startswith("VOC2012/")
    assert (len(splits.train), len(splits.test), len(splits.classes)) == (7, 2, 20)
    shutil.rmtree(tmp_path / "VOCdevkit" / "VOC2012")  # a checkpoint is judged on 2007
    config = Data(name="voc0712", root=str(tmp_path), counts="any")
    assert len(data.read(config, voc.CLASSES).test) == 2
    with pytest.raises(UserError, match="not complete: test images 2 instead of 4,952"):
        data.read(config.model_copy(update={"counts": "protocol"}), voc.CLASSES)


def test_batches_by_aspect_ratio():
    ratios = torch.rand(103) + 0.5
    sampler = AspectSampler(ratios, size=8, seed=3)
    assert len(sampler) == 12
    epoch = torch.stack([sampler.at(step) for step in range(12)])
    assert epoch.unique().numel() == 96
    spread = (ratios[epoch].max(1).values - ratios[epoch].min(1).values).mean()
    assert spread < 0.35  # of one: a random batch spans 0.78
    assert torch.equal(AspectSampler(ratios, size=8, seed=3).at(17), sampler.at(17))
    assert not torch.equal(sampler.at(12), sampler.at(0))
    assert not torch.equal(AspectSampler(ratios, size=8, seed=4).at(0), sampler.at(0))
    with pytest.raises(ValueError, match="size: expected at most the 3 images"):
        AspectSampler(ratios[:3], size=8)


def random_images():
    sizes = ((37, 50), (50, 37), (41, 41), (20, 90))
    return [torch.randint(0, 256, (*size, 3), dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize(("short", "long"), [(60, 100), (24, 40), (37, 400)])
def test_the_canvas_is_torchvisions(short, long):
    """Resizing, normalising and padding as GeneralizedRCNNTransform does it, image by image."""
    images = random_images()
    theirs = GeneralizedRCNNTransform(short, long, list(MEAN), list(STD)).eval()
    wanted, _ = theirs([p.permute(2, 0, 1) / 255 for p in images])
    mine = canvas(PackedImages.of(images), None, View(short=short, long=long))
    assert mine.sizes == [tuple(size) for size in wanted.image_sizes]
    torch.testing.assert_close(mine.images, wanted.tensors, atol=2e-4, rtol=0)


def test_no_side_is_less_than_a_pixel():
    for factor in (1.0, 1e-6):
        high, wide = target_sizes(
            torch.tensor([1, 2000]), torch.tensor([2000, 1]), View(short=60, long=96), factor
        )
        assert min(high.tolist() + wide.tolist()) == 1
    strip = torch.randint(0, 256, (1, 2000, 3), dtype=torch.uint8)
    made = canvas(PackedImages.of([strip]), None, View(short=60, long=96))
    assert made.sizes == [(1, 96)] and made.images.shape == (1, 3, 32, 96)


@pytest.mark.parametrize("factor", [1.0, 0.6, 1.3])
def test_flips_and_boxes_are_v2s(factor):
    images = random_images()
    view = View(short=60, long=110)
    shown = View(short=round(60 * factor), long=round(110 * factor))
    flips = torch.tensor([True, False, True, True])
    corner = torch.rand(4, 3, 2) * 15
    boxes = list(torch.cat([corner, corner + 1 + 4 * torch.rand(4, 3, 2)], dim=2))
    made = canvas(PackedImages.of(images), flips, view, factor)
    placed = place_boxes(boxes, made, flips)
    for n, (image, box) in enumerate(zip(images, boxes, strict=True)):
        image = image.permute(2, 0, 1)
        there = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=tuple(image.shape[1:]))
        high, wide = (int(side) for side in target_sizes(*(torch.tensor([s]) for s in image.shape[1:]), shown))
        image, there = (
            v2.functional.resize(image.float(), [high, wide], antialias=False),
            v2.functional.resize(there, [high, wide]),
        )
        if flips[n]:
            image, there = v2.functional.horizontal_flip(image), v2.functional.horizontal_flip(there)
        image = v2.functional.normalize(image / 255, MEAN, STD)
        torch.testing.assert_close(made.images[n, :, :high, :wide], image, atol=2e-4, rtol=0)
        torch.testing.assert_close(placed[n], there.as_subclass(torch.Tensor), atol=1e-4, rtol=0)
        assert float(made.images[n, :, high:].abs().sum() + made.images[n, :, :, wide:].abs().sum()) == 0
