"""The log of a run: CSV tables, callbacks, a progress bar."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankgrad.lab.callbacks import Callback
from rankgrad.lab.training.checkpoint import not_written, write_text
from rankgrad.lab.training.errors import UserError, printable
from rankgrad.lab.training.reading import check_memory, read

#: Bytes of memory that a row of a table and a number in it take at most.
_ROW, _CELL = 300, 64


def read_table(path: Path, columns: Sequence[str] = ("step",)) -> list[dict[str, float]]:
    """The rows of a CSV table of numbers; none if there is no file. A torn last line is left out.

    Raises:
        UserError: A column is missing, or a line is broken; the message has the file and the line.
    """
    if not path.is_file():
        return []
    content = read(path, 2**29)
    needed = _ROW * (content.count(b"\n") + content.count(b"\r")) + _CELL * content.count(b",")
    check_memory(needed, str(path), "its rows")
    try:
        return _rows(path, csv.reader(io.StringIO(content.decode()), strict=True), columns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: expected a table of numbers ({error})") from None


def _rows(path: Path, lines: Iterator[list[str]], columns: Sequence[str]) -> list[dict[str, float]]:
    head = next(lines, [])
    if head and not set(columns) <= set(head):
        shown = textwrap.shorten(",".join(head), 80)
        raise UserError(f"{path} line 1: expected the columns {', '.join(columns)}, received {shown!r}")
    rows = []
    for number, cells in enumerate(lines, 2):
        try:
            rows.append({name: float(value) for name, value in zip(head, cells, strict=True)})
        except ValueError:
            if next(lines, None) is None and len(cells) <= len(head):
                break
            shown = textwrap.shorten(",".join(cells), 80)
            raise UserError(f"{path} line {number}: expected {len(head)} numbers, received {shown!r}") from None
    return rows


class CsvLog:
    """A CSV file of numbers that grows by rows, starting with those of the steps up to ``step``."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [row for row in read_table(path) if row["step"] <= step] if step >= 0 else []
        self.columns: list[str] = []
        path.unlink(missing_ok=True)
        if kept:
            self._begin(list(kept[0]))
            self.append(kept)

    def _begin(self, columns: list[str]) -> None:
        self.columns = columns
        write_text(self.path, ",".join(columns) + "\n")

    def append(self, rows: list[dict[str, float]]) -> None:
        """Write rows and hand them to the system."""
        if rows and not self.columns:
            self._begin(list(rows[0]))
        lines = "".join(",".join(_number(row[name]) for name in self.columns) + "\n" for row in rows)
        try:
            with self.path.open("a", newline="") as file:
                file.write(lines)
        except OSError as error:
            raise not_written(self.path, error, len(lines)) from None


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


class Log:
    """The tables ``steps.csv`` and ``evaluations.csv`` of a run, and its callbacks.

    Args:
        folder: Of the run.
        step: After which the tables go on.
        evaluated: The step of the last evaluation, -1: none.
        callbacks: They receive the same rows.
    """

    def __init__(self, folder: Path, step: int, evaluated: int, callbacks: Sequence[Callback] = ()) -> None:
        self.steps = CsvLog(folder / "steps.csv", step or -1)
        self.evaluations = CsvLog(folder / "evaluations.csv", evaluated)
        self.callbacks = callbacks

    def add_steps(self, rows: list[dict[str, float]]) -> None:
        """Rows of finished steps."""
        self.steps.append(rows)
        for callback in self.callbacks:
            callback.log("train", rows)

    def add_evaluation(self, row: dict[str, float]) -> None:
        """The result of an evaluation."""
        self.evaluations.append([row])
        for callback in self.callbacks:
            callback.log("evaluation", [row])

    def close(self) -> None:
        """The run is over, or broken off."""
        for callback in self.callbacks:
            callback.end()


def labels(metrics: Mapping[str, float]) -> dict[str, str]:
    """What to call each metric; where some are of the validation part, the others are of the test part."""
    names = [name for name in metrics if name not in ("step", "epoch")]
    validated = {name for name in names if name.startswith("validation ")}
    return {name: f"test {name}" if validated and name not in validated else name for name in names}


def counted(number: int, noun: str) -> str:
    """``1 epoch``, ``2 epochs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_words(metrics: Mapping[str, float]) -> str:
    """``R@1 64.0  mAP@R 24.6``."""
    return "  ".join(f"{label} {metrics[name]:.1f}" for name, label in labels(metrics).items())


class Progress:
    """A bar on the terminal, in the process that shows one; lines for what should stay."""

    def __init__(self, bar: Any = None, job: Any = None) -> None:
        self._bar, self._job = bar, job

    def advance(self, done: int, text: str = "") -> None:
        """How many steps are done, and what to say beside the bar."""
        if self._bar is not None:
            self._bar.update(self._job, completed=done, text=text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(printable(text), highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress(name: str, total: int, done: int, *, show: bool) -> Iterator[Progress]:
    """A progress bar around a loop of ``total`` steps."""
    if not show:
        yield Progress()
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=24),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[text]}", markup=False),
    )
    with rich.Progress(*columns) as bar:
        yield Progress(bar, bar.add_task(printable(name), total=total, completed=done, text=""))
