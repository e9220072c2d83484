"""Pascal VOC and folders like it: pictures with boxes, read from the official devkit's layout.

    DIR/VOCdevkit/VOC2007/{Annotations/*.xml, ImageSets/Main/*.txt, JPEGImages/*.jpg}

The devkit counts pixels from 1 and includes the last one: a box covers the pixels xmin ... xmax. Here a box is its
edges, (xmin - 1, ymin - 1, xmax, ymax), so that its width is the devkit's xmax - xmin + 1.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor

from rankgrad.detection.config import Data
from rankgrad.training.config import nearest
from rankgrad.training.errors import UserError
from rankgrad.vision.folders import check_counts, find, root_of
from rankgrad.vision.pictures import SUFFIXES, listed

#: The classes of Pascal VOC.
VOC = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

READERS = {
    "voc07": "Pascal VOC 2007, trainval -> test: DIR/VOCdevkit/VOC2007",
    "voc0712": "Pascal VOC 2007 + 2012 trainval -> 2007 test: DIR/VOCdevkit/VOC2007 and VOC2012",
    "voc": "your own pictures and boxes in the same layout: DIR/{Annotations,ImageSets/Main,JPEGImages}",
}


@dataclass(frozen=True)
class Objects:
    """What a picture shows.

    Args:
        boxes: ``[G, 4]`` float32, left, top, right, bottom in pixels.
        labels: ``[G]`` int64, from 1.
        difficult: ``[G]`` bool: left out of training, neither right nor wrong in evaluation.
    """

    boxes: Tensor
    labels: Tensor
    difficult: Tensor


@dataclass(frozen=True)
class Scenes:
    """Pictures of one split with their objects, and the (width, height) that an annotation says, inf where not."""

    sources: list[Path]
    names: list[str]
    objects: list[Objects]
    sizes: list[tuple[float, float]]

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: Tensor) -> Scenes:
        """Some of the pictures."""
        kept = rows.tolist()
        return Scenes(
            [self.sources[i] for i in kept],
            [self.names[i] for i in kept],
            [self.objects[i] for i in kept],
            [self.sizes[i] for i in kept],
        )


@dataclass(frozen=True)
class Splits:
    """Pictures to train and to test on; label c is ``classes[c - 1]``."""

    train: Scenes
    test: Scenes
    classes: tuple[str, ...]
    faults: tuple[str, ...] = ()


def parse(text: str) -> ElementTree.Element:
    """XML of an annotation. A document type is refused: without one no entity can be declared or fetched."""
    if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
        raise ValueError("a document type or entity declaration is not allowed")
    return ElementTree.fromstring(text)


def _number(box: ElementTree.Element, name: str) -> float:
    text = box.findtext(name)
    if text is None:
        raise ValueError(f"a box without {name}")
    return float(text)


class Annotation(NamedTuple):
    """What a file says: (class, box as edges, difficult) of each object, and the picture's (width, height)."""

    objects: list[tuple[str, list[float], bool]]
    size: tuple[float, float]


def read_annotation(path: Path) -> Annotation:
    """What an annotation file says; ValueError tells what is wrong with it."""
    if not path.is_file():
        raise ValueError("missing")
    try:
        tree = parse(path.read_bytes().decode("utf-8"))
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"broken ({error})") from None
    size = tree.find("size")
    # (annotations without a size, or with one of 0, are about)
    width, height = (
        float((size.findtext(n) if size is not None else "") or "inf") or torch.inf for n in ("width", "height")
    )
    out = []
    for item in tree.iter("object"):
        name, box = (item.findtext("name") or "").strip(), item.find("bndbox")
        if not name or box is None:
            raise ValueError("an object without name or bndbox")
        left, top = max(_number(box, "xmin") - 1, 0.0), max(_number(box, "ymin") - 1, 0.0)
        right, bottom = min(_number(box, "xmax"), width), min(_number(box, "ymax"), height)
        if not (right > left and bottom > top):
            raise ValueError(f"an empty box of {name}")
        out.append((name, [left, top, right, bottom], (item.findtext("difficult") or "0").strip() == "1"))
    return Annotation(out, (width, height))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        known = [p.stem for p in path.parent.glob("*.txt")] if path.parent.is_dir() else []
        hint = nearest(path.stem, known) if known else ""
        raise UserError(f"--data: expected the list {path}, found no such file{hint}")
    return [line.split()[0] for line in path.read_text(encoding="utf-8-sig").splitlines() if line.split()]


