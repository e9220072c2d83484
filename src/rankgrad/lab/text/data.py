"""Labelled texts, pairs and graded lists from CSV, TSV and JSONL files."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from rankgrad.lab.retrieval.splits import Items, RetrievalSplits, by_classes, kept_apart, numbered
from rankgrad.lab.text.config import Data
from rankgrad.lab.training.config import shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import check_memory
from rankgrad.lab.training.run_files import checked_json

SUFFIXES = (".csv", ".tsv", ".jsonl")
KINDS = {"labels": ("text", "label"), "pairs": ("anchor", "positive"), "graded": ("query", "document", "grade")}
_SHARES = {"labels": 0.5, "pairs": 0.2, "graded": 0.2}
_GRADE = 100  # at most: 2^100, a gain of NDCG, is a number of float32
_LINE = 2**24  # characters of a line at most
_SHOWN = 60  # characters of a text that serve as its name


def file_of(config: Data) -> Path:
    """The file the user points at."""
    if config.root is None:
        raise UserError("--data: the task text needs a file, say --data FILE.csv (or .tsv, .jsonl)")
    for name in (config.root, *([config.test] if config.test else [])):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"--data: expected a .csv, .tsv or .jsonl file, found no file {name!r}")
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"--data: expected a file named {' or '.join(SUFFIXES)}, received {path.name!r}")
    return Path(config.root).expanduser()


def _rows(path: Path, argument: str = "--data") -> Iterator[tuple[int, dict[str, object]]]:
    """Line number and fields of every row; messages begin with the argument that named the file."""
    name = f"{argument}: {path.name}"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _bounded(name, file)
            if path.suffix.lower() == ".jsonl":
                yield from _json_rows(name, lines)
                return
            csv.field_size_limit(_LINE)  # texts that are too long are named by us
            reader = csv.DictReader(lines, delimiter="," if path.suffix.lower() == ".csv" else "\t")
            for row in reader:
                if None in row:
                    raise UserError(f"{name} line {reader.line_num}: more fields than columns")
                yield reader.line_num, dict(row)
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error.reason} at byte {error.start:,})") from None
    except csv.Error as error:
        raise UserError(f"{name} cannot be read as a table ({error})") from None


def _bounded(name: str, file: TextIO) -> Iterator[str]:
    """The lines of a file; one without an end is not read to it."""
    number = 0
    while line := file.readline(_LINE):
        number += 1
        if len(line) == _LINE:
            raise UserError(f"{name} line {number}: expected fewer than {_LINE:,} characters")
        yield line


def _json_rows(name: str, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, checked_json(line, dict[str, Any], f"{name} line {number}")


def kind_of(config: Data) -> str:
    """What the file holds, by its columns."""
    path = file_of(config)
    _, first = next(_rows(path), (0, None))
    if first is None:
        raise UserError(f"--data: {path.name} has no rows")
    kinds = KINDS if config.kind == "auto" else {config.kind: KINDS[config.kind]}
    for kind, roles in kinds.items():
        if all(getattr(config, role) in first for role in roles):
            return kind
    expected = " or ".join(",".join(getattr(config, role) for role in roles) for roles in kinds.values())
    raise UserError(
        f"--data: {path.name}: expected the columns {expected}; found {','.join(map(str, first))}; "
        + (_hint(config, list(map(str, first))) or "data.text=NAME, data.label=NAME and so on say which are which")
    )


def _hint(config: Data, found: list[str]) -> str:
    """The setting that says which is the missing column, where one column is missing and one has no role."""
    for roles in KINDS.values():
        missing = [role for role in roles if getattr(config, role) not in found]
        others = [name for name in found if name not in {getattr(config, role) for role in roles}]
        if len(missing) == len(others) == 1:
            return f"say data.{missing[0]}={others[0]}"
    return ""


def _columns(
    path: Path, config: Data, roles: dict[str, str], argument: str = "--data"
) -> tuple[list[list[str]], list[int]]:
    """The columns of these roles, checked: every text is there and not too long; and the line of each row."""
    columns: list[list[str]] = [[] for _ in roles]
    lines: list[int] = []
    size, memory = path.stat().st_size, 0
    for number, row in _rows(path, argument):
        place = f"{argument}: {path.name} line {number}"
        for (role, name), column in zip(roles.items(), columns, strict=True):
            if name not in row:
                raise UserError(f"{place}: expected a column {name!r}, found none")
            value = "" if row[name] is None else str(row[name]).strip()
            if not value:
                raise UserError(f"{place}: the {role} is empty")
            if len(value) > config.longest:
                raise UserError(
                    f"{place}: the {role} has {len(value):,} characters, more than data.longest = "
                    f"{config.longest:,}"
                )
            column.append(value)
            memory += sys.getsizeof(value) + 8
        lines.append(number)
        check_memory(memory, f"{argument}: {path.name}", "its texts", size)
    return columns, lines


def _of_kind(path: Path, config: Data, kind: str) -> tuple[list[list[str]], list[int]]:
    """The columns of a kind of data, and the line of each row."""
    return _columns(path, config, {role: getattr(config, role) for role in KINDS[kind]})


def texts_of(path: Path, config: Data, column: str | None = None) -> tuple[str, list[str]]:
    """A column of texts of a file to embed, by its name or as the settings call them: its name, and the texts."""
    _, first = next(_rows(path, "TEXTS"), (0, {}))
    known = [config.text, config.anchor, config.positive, config.query, config.document]
    found = [name for name in ([column] if column else known) if name in first]
    if first and len(found) != 1:
        wanted = repr(column) if column else "of texts"
        raise UserError(
            f"TEXTS: {path.name}: expected one column {wanted}, found {','.join(found or map(str, first))}; "
            "--column NAME says which"
        )
    return (found[0], _columns(path, config, {"text": found[0]}, "TEXTS")[0][0]) if first else ("", [])


def _items(texts: Sequence[str], labels: Tensor, class_names: Sequence[str] = ()) -> Items:
    names = [text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "\u2026" for text in texts]
    return Items(texts, labels, None, names, class_names)


def read(config: Data, kind: str) -> RetrievalSplits:
    """Texts to train on and to test on: no label, and no pair, is in both."""
    share = config.test_share or _SHARES[kind]
    make = {"labels": _labelled, "pairs": _paired}[kind]
    path = file_of(config)
    everything = make(_of_kind(path, config, kind)[0])
    if config.test is not None:
        other = make(_of_kind(Path(config.test).expanduser(), config, kind)[0])
        return RetrievalSplits(everything[0], *(other[1:] or other))
    if everything[0].classes() < 2:
        raise UserError(f"--data: {path.name}: expected two different {kind} at least, found one")
    if kind == "labels":
        training, testing = kept_apart(everything[0].labels, share, config.split_seed)
        return RetrievalSplits(everything[0].take(training), everything[0].take(testing))
    training, testing = by_classes(everything[0].labels, share, config.split_seed)
    apart = everything[0].labels[testing].unique()
    test = [part.take(torch.isin(part.labels, apart).nonzero()[:, 0]) for part in everything]
    return RetrievalSplits(everything[0].take(training), *(test[1:] or test))


def _labelled(columns: list[list[str]]) -> tuple[Items, ...]:
    texts, labels = columns
    return (_items(texts, *numbered(labels)),)


def _paired(columns: list[list[str]]) -> tuple[Items, ...]:
    """All texts, the anchors, and the positives; texts that pairs connect have one label.

    Where a text is both, anchors would find themselves among the positives: then all texts search each other.
    """
    anchors, positives = columns
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        parent.setdefault(text, text)
        while parent[text] != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for anchor, positive in zip(anchors, positives, strict=True):
        if anchor == positive:
            raise UserError(f"--data: expected two different texts in a pair, received {anchor[:80]!r} twice")
        parent[root(anchor)] = root(positive)
    number: dict[str, int] = {}
    label = {text: number.setdefault(root(text), len(number)) for text in [*anchors, *positives]}

    def of(texts: Sequence[str]) -> Items:
        once = list(dict.fromkeys(texts))
        return _items(once, torch.tensor([label[text] for text in once]))

    everything = of([*anchors, *positives])
    return (everything,) if set(anchors) & set(positives) else (everything, of(anchors), of(positives))


@dataclass(frozen=True)
class Judgements:
    """Graded lists: which query, which document, which grade; and the texts of both.

    Args:
        queries: Their texts.
        documents: Their texts.
        query: ``[J]`` row of ``queries``.
        document: ``[J]`` row of ``documents``.
        grade: ``[J]`` numbers >= 0.
    """

    queries: list[str]
    documents: list[str]
    query: Tensor
    document: Tensor
    grade: Tensor

    def take(self, queries: Tensor) -> Judgements:
        """The lists of some queries, with the documents that they judge."""
        rows = torch.isin(self.query, queries).nonzero()[:, 0]
        kept, query = self.query[rows].unique(return_inverse=True)
        found, document = self.document[rows].unique(return_inverse=True)
        texts = [self.queries[i] for i in kept.tolist()], [self.documents[i] for i in found.tolist()]
        return Judgements(*texts, query, document, self.grade[rows])

    def grades(self, queries: Tensor, documents: Tensor) -> Tensor:
        """``[Q, D]`` grades of these documents for these queries; 0 where there is no judgement."""
        keys = self.query * len(self.documents) + self.document
        order = keys.argsort()
        wanted = queries.unsqueeze(1) * len(self.documents) + documents.unsqueeze(0)
        place = torch.searchsorted(keys[order], wanted).clamp(max=len(keys) - 1)
        return self.grade[order[place]].where(keys[order[place]] == wanted, 0)

    def to(self, device: torch.device) -> Judgements:
        """On a device, for lookups there."""
        return Judgements(
            self.queries, self.documents, *(part.to(device) for part in (self.query, self.document, self.grade))
        )


def read_graded(config: Data) -> tuple[Judgements, Judgements]:
    """Graded lists to train on and to test on, no query in both."""
    path = file_of(config)
    everything = _judged(path, config)
    if config.test is not None:
        return everything, _judged(Path(config.test).expanduser(), config)
    many = len(everything.queries)
    if many < 2:
        raise UserError(f"--data: {path.name}: expected two queries at least, found {many}")
    training, testing = by_classes(torch.arange(many), config.test_share or _SHARES["graded"], config.split_seed)
    return everything.take(training), everything.take(testing)


def _judged(path: Path, config: Data) -> Judgements:
    (queries, documents, texts), lines = _of_kind(path, config, "graded")
    grades = []
    for number, text in zip(lines, texts, strict=True):
        try:
            grade = float(text)
        except ValueError:
            grade = math.nan
        if not 0 <= grade <= _GRADE:
            raise UserError(
                f"--data: {path.name} line {number}: expected a grade from 0 to {_GRADE}, received {shown(text)}"
            )
        grades.append(grade)
    if not any(grades):
        raise UserError(f"--data: {path.name}: expected grades above 0, all are 0")
    query, query_texts = numbered(queries)
    document, document_texts = numbered(documents)
    pair = query * len(document_texts) + document
    found, counts = pair.unique(return_counts=True)
    if int(counts.max()) > 1:
        twice = int(found[counts.argmax()])
        query_text = query_texts[twice // len(document_texts)]
        raise UserError(f"--data: {path.name}: query {shown(query_text)} has a document with two grades")
    return Judgements(query_texts, document_texts, query, document, torch.tensor(grades))
