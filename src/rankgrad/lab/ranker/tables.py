"""CSV and Parquet: a column that says which query a row belongs to, one of grades, the others features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.lab.ranker.config import Data
from rankgrad.lab.ranker.rows import MOST, Rows, wrong_grade
from rankgrad.lab.training.config import nearest, shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import check_memory

#: Columns of a table at most: each takes kilobytes, however short its name is.
_COLUMNS = 50_000
#: Bytes of memory that a row takes apart from its features: grade, query, orders by it.
_ROW = 96
SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")


def read(path: Path, config: Data) -> Rows:
    """The rows of a table. An error names its column and line."""
    import pyarrow

    try:
        return _rows(path, config, _table(path, config))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        raise UserError(f"{path}: {str(error).partition(chr(10))[0]}") from None


def _rows(path: Path, config: Data, table: Any) -> Rows:
    from pyarrow import compute

    columns = list(table.column_names)
    if len(set(columns)) < len(columns):
        twice = sorted({name for name in columns if columns.count(name) > 1})
        raise UserError(f"{path}: expected columns of different names, {', '.join(twice)} is there twice")
    for key, wanted in (
        ("query", (config.query,)),
        ("label", (config.label,)),
        ("features", config.features),
        ("ignore", config.ignore),
    ):
        for name in wanted:
            if name not in columns:
                raise UserError(f"data.{key}: no column {name!r} in {path}{nearest(name, columns)}")
    apart = {config.query, config.label, *config.ignore}
    if both := apart & set(config.features):
        raise UserError(f"data.features: {', '.join(sorted(both))} is the query, the label or ignored")
    names = list(config.features) or [name for name in columns if name not in apart]
    place = _Places(path)
    grades = place.numbers(table, config.label, "a grade")
    for row in np.flatnonzero(~((grades >= 0) & (grades <= MOST)))[:1]:
        fault = place.empty(table, config.label, row) or wrong_grade(float(grades[row]))
        raise UserError(f"{place.of(row)}, column {config.label}: {fault}")
    queries = table.column(config.query)
    texts = queries.cast("large_string").combine_chunks()
    missing = np.asarray(queries.is_null(nan_is_null=True)) | np.asarray(compute.equal(texts, "").fill_null(True))
    for row in np.flatnonzero(missing)[:1]:
        raise UserError(f"{place.of(row)}, column {config.query}: expected the query of this row, it is empty")
    features = np.empty((table.num_rows, len(names)), np.float32)
    for at, name in enumerate(names):
        values = place.numbers(table, name, "a number", suggest_ignore=name not in config.features)
        with np.errstate(over="ignore"):
            features[:, at] = values
        for row in np.flatnonzero(~np.isfinite(features[:, at]))[:1]:
            fault = place.empty(table, name, row) or f"expected a finite number, received {values[row]:g}"
            raise UserError(f"{place.of(row)}, column {name}: {fault}")
    known = texts.dictionary_encode()
    # not as NumPy's own texts, which end before a last \0
    ids = np.asarray(known.dictionary, dtype=object)
    return Rows(np.asarray(known.indices), ids, grades, features, names, sparse=False)


def _table(path: Path, config: Data) -> Any:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"--data: unknown ending of {str(path)!r}; SVMlight text is .txt, tables are {', '.join(SUFFIXES)}"
        )
    if path.suffix.lower() in (".parquet", ".pq"):
        return _parquet(path)
    import pyarrow
    from pyarrow import csv

    with path.open("rb") as file:
        _check_columns(path, file.readline(2**24).count(b"\t" if path.suffix.lower() == ".tsv" else b","))
    parsing = csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    # Only an empty field is missing: "NA" and "null" may be what a query or a feature is called.
    # A query's name is text: as numbers 7 and 007 would be one query, and two of 20 digits too.
    kinds = {config.query: pyarrow.string()}
    converting = csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
    reading = csv.ReadOptions(use_threads=False)  # with several threads the error does not name the row
    return csv.read_csv(path, reading, parsing, converting)


def _check_columns(path: Path, many: int) -> None:
    if many > _COLUMNS:
        raise UserError(f"{path}: expected up to {_COLUMNS:,} columns, found {many:,}")


def _parquet(path: Path) -> Any:
    """A few thousand rows at a time: a value of many bytes may be kept once in the file, and be in every row."""
    import pyarrow
    from pyarrow import parquet

    batches, memory = [], 0
    with parquet.ParquetFile(path) as file:
        _check_columns(path, file.metadata.num_columns)
        rows, columns = file.metadata.num_rows, file.metadata.num_columns
        check_memory((_ROW + 8 * columns) * rows, str(path), f"{rows:,} rows", path.stat().st_size)
        for batch in file.iter_batches(4096):
            memory += batch.nbytes
            check_memory(memory, str(path), "its rows", path.stat().st_size)
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, file.schema_arrow)


class _Places:
    """How a row of a file is called: a line of a CSV (the first has the names), a row of Parquet."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.suffix.lower() in (".csv", ".tsv")

    def of(self, row: int) -> str:
        """``file, line 7``."""
        return f"{self.path}, line {row + 2}" if self.text else f"{self.path}, row {row + 1}"

    def empty(self, table: Any, name: str, row: int) -> str:
        """What to say of a field that is empty; nothing of others."""
        return "expected a number, it is empty" if table.column(name)[int(row)].as_py() is None else ""

    def numbers(self, table: Any, name: str, what: str, *, suggest_ignore: bool = False) -> Any:
        """A column as float64, NaN where it is empty; an error names the line of a text in it."""
        import pyarrow

        column = table.column(name)
        kind = column.type
        numeric = (
            pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)
        )
        if numeric or pyarrow.types.is_decimal(kind) or pyarrow.types.is_null(kind):
            return np.asarray(column.cast(pyarrow.float64()), dtype=np.float64)
        numbers = np.empty(len(column))
        for row, value in enumerate(column):
            try:
                numbers[row] = float(value.as_py())
            except (TypeError, ValueError):
                hint = f"; data.ignore=[{name}] leaves the column out" if suggest_ignore else ""
                raise UserError(
                    f"{self.of(row)}, column {name}: expected {what}, received {shown(value.as_py())}{hint}"
                ) from None
        return numbers
