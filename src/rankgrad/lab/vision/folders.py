"""Files of images and folders of data sets: where they are, what must be in them, whether they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankgrad.lab.training.config import nearest, shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.config import ImageData
from rankgrad.lab.vision.images import SUFFIXES

if TYPE_CHECKING:
    from typing import TypeAlias

    from PIL import Image

    Given: TypeAlias = str | os.PathLike[str] | Image.Image


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As ``os.walk``, without what is hidden. Links to folders are among the folders, but not entered."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield place, folders, [name for name in files if not name.startswith(".")]


def links_in(folder: Path) -> list[Path]:
    """Links to folders below a folder."""
    found = (Path(place, name) for place, folders, _ in walk(folder) for name in folders)
    return [path for path in found if path.is_symlink()]


def images_in(folder: Path, *, linked: bool = False) -> list[Path]:
    """All image files below a folder, sorted; hidden files are left out.

    ``linked``: those of folders that it has links to, too, as classes may be; not of one that it is in.
    """
    places = [folder]
    if linked:
        places += [
            one
            for one in links_in(folder)
            if one.parent == folder and not folder.resolve().is_relative_to(one.resolve())
        ]
    found = (Path(place, name) for one in places for place, _, files in walk(one) for name in files)
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES and path.is_file())


def given_images(images: Given | Sequence[Given]) -> tuple[list[Path | Image.Image], list[str]]:
    """Files, and images of Pillow's, that a user gives, and what to call each; a missing file is an error."""
    from PIL import Image

    sources: list[Path | Image.Image] = []
    for one in [images] if isinstance(images, str | os.PathLike | Image.Image) else images:
        if not isinstance(one, str | os.PathLike | Image.Image):
            raise UserError(f"IMAGES: expected files or images of Pillow, received a {type(one).__name__}")
        sources.append(one if isinstance(one, Image.Image) else Path(one))
    if missing := [str(one) for one in sources if isinstance(one, Path) and not one.is_file()]:
        what = "expected files, received a folder," if Path(missing[0]).is_dir() else "no such file"
        raise UserError(f"IMAGES: {what} {', '.join(missing[:5])}")
    if not sources:
        raise UserError("IMAGES: expected images, received none")
    return sources, [str(one) if isinstance(one, Path) else f"image {at}" for at, one in enumerate(sources)]


def root_of(config: ImageData) -> Path:
    """The folder the user points at."""
    if config.root is None:
        raise UserError(f"--data: the data set {config.name!r} needs a folder, say --data DIR")
    root = Path(config.root).expanduser()
    if not root.is_dir():
        beside = [p.name for p in root.parent.iterdir() if p.is_dir()] if root.parent.is_dir() else []
        hint = nearest(root.name, beside) if beside else ""
        raise UserError(f"--data: no such folder {str(root)!r}{hint}")
    return root


def find(root: Path, *places: str) -> Path:
    """The first of some places below the root that exists."""
    for place in places:
        if (root / place).exists():
            return root / place
    raise UserError(f"--data: expected {' or '.join(places)} in {root}, found none")


def inside(name: str, place: str) -> str:
    """A name in a list, if it stays in the data set's folder; ``place`` says where it stands."""
    parts = Path(name).parts
    long = any(len(os.fsencode(part)) > 250 for part in parts)  # with a suffix, what a file system takes
    if "\0" in name or long or ".." in parts or Path(name).is_absolute():
        raise UserError(f"--data: {place}: expected a name inside the folder, received {shown(name)}")
    return name


def check_counts(config: ImageData, counts: dict[str, tuple[int, int]]) -> None:
    """Require the sizes of the protocol, unless ``data.counts`` is ``any``; ``counts`` are (found, official)."""
    wrong = [
        f"{name} {found:,} instead of {official:,}"
        for name, (found, official) in counts.items()
        if found != official
    ]
    if wrong and config.counts == "protocol":
        raise UserError(
            f"--data: {config.name} is not complete: {'; '.join(wrong)}. Results would not compare with published "
            "ones; data.counts=any trains on it all the same."
        )