def _picture(folder: Path, name: str) -> Path:
    for suffix in SUFFIXES:
        for written in (suffix, suffix.upper()):
            if (folder / f"{name}{written}").is_file():
                return folder / f"{name}{written}"
    return folder / f"{name}.jpg"


def _raw(base: Path, part: str, workers: int) -> list[tuple[Path, str, Annotation | str]]:
    """Picture, name, and annotation (or what is wrong with it) of a list."""
    names = _lines(base / "ImageSets" / "Main" / f"{part}.txt")

    def read(name: str) -> Annotation | str:
        try:
            return read_annotation(base / "Annotations" / f"{name}.xml")
        except ValueError as error:
            return f"{name}.xml: {error}"

    with ThreadPoolExecutor(workers) as pool:
        annotations = list(pool.map(read, names))
    label = f"{base.name}/" if base.name.startswith("VOC20") else ""
    return [(_picture(base / "JPEGImages", n), label + n, a) for n, a in zip(names, annotations, strict=True)]


def read(config: Data) -> Splits:
    """The data set of these settings."""
    root = root_of(config)
    if config.name == "voc":
        base = find(root, "ImageSets/Main").parent.parent
        train, test = [(base, config.train)], [(base, config.test)]
    else:
        years = ("2007",) if config.name == "voc07" else ("2007", "2012")
        bases = {y: find(root, f"VOCdevkit/VOC{y}", f"VOC{y}") for y in years}
        train, test = [(bases[y], "trainval") for y in years], [(bases["2007"], "test")]
    raw = {
        "train": [row for base, part in train for row in _raw(base, part, config.workers)],
        "test": [row for base, part in test for row in _raw(base, part, config.workers)],
    }
    if config.name != "voc":
        official = {"training pictures": 5011 if config.name == "voc07" else 16551, "test pictures": 4952}
        found = {"training pictures": len(raw["train"]), "test pictures": len(raw["test"])}
        check_counts(config, found, official)
    if config.test_limit:
        raw["test"] = raw["test"][: config.test_limit]
    everything = [row for rows in raw.values() for row in rows]
    classes: tuple[str, ...] = VOC
    if config.name == "voc":
        classes = tuple(
            sorted({kind for *_, one in everything if not isinstance(one, str) for kind, _, _ in one.objects})
        )
        if not classes:
            raise UserError(f"--data: no objects in the annotations of {root}")
    number = {name: i for i, name in enumerate(classes, 1)}
    faults: list[str] = []
    made = {part: _scenes(rows, number, faults) for part, rows in raw.items()}
    if faults and config.broken == "refuse":
        total = sum(map(len, raw.values()))
        raise UserError(f"--data: {listed(faults, total, 'annotations')}. data.broken=skip leaves them out.")
    if not len(made["train"]) or not len(made["test"]):
        raise UserError(f"--data: no pictures to {'train' if not len(made['train']) else 'test'} on in {root}")
    if not any(bool((~one.difficult).any()) for one in made["test"].objects):
        raise UserError(f"--data: no objects to test on in {root} (`difficult` ones do not count)")
    return Splits(made["train"], made["test"], classes, tuple(faults))


def _scenes(
    rows: list[tuple[Path, str, Annotation | str]],
    number: dict[str, int],
    faults: list[str],
) -> Scenes:
    scenes = Scenes([], [], [], [])
    for source, name, annotation in rows:
        if isinstance(annotation, str):
            faults.append(annotation)
            continue
        objects = annotation.objects
        unknown = sorted({kind for kind, _, _ in objects if kind not in number})
        if unknown:
            faults.append(f"{name}.xml: unknown class {unknown[0]!r}{nearest(unknown[0], number)}")
            continue
        scenes.sources.append(source)
        scenes.names.append(name)
        scenes.sizes.append(annotation.size)
        scenes.objects.append(
            Objects(
                torch.tensor([box for _, box, _ in objects], dtype=torch.float32).reshape(-1, 4),
                torch.tensor([number[kind] for kind, _, _ in objects], dtype=torch.int64),
                torch.tensor([hard for *_, hard in objects], dtype=torch.bool),
            )
        )
    return scenes
