"""A user's own images: one folder per class."""

from __future__ import annotations

from pathlib import Path

from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.splits import Items, RetrievalSplits, kept_apart, numbered
from rankgrad.lab.training.errors import UserError, printable
from rankgrad.lab.vision.folders import images_in, root_of
from rankgrad.lab.vision.images import SUFFIXES

#: Names of parts of a data set: unlikely ones for classes.
VALIDATION = {"val", "valid", "validation"}
PARTS = {"train", "training", "test", "testing", *VALIDATION}

_SAMPLE = 32  # images that are looked at to see what kind they are


def read(config: Data) -> RetrievalSplits:
    """``root/<class>/.../<image>``; whole classes are kept apart for testing, chosen by a seed.

    If the folder has ``train`` and ``test``, and nothing else but images for validation, these are the split; the
    latter are not used. ``train`` and ``val`` alone are a split too. Of fewer than four classes none can be kept
    apart: every other image of each is for testing.
    """
    root = root_of(config)
    names = [folder.name for folder in _folders(root)]
    if test := _test_part(names):
        others = [name for name in names if name in VALIDATION and name != test]
        note = f"not used: {', '.join(others)} (train is trained on, test is judged on)" if others else ""
        if test in VALIDATION:
            note = f"there is no test: {test} is judged on"
        return RetrievalSplits(_classes(root / "train"), _classes(root / test), note=note)
    if len(names) > 1 and PARTS.issuperset(names):
        raise UserError(f"--data: expected train and test, or a folder for each class; found {', '.join(names)}")
    everything = _classes(root)
    if config.test_share < 1 and everything.classes() == 1:
        (name,) = everything.class_names
        raise UserError(
            f"--data: expected a folder for each class in {root}, found images in one of them, {name!r}; if the "
            f"classes are inside it, say --data {root / name}"
        )
    training, testing = kept_apart(everything.labels, config.test_share, config.split_seed)
    return RetrievalSplits(everything.take(training), everything.take(testing), note=_deeper(everything, root))


def sample(config: Data) -> list[Path]:
    """One image of each of some classes, which are spread over all."""
    root = root_of(config)
    folders = _folders(root)
    if _test_part([folder.name for folder in folders]):
        folders = _folders(root / "train")
    chosen = folders[:: -(-len(folders) // _SAMPLE)] if folders else []
    return [path for folder in chosen for path in images_in(folder)[:1]]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _test_part(names: list[str]) -> str | None:
    """Which of these folders is judged on, if they are the parts of a data set."""
    others = set(names) - {"train"}
    if "train" not in names or not others <= {"test", *VALIDATION}:
        return None
    if "test" in others:
        return "test"
    return others.pop() if len(others) == 1 else None


def _deeper(items: Items, root: Path) -> str:
    """A note where all images are in folders inside the class folders, which may be the classes that are meant."""
    folders = {Path(source).relative_to(root).parent for source in items.sources if isinstance(source, Path)}
    if len(folders) <= items.classes() or any(len(folder.parts) < 2 for folder in folders):
        return ""
    return (
        f"a class is a folder in {root}, {items.classes()} in all, with the images of the {len(folders)} folders "
        "inside them; if those are the classes, put them side by side"
    )


def _classes(root: Path) -> Items:
    paths, classes = [], []
    for folder in _folders(root):
        found = images_in(folder)
        paths += found
        classes += [folder.name] * len(found)
    if not paths:
        raise UserError(f"--data: no images in {root}/<class>/ ({', '.join(sorted(SUFFIXES))})")
    labels, class_names = numbered(classes)
    names = [printable(str(p.relative_to(root))) for p in paths]
    return Items(paths, labels, None, names, [printable(name) for name in class_names])
