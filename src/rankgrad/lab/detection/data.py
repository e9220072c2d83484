"""The data sets of detection, by their names in the settings."""

from __future__ import annotations

from pathlib import Path

from rankgrad.lab.detection import coco, voc
from rankgrad.lab.detection.config import Data
from rankgrad.lab.detection.scenes import Row, SceneSplits, scenes_of
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.folders import check_counts, find, root_of
from rankgrad.lab.vision.images import listed

READERS = {
    "voc07": "Pascal VOC 2007, trainval -> test: DIR/VOCdevkit/VOC2007",
    "voc0712": "Pascal VOC 2007 + 2012 trainval -> 2007 test: DIR/VOCdevkit/VOC2007 and VOC2012",
    "voc": "your own images and boxes in the same layout: DIR/{Annotations,ImageSets/Main,JPEGImages}",
    "coco": "COCO, or your own images and boxes as COCO JSON: DIR/annotations/instances_{train,val}*.json, or "
    "DIR/{train,val}*/_annotations.coco.json",
}


def check(config: Data) -> None:
    """Whether the folder has its layout, before weights are loaded for it and annotations read."""
    root = root_of(config)
    if config.name == "coco":
        for part in (config.train, config.test):
            coco.find_split(root, part)
    else:
        _voc_lists(config, root, train=True)


def read(config: Data, classes: tuple[str, ...] | None = None) -> SceneSplits:
    """The data set of these settings; for the ``classes`` of a checkpoint its test images alone."""
    root = root_of(config)
    raw, found = (_coco if config.name == "coco" else _voc)(config, root, train=classes is None)
    classes = classes or found
    if not classes:
        raise UserError(f"--data: no objects in the annotations of {root}")
    if config.test_limit:
        raw["test"] = raw["test"][: config.test_limit]
    faults: list[str] = []
    made = {part: scenes_of(rows, classes, faults) for part, rows in raw.items()}
    if faults and config.broken == "refuse":
        total = sum(map(len, raw.values()))
        raise UserError(f"--data: {listed(faults, total, 'annotations')}. data.broken=skip leaves them out.")
    skipped = f"; {listed(faults, sum(map(len, raw.values())), 'annotations')}" if faults else ""
    for part, scenes in made.items():
        if not len(scenes):
            raise UserError(f"--data: no images to {part} on in {root}{skipped}")
        if not any(bool((~one.difficult).any()) for one in scenes.objects):
            mark = "iscrowd" if config.name == "coco" else "difficult"
            raise UserError(f"--data: no objects to {part} on in {root} (`{mark}` ones do not count){skipped}")
    return SceneSplits(made.get("train"), made["test"], classes, tuple(faults))


def _voc_lists(config: Data, root: Path, *, train: bool) -> dict[str, list[tuple[Path, str]]]:
    """Where the images of each part are listed: folders in Pascal VOC's layout, and names of lists there."""
    if config.name == "voc":
        base = find(root, "ImageSets/Main").parent.parent
        return {"train": [(base, config.train)], "test": [(base, config.test)]}
    years = ("2007", "2012") if config.name == "voc0712" and train else ("2007",)
    bases = {y: find(root, f"VOCdevkit/VOC{y}", f"VOC{y}") for y in years}
    return {"train": [(bases[y], "trainval") for y in years], "test": [(bases["2007"], "test")]}


def _voc(config: Data, root: Path, *, train: bool) -> tuple[dict[str, list[Row]], tuple[str, ...]]:
    """The rows of each part, and the classes."""
    lists = _voc_lists(config, root, train=train)
    raw = {
        part: [row for base, name in lists[part] for row in voc.read_list(base, name, config.workers)]
        for part in (("train", "test") if train else ("test",))
    }
    if config.name == "voc":
        annotations = [one for rows in raw.values() for *_, one in rows if not isinstance(one, str)]
        return raw, tuple(sorted({kind for one in annotations for kind, _, _ in one.objects}))
    official = {"train": 5011 if config.name == "voc07" else 16551, "test": 4952}
    names = {"train": "training images", "test": "test images"}
    check_counts(config, {names[part]: (len(rows), official[part]) for part, rows in raw.items()})
    return raw, voc.CLASSES


def _coco(config: Data, root: Path, *, train: bool) -> tuple[dict[str, list[Row]], tuple[str, ...]]:
    """The same; the classes in the order of the categories' ids, those of the training images first."""
    names = {"train": config.train, "test": config.test}
    splits = {part: coco.read_split(root, names[part]) for part in (("train", "test") if train else ("test",))}
    classes = dict.fromkeys(name for split in splits.values() for name in split.classes.values())
    return {part: split.rows for part, split in splits.items()}, tuple(classes)
