"""Images with boxes in COCO's JSON, laid out as COCO lays them out or as annotation tools export them.

    DIR/annotations/instances_{train,val}*.json, images in DIR/{train,val}* or DIR/images/{train,val}*
    DIR/{train,val}*/_annotations.coco.json, images beside it

A box is (left, top, width, height) in pixels, its edges between them. What ``iscrowd`` marks is ignored, as Pascal
VOC's ``difficult`` is. A box without an area stays in the evaluation, where it counts as an object that is never
found (as in pycocotools), and is left out of training.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import FailFast, Field
from typing_extensions import NotRequired, TypedDict

from rankgrad.lab.detection.scenes import LARGEST, Annotation, Row, size_of
from rankgrad.lab.training import reading
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.run_files import checked_json
from rankgrad.lab.vision.folders import inside

_EXPORTED = "_annotations.coco.json"

Pixels = Annotated[float, Field(allow_inf_nan=False)]
Side = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Id = int | str


class _Image(TypedDict):
    id: Id
    file_name: str
    width: NotRequired[Side]
    height: NotRequired[Side]


class _Object(TypedDict):
    image_id: Id
    category_id: int
    bbox: tuple[Pixels, Pixels, Side, Side]
    iscrowd: NotRequired[bool]


class _Category(TypedDict):
    id: int
    name: str


class AnnotationFile(TypedDict):
    """What is read of a file; all else in it (licenses, segmentations) is passed over."""

    images: Annotated[list[_Image], FailFast()]
    annotations: Annotated[list[_Object], FailFast()]
    categories: Annotated[list[_Category], FailFast()]


class SplitFiles(NamedTuple):
    """A split: the file with its annotations, and the folders its images may be in."""

    file: Path
    folders: tuple[Path, ...]


class CocoSplit(NamedTuple):
    """Rows of a split, in the order of the images' ids, and the categories that have objects, by their ids."""

    rows: list[Row]
    classes: dict[int, str]


def find_split(root: Path, name: str) -> SplitFiles:
    """The split whose name is, or begins with, ``name``: ``val`` finds val2017 and valid."""
    files = {path.stem.removeprefix("instances_"): path for path in root.glob("annotations/instances_*.json")}
    files |= {path.parent.name: path for path in root.glob(f"*/{_EXPORTED}")}
    if not files:
        raise UserError(f"--data: expected annotations/instances_*.json or */{_EXPORTED} in {root}, found none")
    fitting = [name] if name in files else sorted(part for part in files if part.startswith(name))
    if not fitting:
        raise UserError(f"--data: no annotations called {name!r} in {root}{nearest(name, files)}")
    if len(fitting) > 1:
        raise UserError(f"--data: several annotations called {name!r} in {root}; say which: {', '.join(fitting)}")
    (part,) = fitting
    if files[part].name == _EXPORTED:
        return SplitFiles(files[part], (files[part].parent,))
    return SplitFiles(files[part], (root / part, root / "images" / part, root / "images", root))


def read_split(root: Path, name: str) -> CocoSplit:
    """Images and objects of a split; UserError names a file that cannot be used and the place in it."""
    part = find_split(root, name)
    content = reading.read(part.file, argument="--data").removeprefix(codecs.BOM_UTF8)
    read: AnnotationFile = checked_json(content, AnnotationFile, f"--data: {part.file}")
    categories = {one["id"]: one["name"] for one in read["categories"]}
    _no_doubles(part.file, "categories", [one["id"] for one in read["categories"]])
    _no_doubles(part.file, "categories", list(categories.values()))
    for number, listed in enumerate(read["images"]):
        inside(listed["file_name"], f"{part.file}: images.{number}")
    _no_doubles(part.file, "images", [one["id"] for one in read["images"]])
    objects: dict[Id, list[tuple[int, _Object]]] = defaultdict(list)
    for number, one in enumerate(read["annotations"]):
        objects[one["image_id"]].append((number, one))
    images = sorted(read["images"], key=lambda one: (isinstance(one["id"], str), one["id"]))
    if lost := objects.keys() - {one["id"] for one in images}:
        number = min(objects[image][0][0] for image in lost)
        image = read["annotations"][number]["image_id"]
        raise UserError(f"--data: {part.file}: annotations.{number}: there is no image {image!r}")
    folder = _folder(part, images)
    rows = [_row(folder, image, objects.get(image["id"], []), categories) for image in images]
    used = {one["category_id"] for one in read["annotations"]}
    return CocoSplit(rows, {number: categories[number] for number in sorted(used & categories.keys())})


def _no_doubles(file: Path, kind: str, values: list[Id] | list[int] | list[str]) -> None:
    seen: set[Id] = set()
    for value in values:
        if value in seen:
            raise UserError(f"--data: {file}: {kind}: expected each once, received {value!r} twice")
        seen.add(value)


def _folder(part: SplitFiles, images: list[_Image]) -> Path:
    """Where the images are: the folder that has one of the first of them; the usual one if none has."""
    for image in images[:10]:  # some may be missing
        for folder in part.folders:
            if (folder / image["file_name"]).is_file():
                return folder
    return part.folders[0]


def _row(folder: Path, image: _Image, objects: list[tuple[int, _Object]], categories: dict[int, str]) -> Row:
    source, name = folder / image["file_name"], image["file_name"]
    size = image.get("width", 0.0), image.get("height", 0.0)
    width, height = size if min(size) > 0 else size_of(source)
    out = []
    for number, one in objects:
        left, top, wide, high = one["bbox"]
        kind = categories.get(one["category_id"])
        if kind is None:
            return source, name, f"{name}: annotations.{number}: there is no category {one['category_id']}"
        if left >= width or top >= height or left + wide < 0 or top + high < 0:
            fault = f"a box of {kind} with nothing of the {width:g} x {height:g} pixels in it"
            return source, name, f"{name}: annotations.{number}: {fault} ({left:g}, {top:g}, {wide:g}, {high:g})"
        out.append((kind, [left, top, left + wide, top + high], one.get("iscrowd", False)))
    return source, name, Annotation(out, (width, height))
