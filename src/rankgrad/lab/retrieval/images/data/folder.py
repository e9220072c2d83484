"""A user's own images: one folder per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.splits import FEW, Items, RetrievalSplits, few_classes, kept_apart, numbered
from rankgrad.lab.training.errors import UserError, printable
from rankgrad.lab.vision.folders import images_in, links_in, root_of, walk
from rankgrad.lab.vision.images import SUFFIXES

#: Names of parts of a data set: unlikely ones for classes.
VALIDATION = {"val", "valid", "validation"}
PARTS = {"train", "training", "test", "testing", *VALIDATION}

_SAMPLE = 32  # images that are looked at to see what kind they are


def read(config: Data) -> RetrievalSplits:
    """``root/<class>/.../<image>``; whole classes are kept apart for testing, chosen by a seed.

    If the folder has ``train`` and ``test``, and no other images but for validation, these are the split; the
    latter are not used. ``train`` and ``val`` alone are a split too. Of fewer than four classes none can be kept
    apart: every other image of each is for testing.
    """
    root = root_of(config)
    if parts := parts_of(root):
        train, test, others = parts
        notes = [f"not used: {', '.join(others)} (train is trained on, test is judged on)"] if others else []
        if test.name.lower() in VALIDATION:
            notes = [f"there is no test: {test.name} is judged on"]
        training, testing = _classes(train), _classes(test)
        notes += _left_out(root, {train: training, test: testing}, others)
        return RetrievalSplits(training, testing, note="; ".join(notes))
    names = [folder.name for folder in _folders(root)]
    if len(names) > 1 and PARTS.issuperset(map(str.lower, names)):
        raise UserError(f"--data: expected train and test, or a folder for each class; found {', '.join(names)}")
    everything = _classes(root)
    if config.test_share < 1 and everything.classes() == 1:
        (name,) = everything.class_names
        raise UserError(
            f"--data: expected a folder for each class in {root}, found images in one of them, {name!r}; if the "
            f"classes are inside it, say --data {_down_to_several(root / name)}"
        )
    few = few_classes(everything.labels, config.test_share)
    notes = [f"fewer than {FEW} classes: every other image of each is to test on"] if few else []
    notes += [*_deeper(everything, root), *_left_out(root, {root: everything})]
    rows = kept_apart(everything.labels, config.test_share, config.split_seed)
    return RetrievalSplits(*map(everything.take, rows), note="; ".join(notes))


def sample(config: Data) -> list[Path]:
    """One image of each of some classes, which are spread over all."""
    root = root_of(config)
    parts = parts_of(root)
    folders = _folders(parts[0] if parts else root)
    chosen = folders[:: -(-len(folders) // _SAMPLE)] if folders else []
    return [path for folder in chosen for path in images_in(folder)[:1]]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def parts_of(root: Path) -> tuple[Path, Path, list[str]] | None:
    """The folders to train on and to judge on, and names of others for validation; None if there are no parts."""
    folders = {folder.name.lower(): folder for folder in _folders(root)}
    if "train" not in folders:
        return None
    folders = {name: folder for name, folder in folders.items() if _has_images(folder)}
    others = sorted(folders.keys() - {"train"})
    if "train" not in folders or not {"test", *VALIDATION}.issuperset(others):
        return None
    test = "test" if "test" in others else others[0] if len(others) == 1 else ""
    if not test:
        return None
    return folders["train"], folders[test], [folders[name].name for name in others if name != test]


def _has_images(folder: Path) -> bool:
    return bool(images_in(folder, linked=True))


def _down_to_several(folder: Path) -> Path:
    """The first folder inside this one, itself included, that has several folders with images."""
    inside = [one for one in _folders(folder) if _has_images(one)]
    return _down_to_several(inside[0]) if len(inside) == 1 else folder


def _left_out(root: Path, read: dict[Path, Items], parts: Sequence[str] = ()) -> list[str]:
    """A note on what is not read: images beside the folders of classes, folders without images, other files.

    Args:
        root: The folder of the data.
        read: Folders of classes, and their images.
        parts: Folders that are left alone, which has been said.
    """
    known = {str(source) for items in read.values() for source in items.sources}
    images, others = 0, Counter[str]()
    for place, folders, files in walk(root):
        folders[:] = [name for name in folders if not (place == str(root) and name in parts)]
        for file in files:
            if os.path.join(place, file) not in known:
                suffix = os.path.splitext(file)[1].lower()
                images += suffix in SUFFIXES
                others[suffix or "no suffix"] += suffix not in SUFFIXES
    empty = [one.name for one in _folders(root) if root not in read and one not in read and one.name not in parts]
    for base, items in read.items():
        empty += [one.name for one in _folders(base) if printable(one.name) not in items.class_names]
    links = [link.name for base in read for one in _folders(base) for link in links_in(one)]
    found = [
        (images, "image", "beside the folders of the classes", []),
        (len(links), "link", "to folders inside of classes", links),
        (len(empty), "folder", "without images", empty),
        (others.total(), "file", "of other kinds", sorted(+others)),
    ]
    told = [
        f"{many:,} {what}{'s' if many > 1 else ''} {which}"
        + (f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else "")
        for many, what, which, names in found
        if many
    ]
    return [f"not used: {', '.join(told)}"] if told else []


def _deeper(items: Items, root: Path) -> list[str]:
    """A note where all images are in folders inside the class folders, which may be the classes that are meant."""
    folders = {Path(source).relative_to(root).parent for source in items.sources if isinstance(source, Path)}
    if len(folders) <= items.classes() or any(len(folder.parts) < 2 for folder in folders):
        return []
    return [
        f"a class is a folder in {root}, {items.classes()} in all, with the images of the {len(folders)} folders "
        "inside them; if those are the classes, put them side by side"
    ]


def _classes(root: Path) -> Items:
    paths, classes = [], []
    for folder in _folders(root):
        found = images_in(folder)
        paths += found
        classes += [folder.name] * len(found)
    if not paths:
        alone = len(images_in(root))
        put = f"; {alone:,} images are in {root} itself: put those of each class into a folder" if alone else ""
        raise UserError(f"--data: no images in {root}/<class>/ ({', '.join(sorted(SUFFIXES))}){put}")
    labels, class_names = numbered(classes)
    names = [printable(str(p.relative_to(root))) for p in paths]
    return Items(paths, labels, None, names, [printable(name) for name in class_names])
