"""Queries from files: which rows belong together, their grades and features; training, validation and test."""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rankgrad.lab.ranker import letor, tables
from rankgrad.lab.ranker.config import Data
from rankgrad.lab.ranker.rows import Rows, check_dense
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import size_of

#: What a file of each part of a data set may be called, without its ending.
PARTS = {
    "train": ("train", "training"),
    "validation": ("vali", "valid", "val", "validation", "dev"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class Queries:
    """Queries and their items; the items of a query stand together.

    Attributes:
        features: ``[items, features]`` float32.
        grades: ``[items]`` float32, >= 0.
        groups: ``[items]`` int64, which query an item belongs to: 0, 0, 0, 1, 1, ...
        ids: The name of each query.
    """

    features: Tensor
    grades: Tensor
    groups: Tensor
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> Tensor:
        """How many items each query has."""
        return self.groups.bincount(minlength=len(self))

    def take(self, which: Tensor) -> Queries:
        """Some queries, in the order given."""
        sizes = self.sizes
        first = sizes.cumsum(0) - sizes
        groups = torch.arange(len(which), device=which.device).repeat_interleave(sizes[which])
        begin = (sizes[which].cumsum(0) - sizes[which])[groups]
        rows = torch.arange(len(groups), device=which.device) - begin + first[which][groups]
        return Queries(self.features[rows], self.grades[rows], groups, [self.ids[q] for q in which.tolist()])

    def to(self, device: torch.device) -> Queries:
        """The same on a device."""
        return Queries(self.features.to(device), self.grades.to(device), self.groups.to(device), self.ids)


@dataclass(frozen=True)
class QuerySplits:
    """The parts of a data set, with the same features, by name.

    Of a single file that is split, ``digest`` says by the grades which one it is, whatever its name.
    """

    train: Queries
    validation: Queries
    test: Queries
    names: list[str]
    digest: str = ""


def _reader(path: Path, config: Data) -> Rows:
    size_of(path, sys.maxsize)
    if path.suffix.lower() in letor.SUFFIXES:
        return letor.read(path)
    return tables.read(path, config)


def _files(root: Path) -> dict[str, Path]:
    """The file of each part in a folder."""
    known = {name: part for part, names in PARTS.items() for name in names}
    found: dict[str, Path] = {}
    for path in sorted(p for p in root.iterdir() if p.is_file() and not p.name.startswith(".")):
        part = known.get(path.stem.lower())
        if part is None or path.suffix.lower() not in (*letor.SUFFIXES, *tables.SUFFIXES):
            continue
        if part in found:
            raise UserError(f"--data: expected one file to {part}, found {found[part]} and {path}")
        found[part] = path
    if "train" not in found:
        endings = ", ".join((*letor.SUFFIXES, *tables.SUFFIXES))
        raise UserError(f"--data: no file train.* in {root} (of {endings}); a single file may be given instead")
    return found


def read(config: Data, known: str | None = None) -> QuerySplits:
    """The data set of these settings: a file, split by queries, or a folder with a file for each part.

    ``known`` is the digest of the file of a run that is to be tested: another file is to test on, all of it.
    """
    if config.root is None:
        raise UserError("--data: a ranker needs data, say --data FILE or --data DIR")
    root = Path(config.root).expanduser()
    if not root.exists():
        raise UserError(f"--data: no such file or folder {str(root)!r}")
    files = _files(root) if root.is_dir() else {"train": root}
    rows = {part: _reader(path, config) for part, path in files.items()}
    names = _same_features(files, rows)
    queries = {part: _queries(files[part], found, names) for part, found in rows.items()}
    digest = "" if root.is_dir() else _digest(queries["train"])
    if not root.is_dir() and known not in (None, digest):
        nothing = queries["train"].take(torch.arange(0))
        return QuerySplits(nothing, nothing, queries["train"], names, digest)
    return _split(queries, config, names, digest)


def _digest(queries: Queries) -> str:
    content = queries.grades.numpy().tobytes() + queries.groups.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def _same_features(files: dict[str, Path], rows: dict[str, Rows]) -> list[str]:
    """The features of all parts: the same columns of tables; the union of numbered ones, absent values being 0."""
    first = rows["train"].names
    if all(found.sparse for found in rows.values()):
        return sorted({name for found in rows.values() for name in found.names}, key=int)
    for part, found in rows.items():
        odd = sorted(set(found.names) ^ set(first))
        if odd:
            raise UserError(
                f"{files[part]}: expected the columns of {files['train']}, only one of them has "
                f"{', '.join(odd[:5])}"
            )
    return first


def _queries(path: Path, rows: Rows, names: list[str]) -> Queries:
    if not len(rows.grades):
        raise UserError(f"{path}: expected queries, found no rows")
    if not names:
        raise UserError(f"{path}: expected features, found none")
    check_dense(path, len(rows.grades), len(names))
    place = {name: at for at, name in enumerate(rows.names)}
    features = np.zeros((len(rows.grades), len(names)), np.float32)
    columns = [at for at, name in enumerate(names) if name in place]
    # In the order of the queries' first rows; a query's rows need not stand together.
    _, first, of = np.unique(rows.queries, return_index=True, return_inverse=True)
    order_of_queries = np.argsort(first, kind="stable")
    number = np.empty_like(order_of_queries)
    number[order_of_queries] = np.arange(len(first))
    groups = number[of]
    order = np.argsort(groups, kind="stable")
    features[:, columns] = rows.dense([place[names[at]] for at in columns])[order]
    return Queries(
        torch.from_numpy(features),
        torch.from_numpy(rows.grades[order].astype(np.float32)),
        torch.from_numpy(groups[order].astype(np.int64)),
        [str(rows.ids[rows.queries[at]]) for at in np.sort(first)],
    )


def _split(queries: dict[str, Queries], config: Data, names: list[str], digest: str) -> QuerySplits:
    """The parts that have no file come from the training queries, chosen by a seed."""
    train = queries["train"]
    missing = [part for part in ("test", "validation") if part not in queries]
    if missing:
        if len(train) < len(missing) + 1:
            raise UserError(
                f"--data: expected {len(missing) + 1} queries at least, to train on and to split off for "
                f"{' and '.join(missing)}; found {len(train)}"
            )
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.split_seed))
        for left, part in zip(range(len(missing), 0, -1), missing, strict=True):
            share = {"test": config.test_share, "validation": config.validation_share}[part]
            count = min(max(1, math.floor(share * len(train) + 0.5)), len(order) - left)
            queries[part], order = train.take(order[:count].sort().values), order[count:]
        queries["train"] = train.take(order.sort().values)
    return QuerySplits(queries["train"], queries["validation"], queries["test"], names, digest)
