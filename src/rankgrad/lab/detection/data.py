"""Pascal VOC and folders like it: images with boxes, read from the official devkit's layout.

    DIR/VOCdevkit/VOC2007/{Annotations/*.xml, ImageSets/Main/*.txt, JPEGImages/*.jpg}

The devkit counts pixels from 1 and includes the last one: a box covers the pixels xmin ... xmax. Here a box is its
edges, (xmin - 1, ymin - 1, xmax, ymax), so that its width is the devkit's xmax - xmin + 1.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor

from rankgrad.lab.detection.config import Data
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.folders import check_counts, find, root_of
from rankgrad.lab.vision.images import SUFFIXES, listed

#: The encoding that the first line of an XML file names.
_ENCODING = re.compile(rb"""^\s*<\?xml[^>]*\sencoding=["']([\w.:-]+)["']""")
#: Behind a name in VOC's lists of one class: whether the image shows it.
_SHOWS_IT = re.compile(r"\s+(-1|0|1)$")

#: The classes of Pascal VOC.
VOC = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

READERS = {
    "voc07": "Pascal VOC 2007, trainval -> test: DIR/VOCdevkit/VOC2007",
    "voc0712": "Pascal VOC 2007 + 2012 trainval -> 2007 test: DIR/VOCdevkit/VOC2007 and VOC2012",
    "voc": "your own images and boxes in the same layout: DIR/{Annotations,ImageSets/Main,JPEGImages}",
}


@dataclass(frozen=True)
class Objects:
    """What an image shows.

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
    """Images of one split with their objects, and the (width, height) that an annotation says.

    Where it says none it is the image's own, and inf where that cannot be read.
    """

    sources: list[Path]
    names: list[str]
    objects: list[Objects]
    sizes: list[tuple[float, float]]

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: Tensor) -> Scenes:
        """Some of the images."""
        kept = rows.tolist()
        return Scenes(
            [self.sources[i] for i in kept],
            [self.names[i] for i in kept],
            [self.objects[i] for i in kept],
            [self.sizes[i] for i in kept],
        )


@dataclass(frozen=True)
class SceneSplits:
    """Images to train (if wanted) and to test on; label c is ``classes[c - 1]``."""

    train: Scenes | None
    test: Scenes
    classes: tuple[str, ...]
    faults: tuple[str, ...] = ()


def parse(content: bytes) -> ElementTree.Element:
    """XML of an annotation. A document type is refused: without one no entity can be declared or fetched."""
    try:
        text = content.decode("utf-8-sig")  # whatever the first line says: some say what the text once was
    except UnicodeDecodeError:
        told = _ENCODING.match(content)
        if told is None:
            raise
        text = content.decode(told.group(1).decode())
    if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
        raise ValueError("a document type or entity declaration is not allowed")
    return ElementTree.fromstring(text)


def _number(box: ElementTree.Element, name: str) -> float:
    text = box.findtext(name)
    if text is None:
        raise ValueError(f"a box without {name}")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, received {text!r}") from None


class Annotation(NamedTuple):
    """What a file says: (class, box as edges, difficult) of each object, and the image's (width, height)."""

    objects: list[tuple[str, list[float], bool]]
    size: tuple[float, float]


def read_annotation(path: Path, image: Path) -> Annotation:
    """What an annotation file says of an image; ValueError tells what is wrong with it."""
    if not path.is_file():
        raise ValueError("missing")
    try:
        tree = parse(path.read_bytes())
    except (ElementTree.ParseError, UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"broken ({error})") from None
    said = tree.find("size")
    size = [_number(said, n) if said is not None and said.findtext(n) else 0.0 for n in ("width", "height")]
    # annotations without a size, or with one of 0, are about
    width, height = size if min(size) > 0 else _size_of(image)
    out = []
    for item in tree.iter("object"):
        name, box = (item.findtext("name") or "").strip(), item.find("bndbox")
        if not name or box is None:
            raise ValueError("an object without name or bndbox")
        written = [_number(box, side) for side in ("xmin", "ymin", "xmax", "ymax")]
        left, top = max(written[0] - 1, 0.0), max(written[1] - 1, 0.0)
        right, bottom = min(written[2], width), min(written[3], height)
        if not (right > left and bottom > top):
            edges = ", ".join(f"{side:g}" for side in written)
            raise ValueError(f"a box of {name} with nothing of the {width:g} x {height:g} pixels in it ({edges})")
        out.append((name, [left, top, right, bottom], (item.findtext("difficult") or "0").strip() == "1"))
    return Annotation(out, (width, height))


def _size_of(image: Path) -> tuple[float, float]:
    """Width and height of an image from its head; infinite where it cannot be read (which is told later)."""
    from PIL import Image

    try:
        with Image.open(image) as file:
            return float(file.width), float(file.height)
    except Exception:  # Pillow raises many kinds
        return torch.inf, torch.inf


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        known = [p.stem for p in path.parent.glob("*.txt")] if path.parent.is_dir() else []
        hint = nearest(path.stem, known) if known else ""
        raise UserError(f"--data: expected the list {path}, found no such file{hint}")
    return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]


