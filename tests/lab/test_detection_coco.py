"""COCO JSON: what is read, what is refused, and a run whose numbers are pycocotools'."""

import contextlib
import io
import json
import time

import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.detection import coco, data, model
from rankgrad.lab.detection.config import Data
from rankgrad.lab.detection.task import DetectionTask, _to_train_on
from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint
from rankgrad.lab.training.errors import UserError

import scenes
from scenes import SMALL

CLASSES = ("leaf", "sky", "apple")  # in the order of the ids


def read(root, **settings):
    return data.read(Data(**{"name": "coco", "root": str(root), "train": "train", "test": "val", **settings}))


def changed(path, change):
    """Rewrite a file after ``change(content)``."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("exported", [False, True])
def test_both_layouts_are_the_voc_set(tmp_path, exported):
    scenes.coco_set(tmp_path / "coco", exported)
    wanted = data.read(Data(name="voc", root=str(scenes.voc_set(tmp_path / "voc"))))
    found = read(tmp_path / "coco")
    assert found.classes == CLASSES and wanted.classes == scenes.NAMES
    for ours, theirs in ((found.train, wanted.train), (found.test, wanted.test)):
        rows = range(len(ours) - 1, -1, -1)  # ids fall, rows are in their order
        assert [ours.names[row] for row in rows] == [f"{name}.jpg" for name in theirs.names]
        assert [ours.sizes[row] for row in rows] == theirs.sizes
        assert all(source.is_file() for source in ours.sources)
        for row, objects in zip(rows, theirs.objects, strict=True):
            assert torch.equal(ours.objects[row].boxes, objects.boxes)
            assert torch.equal(ours.objects[row].difficult, objects.difficult)
            names = [[known[label - 1] for label in one.labels.tolist()]
                     for one, known in ((ours.objects[row], CLASSES), (objects, scenes.NAMES))]  # fmt: skip
            assert names[0] == names[1]
    assert any(len(one.labels) == 0 for one in found.train.objects)
    assert any(bool(one.difficult.any()) for one in found.train.objects)


def test_where_images_may_be(tmp_path):
    root = scenes.coco_set(tmp_path)
    (root / "images").mkdir()
    (root / "train2017").rename(root / "images" / "train2017")
    for path in (root / "val2017").iterdir():
        path.rename(root / "images" / path.name)
    (root / "images" / "000100.jpg").unlink()  # one is missing, which is reported later
    splits = read(root)
    assert all(path.is_file() for path in splits.train.sources)
    assert [path.parent.name for path in splits.test.sources] == ["images"] * 6


def test_which_split(tmp_path):
    root = scenes.coco_set(tmp_path)
    assert coco.find_split(root, "val").file.name == "instances_val2017.json"
    with pytest.raises(UserError, match=r"no annotations called 'valid' in .*; there are train2017, val2017"):
        read(root, test="valid")
    (root / "annotations/instances_val2014.json").write_text("{}")
    with pytest.raises(UserError, match=r"several annotations called 'val' in .*; say which: val2014, val2017"):
        read(root)
    assert len(read(root, test="val2017").test) == 6
    with pytest.raises(UserError, match=r"expected annotations/instances_\*.json or \*/_annotations.coco.json in"):
        read(tmp_path / "voc")


@pytest.mark.parametrize(("recipe", "what"), [("coco", "expected annotations/"), ("voc", "ImageSets/Main")])
def test_a_wrong_layout_is_reported_before_weights_are_loaded(tmp_path, monkeypatch, recipe, what):
    monkeypatch.setattr(model, "backbone", lambda config: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=rf"^--data: .*{what}"):
        run.run(recipe, [f"data.root={tmp_path}", "device=cpu"], out=str(tmp_path / "run"))


def _second(content, **entries):
    content["annotations"][1] |= entries


BROKEN = {
    r"annotations.1.bbox: field required": lambda c: c["annotations"][1].pop("bbox"),
    r"annotations.1.bbox.2: input should be greater than or equal to 0": lambda c: _second(c, bbox=[1, 2, -3, 4]),
    r"annotations.1.bbox.3: field required": lambda c: _second(c, bbox=[1, 2, 3]),
    r"annotations.1.bbox.0: input should be a finite number": lambda c: _second(c, bbox=[float("nan"), 2, 3, 4]),
    r"annotations.1.iscrowd: input should be a valid boolean": lambda c: _second(c, iscrowd=2),
    r"annotations.1: there is no image 7$": lambda c: _second(c, image_id=7),
    r"images: field required": lambda c: c.pop("images"),
    r"images: expected each once, received 1000 twice": lambda c: c["images"].append(c["images"][0]),
    r"categories: expected each once, received 'leaf' twice": lambda c: c["categories"].append(
        {"id": 5, "name": "leaf"}
    ),
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_file_that_cannot_be_used(tmp_path, fault):
    """One line with the file and the place in it."""
    root = scenes.coco_set(tmp_path)
    changed(root / "annotations/instances_train2017.json", BROKEN[fault])
    with pytest.raises(UserError, match=rf"^--data: .*instances_train2017.json: {fault}") as caught:
        read(root)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_json(tmp_path):
    root = scenes.coco_set(tmp_path)
    path = root / "annotations/instances_val2017.json"
    content = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + content)  # as some editors write it
    assert len(read(root).test) == 6
    path.write_bytes(content[:-40])
    with pytest.raises(UserError, match=r"^--data: .*instances_val2017.json: invalid JSON: EOF while parsing"):
        read(root)


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({"category_id": 4}, "there is no category 4"),
        ({"bbox": [64, 2, 5, 5]}, r"a box of \w+ with nothing of the \d+ x \d+ pixels in it \(64, 2, 5, 5\)"),
    ],
)
def test_images_that_can_be_left_out(tmp_path, entries, fault):
    root = scenes.coco_set(tmp_path)
    changed(root / "annotations/instances_train2017.json", lambda c: _second(c, **entries))
    with pytest.raises(UserError, match=rf"1 of 18 annotations cannot be read: \d+.jpg: annotations.1: {fault}"):
        read(root)
    assert len(read(root, broken="skip").train) == 11


def test_crowds_alone_are_nothing_to_train_on(tmp_path):
    root = scenes.coco_set(tmp_path)

    def crowded(content):
        for one in content["annotations"]:
            one["iscrowd"] = 1

    changed(root / "annotations/instances_train2017.json", crowded)
    with pytest.raises(UserError, match=r"^--data: no objects to train on in .* \(`iscrowd` ones do not count\)$"):
        read(root)


@pytest.mark.parametrize("box", [[3, 2, 0, 5], [0, 2, 1e-30, 5]])
def test_boxes_without_an_area_are_judged_and_not_trained_on(tmp_path, box):
    """1e-30 is a number of float32, and 64 - 1e-30 is 64: a mirrored box of that width has none."""
    root = scenes.coco_set(tmp_path)
    changed(root / "annotations/instances_train2017.json", lambda c: _second(c, bbox=box, iscrowd=0))
    flat = [o for o in read(root).train.objects if bool((o.boxes[:, 2] - o.boxes[:, 0] < 1).any())]
    assert len(flat) == 1
    assert len(_to_train_on(flat[0], (64, 48)).labels) == int((~flat[0].difficult).sum()) - 1


def pycocotools_numbers(truth_file, found, image_ids, category_ids):
    """AP, AP50 and AP75 of detections by pycocotools, in percent."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    results = [
        {"image_id": image, "category_id": category_ids[kind - 1], "bbox": [x0, y0, x1 - x0, y1 - y0], "score": s}
        for image, one in zip(image_ids, found, strict=True)
        for (x0, y0, x1, y1), kind, s in zip(
            one["boxes"].double().tolist(), one["labels"].tolist(), one["scores"].tolist(), strict=True
        )
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(truth_file))
        judged = COCOeval(truth, truth.loadRes(results), "bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return [100 * float(value) for value in judged.stats[:3]]


def test_a_run_has_pycocotools_numbers(tmp_path):
    """Trained from JSON files, judged by the same files; crowds among the objects, images without any."""
    pytest.importorskip("pycocotools")
    torch.set_num_threads(1)
    root = scenes.coco_set(tmp_path / "data", train=16, test=12)
    file = root / "annotations/instances_val2017.json"
    # a large crowd: detections inside of it are excused
    changed(file, lambda c: c["annotations"].append(
        {"id": 999, "image_id": 1000, "category_id": 3, "bbox": [0, 0, 40, 44], "area": 1760, "iscrowd": 1}
    ))  # fmt: skip
    settings = [*SMALL, f"data.root={root}", "epochs=20", "milestones=[16]", "evaluate_every=20"]
    folder, (result,) = run.run("coco", [*settings, "score_threshold=0.01"], out=str(tmp_path / "a"))
    _, config = recipes.load(str(folder))
    task = DetectionTask(config, torch.device("cpu"))
    task.network.load_state_dict(checkpoint.load_weights(folder / "last.safetensors")[0])
    found, metrics = task.measure()
    ids = sorted(one["id"] for one in json.loads(file.read_text())["images"])
    for scores in ("softmax", "odds"):
        theirs = pycocotools_numbers(file, found[scores], ids, sorted(scenes.CATEGORIES))
        ours = [result.last[f"{name} {scores}"] for name in ("AP", "AP50", "AP75")]
        assert 5 < theirs[0] < 95
        assert ours == pytest.approx(theirs, abs=1e-7)
    assert task.headline == "AP softmax"
    assert set(metrics["softmax"].summary("x")) == {"AP x", "AP50 x", "AP75 x"}
    assert "COCO&#x27;s numbers" in (folder / "report.html").read_text()


def test_a_large_file_is_read_in_time(tmp_path):
    """100,000 objects with outlines in seconds: of COCO's 860,000, and half a gigabyte, a minute at most."""
    outline = [[round(0.37 * k, 2) for k in range(40)]]
    images = [{"id": k, "file_name": f"{k}.jpg", "width": 640, "height": 480} for k in range(14_000)]
    objects = [
        {"image_id": k // 8, "category_id": 3, "bbox": [1.5, 2, 3, 4], "iscrowd": 0, "segmentation": outline}
        for k in range(100_000)
    ]
    (tmp_path / "annotations").mkdir()
    path = tmp_path / "annotations" / "instances_train.json"
    whole = {"images": images, "annotations": objects, "categories": [{"id": 3, "name": "a"}]}
    path.write_text(json.dumps(whole))
    began = time.process_time()
    split = coco.read_split(tmp_path, "train")
    assert len(split.rows) == 14_000 and split.classes == {3: "a"}
    assert time.process_time() - began < 7
