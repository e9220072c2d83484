"""Annotations and lists of images that are damaged, too large, or lead out of their folder."""

import pytest

from rankgrad.lab.detection import config as detection
from rankgrad.lab.detection import data as detection_data
from rankgrad.lab.retrieval.images import data
from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.training.errors import UserError

import images
import scenes


@pytest.mark.parametrize("side", ["nan", "inf", "-inf", "1e9", "1e400", "2000000", "x"])
def test_annotations_with_impossible_numbers(tmp_path, side):
    root = scenes.voc_set(tmp_path)
    config = detection.Data(name="voc", root=str(root), workers=2)
    whole_file = (root / "Annotations" / "000001.xml").read_text()
    for old, new in (("<width>64<", f"<width>{side}<"), ("<height>48<", f"<height>{side}<")):
        (root / "Annotations" / "000001.xml").write_text(whole_file.replace(old, new))
        with pytest.raises(UserError, match=r"000001\.xml: (width|height): expected a number of pixels"):
            detection_data.read(config)
    box = scenes.annotation([("sky", (3, 5, side, 10), False)])
    (root / "Annotations" / "000001.xml").write_text(box)
    with pytest.raises(UserError, match=r"000001\.xml: xmax: expected a number of pixels"):
        detection_data.read(config)


def test_annotations_that_are_too_large(tmp_path):
    root = scenes.voc_set(tmp_path)
    (root / "Annotations" / "000001.xml").write_text("<a>" + " " * 4_000_000)
    with pytest.raises(UserError, match=r"000001\.xml: 4,000,003 bytes, expected at most 4,000,000"):
        detection_data.read(detection.Data(name="voc", root=str(root), workers=2))


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a\0b", "a" * 300])
def test_names_that_lead_out_of_the_folder(tmp_path, name):
    root = scenes.voc_set(tmp_path / "voc")
    listing = root / "ImageSets" / "Main" / "trainval.txt"
    listing.write_text(f"000001\n{name}\n")
    with pytest.raises(UserError, match=r"trainval\.txt line 2: expected a name inside the folder, received"):
        detection_data.read(detection.Data(name="voc", root=str(root), workers=2))
    for kind, make, place, line in (
        ("cub", images.cub_set, "CUB_200_2011/images.txt", f"1 {name}"),
        ("sop", images.sop_set, "Stanford_Online_Products/Ebay_test.txt", f"1 1 1 {name}"),
        ("inshop", images.inshop_set, "Eval/list_eval_partition.txt", f"{name} id_1 train"),
    ):
        path = make(tmp_path / kind) / place
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:3], line, *lines[4:]]))
        with pytest.raises(UserError, match=f"{path} line 4: expected a name inside the folder, received"):
            data.read(Data(name=kind, root=str(tmp_path / kind), counts="any"))


def test_lists_that_are_broken(tmp_path):
    root = scenes.voc_set(tmp_path / "voc")
    (root / "ImageSets" / "Main" / "test.txt").write_bytes(b"000100\n\xff\xfe\n")
    with pytest.raises(UserError, match=r"test\.txt line 2: expected UTF-8, received byte 0xff"):
        detection_data.read(detection.Data(name="voc", root=str(root), workers=2))
    sop = images.sop_set(tmp_path / "sop")
    path = sop / "Stanford_Online_Products" / "Ebay_train.txt"
    path.write_bytes(path.read_bytes() + b"caf\xe9")
    with pytest.raises(UserError, match=rf"{path} line 38: expected UTF-8, received byte 0xe9"):
        data.read(Data(name="sop", root=str(sop), counts="any"))
    cub = images.cub_set(tmp_path / "cub")
    for name in ("images.txt", "image_class_labels.txt"):
        path = cub / "CUB_200_2011" / name
        whole_file = path.read_text()
        for wrong in ("x", "-3", "1.5", "9" * 5000, "\u00b2"):
            path.write_text(whole_file.replace("4 ", f"{wrong} ", 1))
            with pytest.raises(UserError, match=rf"{path} line 4: expected a number, received"):
                data.read(Data(name="cub", root=str(cub), counts="any"))
        path.write_text(whole_file)


def test_coco_files_stay_in_their_folder(tmp_path):
    import json

    from rankgrad.lab.detection import coco

    (tmp_path / "train").mkdir()
    for file, message in (
        ({"file_name": "../x.png"}, r"images\.0: expected a name inside the folder, received '\.\./x\.png'"),
        ({"file_name": "x.png", "width": 1e9, "height": 3}, r"images\.0\.width"),
        ({"file_name": "x.png", "width": 3, "height": -1}, r"images\.0\.height"),
    ):
        content = {"images": [{"id": 1, **file}], "annotations": [], "categories": []}
        (tmp_path / "train" / "_annotations.coco.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=rf"_annotations\.coco\.json: {message}"):
            coco.read_split(tmp_path, "train")
