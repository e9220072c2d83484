"""The three benchmarks of the paper, read from their official lists and checked against their official sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.splits import Items, RetrievalSplits, numbered
from rankgrad.lab.training.config import shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import read_lines
from rankgrad.lab.vision.folders import check_counts, find, inside, root_of


def _lines(
    path: Path, columns: int, skip: int = 0, *, numbers: Sequence[int] = (), named: int | None = None
) -> list[list[str]]:
    """The fields of a list file, some of them ``numbers``, one the name of a file; other lines are refused."""
    if not path.is_file():
        raise UserError(f"--data: expected the list {path}, found no such file")
    rows = []
    for number, line in enumerate(read_lines(path, argument="--data")[skip:], skip + 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != columns:
            raise UserError(f"--data: {path} line {number}: expected {columns} fields, received {shown(line)}")
        for column in numbers:
            if not fields[column].isdecimal() or len(fields[column]) > 9:
                raise UserError(
                    f"--data: {path} line {number}: expected a number, received {shown(fields[column])}"
                )
        if named is not None:
            inside(fields[named], f"{path} line {number}")
        rows.append(fields)
    return rows


def _images(root: Path, names: Sequence[str], classes: Sequence[str], supers: Sequence[str] | None) -> Items:
    # Classes of equal width sort as numbers do ("00001" < "00002"); elsewhere any fixed order serves.
    labels, class_names = numbered(classes)
    super_labels = None if supers is None else numbered(supers)[0]
    return Items([root / name for name in names], labels, super_labels, names, class_names)


def _check_sizes(config: Data, train: Items, test: Items, official: tuple[int, int, int, int]) -> None:
    names = ("training images", "training classes", "test images", "test classes")
    found = (len(train), train.classes(), len(test), test.classes())
    check_counts(config, dict(zip(names, zip(found, official, strict=True), strict=True)))


def read_cub(config: Data) -> RetrievalSplits:
    """CUB-200-2011: the first 100 classes train, the last 100 test."""
    root = root_of(config)
    root = find(root, "CUB_200_2011/images.txt", "images.txt").parent
    names = dict(_lines(root / "images.txt", 2, numbers=[0], named=1))
    classes = dict(_lines(root / "image_class_labels.txt", 2, numbers=[0, 1]))
    if names.keys() != classes.keys():
        raise UserError(f"--data: {root}/images.txt and image_class_labels.txt list different images")
    order = sorted(names, key=int)
    labels = [f"{int(classes[i]):05d}" for i in order]
    everything = _images(root / "images", [names[i] for i in order], labels, None)
    folders = {label: Path(names[i]).parent.name for i, label in zip(order, labels, strict=True)}
    everything = replace(everything, class_names=[folders[label] for label in everything.class_names])
    training = torch.tensor([int(label) <= 100 for label in labels])
    train, test = (everything.take(rows.nonzero().flatten()) for rows in (training, ~training))
    _check_sizes(config, train, test, (5864, 100, 5924, 100))
    return RetrievalSplits(train, test)


def read_sop(config: Data) -> RetrievalSplits:
    """Stanford Online Products, with its 12 super-labels."""
    root = find(root_of(config), "Stanford_Online_Products/Ebay_train.txt", "Ebay_train.txt").parent
    train, test = (
        _images(root, [r[3] for r in rows], [r[1].zfill(8) for r in rows], [r[2].zfill(4) for r in rows])
        for rows in (
            _lines(root / f"Ebay_{name}.txt", 4, skip=1, numbers=[1, 2], named=3) for name in ("train", "test")
        )
    )
    _check_sizes(config, train, test, (59551, 11318, 60502, 11316))
    return RetrievalSplits(train, test)


def read_inshop(config: Data) -> RetrievalSplits:
    """In-shop Clothes: queries search a gallery; the super-label is gender and category, from the path."""
    root = root_of(config)
    listing = find(root, "Eval/list_eval_partition.txt", "list_eval_partition.txt")
    images = next((root / place for place in ("Img", ".") if (root / place / "img").is_dir()), root / "Img")
    rows = _lines(listing, 3, skip=2, named=0)
    unknown = sorted({row[2] for row in rows} - {"train", "query", "gallery"})
    if unknown:
        raise UserError(f"--data: {listing}: expected train, query or gallery, received {', '.join(unknown)}")
    items, class_names = numbered([row[1] for row in rows])  # query and gallery share their classes
    supers, _ = numbered(["/".join(Path(row[0]).parts[1:3]) for row in rows])
    names = [row[0] for row in rows]
    everything = Items([images / name for name in names], items, supers, names, class_names)
    train, query, gallery = (
        everything.take(torch.tensor([row[2] == part for row in rows]).nonzero().flatten())
        for part in ("train", "query", "gallery")
    )
    check_counts(
        config,
        {
            "training images": (len(train), 25882),
            "training classes": (train.classes(), 3997),
            "queries": (len(query), 14218),
            "gallery images": (len(gallery), 12612),
            "test classes": (gallery.classes(), 3985),
        },
    )
    return RetrievalSplits(train, query, gallery)
