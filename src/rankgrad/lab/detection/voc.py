"""Pascal VOC and folders like it: images with boxes, read from the official devkit's layout.

    DIR/VOCdevkit/VOC2007/{Annotations/*.xml, ImageSets/Main/*.txt, JPEGImages/*.jpg}

The devkit counts pixels from 1 and includes the last one: a box covers the pixels xmin ... xmax. Here a box is its
edges, (xmin - 1, ymin - 1, xmax, ymax), so that its width is the devkit's xmax - xmin + 1.
"""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from rankgrad.lab.detection.scenes import LARGEST, NARROWEST, Annotation, Row, size_of
from rankgrad.lab.training.config import nearest, shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import read_lines
from rankgrad.lab.vision.folders import inside
from rankgrad.lab.vision.images import MOST_WORKERS, SUFFIXES

#: The encoding that the first line of an XML file names.
_ENCODING = re.compile(rb"""^\s*<\?xml[^>]*\sencoding=["']([\w.:-]+)["']""")
#: Behind a name in VOC's lists of one class: whether the image shows it.
_SHOWS_IT = re.compile(r"\s+(-1|0|1)$")

#: No annotation has more bytes.
_BYTES = 4_000_000

#: The classes of Pascal VOC.
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


def parse(content: bytes) -> ElementTree.Element:
    """XML of an annotation. A document type is refused: without one no entity can be declared or fetched."""
    try:
        text = content.decode("utf-8-sig")  # whatever the first line says: some say what the text once was
    except UnicodeDecodeError:
        declared = _ENCODING.match(content)
        if declared is None:
            raise
        text = content.decode(declared.group(1).decode())
    if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
        raise ValueError("a document type or entity declaration is not allowed")
    return ElementTree.fromstring(text)


def _number(box: ElementTree.Element, name: str) -> float:
    text = box.findtext(name)
    if text is None:
        raise ValueError(f"a box without {name}")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST:
        raise ValueError(f"{name}: expected a number of pixels up to {LARGEST:,}, received {shown(text)}")
    return number


def read_annotation(path: Path, image: Path) -> Annotation:
    """What an annotation file says of an image; a ValueError says what is wrong with it."""
    if not path.is_file():
        raise ValueError("missing")
    if path.stat().st_size > _BYTES:
        raise ValueError(f"{path.stat().st_size:,} bytes, expected at most {_BYTES:,}")
    try:
        tree = parse(path.read_bytes())
    except (ElementTree.ParseError, UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"broken ({error})") from None
    said = tree.find("size")
    size = [_number(said, n) if said is not None and said.findtext(n) else 0.0 for n in ("width", "height")]
    # some tools write no size, or 0
    width, height = size if min(size) > 0 else size_of(image)
    out = []
    for item in tree.iter("object"):
        name, box = (item.findtext("name") or "").strip(), item.find("bndbox")
        if not name or box is None:
            raise ValueError("an object without name or bndbox")
        written = [_number(box, side) for side in ("xmin", "ymin", "xmax", "ymax")]
        left, top = max(written[0] - 1, 0.0), max(written[1] - 1, 0.0)
        right, bottom = min(written[2], width), min(written[3], height)
        narrowest = [NARROWEST * side if math.isfinite(side) else 0.0 for side in (width, height)]
        if not (right - left > narrowest[0] and bottom - top > narrowest[1]):
            edges = ", ".join(f"{side:g}" for side in written)
            raise ValueError(f"a box of {name} with nothing of the {width:g} x {height:g} pixels in it ({edges})")
        out.append((name, [left, top, right, bottom], (item.findtext("difficult") or "0").strip() == "1"))
    return Annotation(out, (width, height))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        known = [p.stem for p in path.parent.glob("*.txt")] if path.parent.is_dir() else []
        hint = nearest(path.stem, known) if known else ""
        raise UserError(f"--data: expected the list {path}, found no such file{hint}")
    lines = enumerate(read_lines(path, argument="--data"), 1)
    return [inside(line.strip(), f"{path} line {number}") for number, line in lines if line.strip()]


def _image(folder: Path, name: str) -> Path:
    for suffix in SUFFIXES:
        for written in (suffix, suffix.upper()):
            if (folder / f"{name}{written}").is_file():
                return folder / f"{name}{written}"
    return folder / f"{name}.jpg"


def read_list(base: Path, part: str, workers: int) -> list[Row]:
    """The images of a list in ``ImageSets/Main``."""
    lines = _lines(base / "ImageSets" / "Main" / f"{part}.txt")

    label = f"{base.name}/" if base.name.startswith("VOC20") else ""

    def read(line: str) -> Row:
        whole = (base / "Annotations" / f"{line}.xml").is_file()
        name = line if whole else _SHOWS_IT.sub("", line)  # (a name may end like this itself)
        image = _image(base / "JPEGImages", name)
        try:
            return image, label + name, read_annotation(base / "Annotations" / f"{name}.xml", image)
        except ValueError as error:
            return image, label + name, f"{name}.xml: {error}"

    with ThreadPoolExecutor(min(workers, MOST_WORKERS)) as pool:
        return list(pool.map(read, lines))
