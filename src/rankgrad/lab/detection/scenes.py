"""Images with their objects, whatever layout they were read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad.lab.training.config import nearest
from rankgrad.lab.vision import decoding

#: No image has a longer side, in pixels.
LARGEST = 1_000_000
#: Of an image's side: a narrower box may have no width left when float32 numbers mirror it.
NARROWEST = 2**-20


@dataclass(frozen=True)
class Objects:
    """The objects of an image.

    Args:
        boxes: ``[G, 4]`` float32, left, top, right, bottom in pixels.
        labels: ``[G]`` int64, from 1.
        difficult: ``[G]`` bool: left out of training, neither right nor wrong in evaluation (COCO: ``iscrowd``).
    """

    boxes: Tensor
    labels: Tensor
    difficult: Tensor


@dataclass(frozen=True)
class Scenes:
    """Images of one split with their objects, and the (width, height) that an annotation says.

    Where it says none it is the image's own, and inf where that cannot be read.
    """

    sources: list[Any]  # files, or images of Pillow's
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

    def resized(self, shapes: Tensor) -> Scenes:
        """With boxes in pixels of images of these shapes, ``[N, 2]`` (height, width)."""
        objects, sizes = [], []
        for one, (height, width), (wide, high) in zip(self.objects, shapes.tolist(), self.sizes, strict=True):
            across, down = width / wide, height / high
            same = (width, height) == (wide, high)
            scale = torch.tensor([across, down, across, down])
            objects.append(one if same else replace(one, boxes=one.boxes * scale))
            sizes.append((float(width), float(height)))
        return Scenes(self.sources, self.names, objects, sizes)


@dataclass(frozen=True)
class SceneSplits:
    """Images to train (if wanted) and to test on; label c is ``classes[c - 1]``."""

    train: Scenes | None
    test: Scenes
    classes: tuple[str, ...]
    faults: tuple[str, ...] = ()


class Annotation(NamedTuple):
    """What a file says: (class, box as edges, difficult) of each object, and the image's (width, height)."""

    objects: list[tuple[str, list[float], bool]]
    size: tuple[float, float]


#: Image, name, and annotation (or what is wrong with it).
Row = tuple[Path, str, Annotation | str]


def size_of(image: Path) -> tuple[float, float]:
    """Width and height of an image from its head; infinite where it cannot be read (reported later)."""
    try:
        width, height = decoding.size_of(image)
        return float(width), float(height)
    except Exception:  # Pillow raises many kinds
        return torch.inf, torch.inf


def scenes_of(rows: Iterable[Row], classes: tuple[str, ...], faults: list[str]) -> Scenes:
    """The rows that can be used; what is wrong with the others is added to ``faults``."""
    number = {name: i for i, name in enumerate(classes, 1)}
    scenes = Scenes([], [], [], [])
    for source, name, annotation in rows:
        if isinstance(annotation, str):
            faults.append(annotation)
            continue
        objects = annotation.objects
        unknown = sorted({kind for kind, _, _ in objects if kind not in number})
        if unknown:
            faults.append(f"{name}: unknown class {unknown[0]!r}{nearest(unknown[0], number)}")
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


def notes_on(train: Sequence[Objects], test: Sequence[Objects], classes: Sequence[str]) -> list[str]:
    """What a user should know of the objects of each image before training: counts, and classes that lack some."""
    seen = [[set(one.labels[~one.difficult].tolist()) for one in part] for part in (train, test)]
    images = [Counter(label for labels in part for label in labels) for part in seen]

    def of(part: Sequence[Objects], found: Counter[int]) -> str:
        many = sum(int((~one.difficult).sum()) for one in part)
        return f"{len(part):,} images with {many:,} objects of {len(found)} classes"

    notes = [f"trains on {of(train, images[0])}, tests on {of(test, images[1])}"]
    lacking = {
        "in the test annotations only, nothing to learn them from": [n for n in images[1] if not images[0][n]],
        "in one training image only": [n for n, many in images[0].items() if many == 1],
    }
    for what, labels in lacking.items():
        if labels:
            names = [classes[label - 1] for label in sorted(labels)]
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            notes.append(f"{len(names)} of {len(classes)} classes {what}: {shown}")
    return notes