def _image(folder: Path, name: str) -> Path:
    for suffix in SUFFIXES:
        for written in (suffix, suffix.upper()):
            if (folder / f"{name}{written}").is_file():
                return folder / f"{name}{written}"
    return folder / f"{name}.jpg"


def _raw(base: Path, part: str, workers: int) -> list[tuple[Path, str, Annotation | str]]:
    """Image, name, and annotation (or what is wrong with it) of a list."""
    lines = _lines(base / "ImageSets" / "Main" / f"{part}.txt")

    label = f"{base.name}/" if base.name.startswith("VOC20") else ""

    def read(line: str) -> tuple[Path, str, Annotation | str]:
        whole = (base / "Annotations" / f"{line}.xml").is_file()
        name = line if whole else _SHOWS_IT.sub("", line)  # (a name may end like this itself)
        image = _image(base / "JPEGImages", name)
        try:
            return image, label + name, read_annotation(base / "Annotations" / f"{name}.xml", image)
        except ValueError as error:
            return image, label + name, f"{name}.xml: {error}"

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(read, lines))


def read(config: Data, classes: tuple[str, ...] | None = None) -> SceneSplits:
    """The data set of these settings; for the ``classes`` of a checkpoint its test images alone."""
    root = root_of(config)
    if config.name == "voc":
        base = find(root, "ImageSets/Main").parent.parent
        train, test = [(base, config.train)], [(base, config.test)]
    else:
        years = ("2007",) if config.name == "voc07" or classes else ("2007", "2012")
        bases = {y: find(root, f"VOCdevkit/VOC{y}", f"VOC{y}") for y in years}
        train, test = [(bases[y], "trainval") for y in years], [(bases["2007"], "test")]
    parts = {"test": test} if classes else {"train": train, "test": test}
    raw = {
        name: [row for base, part in lists for row in _raw(base, part, config.workers)]
        for name, lists in parts.items()
    }
    if config.name != "voc":
        official = {"train": 5011 if config.name == "voc07" else 16551, "test": 4952}
        called = {"train": "training images", "test": "test images"}
        found = {called[part]: len(rows) for part, rows in raw.items()}
        check_counts(config, found, {called[part]: official[part] for part in raw})
    classes = classes or (VOC if config.name != "voc" else _classes_in(raw))
    if not classes:
        raise UserError(f"--data: no objects in the annotations of {root}")
    if config.test_limit:
        raw["test"] = raw["test"][: config.test_limit]
    number = {name: i for i, name in enumerate(classes, 1)}
    faults: list[str] = []
    made = {part: _scenes(rows, number, faults) for part, rows in raw.items()}
    if faults and config.broken == "refuse":
        total = sum(map(len, raw.values()))
        raise UserError(f"--data: {listed(faults, total, 'annotations')}. data.broken=skip leaves them out.")
    skipped = f"; {listed(faults, sum(map(len, raw.values())), 'annotations')}" if faults else ""
    for part, scenes in made.items():
        if not len(scenes):
            raise UserError(f"--data: no images to {part} on in {root}{skipped}")
        if not any(bool((~one.difficult).any()) for one in scenes.objects):
            raise UserError(f"--data: no objects to {part} on in {root} (`difficult` ones do not count){skipped}")
    return SceneSplits(made.get("train"), made["test"], classes, tuple(faults))


def _classes_in(raw: dict[str, list[tuple[Path, str, Annotation | str]]]) -> tuple[str, ...]:
    """The classes of all objects, in order of their names."""
    annotations = [one for rows in raw.values() for *_, one in rows if not isinstance(one, str)]
    return tuple(sorted({kind for one in annotations for kind, _, _ in one.objects}))


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
