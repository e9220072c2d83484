"""What a run writes down as it goes: CSV tables, TensorBoard, a progress bar."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankgrad.lab.training.checkpoint import write_text


def read_table(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV table of numbers; none if there is no file. A torn last line is left out."""
    if not path.is_file():
        return []
    rows = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                rows.append({name: float(value) for name, value in row.items()})
            except (TypeError, ValueError):
                break
    return rows


class Table:
    """A CSV file of numbers that grows by rows, starting with those of the steps before ``step``."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [row for row in read_table(path) if row["step"] <= step] if step else []
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
        with self.path.open("a", newline="") as file:
            for row in rows:
                file.write(",".join(_number(row[name]) for name in self.columns) + "\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


class Log:
    """The tables ``steps.csv`` and ``evaluations.csv`` of a run, and TensorBoard beside them where installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.steps = Table(folder / "steps.csv", step)
        self.evaluations = Table(folder / "evaluations.csv", step)
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1)
        except ModuleNotFoundError:  # the CSV tables hold the same numbers
            pass

    def add_steps(self, rows: list[dict[str, float]]) -> None:
        """Rows of finished steps."""
        self.steps.append(rows)
        self._plot("train", rows)

    def add_evaluation(self, row: dict[str, float]) -> None:
        """The result of an evaluation."""
        self.evaluations.append([row])
        self._plot("evaluation", [row])

    def _plot(self, tag: str, rows: list[dict[str, float]]) -> None:
        if self._board is not None:
            for row in rows:
                for name, value in row.items():
                    if name not in ("step", "epoch") and not math.isnan(value):
                        self._board.add_scalar(f"{tag}/{name}", value, int(row["step"]))

    def close(self) -> None:
        """Flush what is still waiting."""
        if self._board is not None:
            self._board.close()


def in_words(metrics: Mapping[str, float]) -> str:
    """``R@1 64.0  mAP@R 24.6``."""
    return "  ".join(f"{name} {value:.1f}" for name, value in metrics.items() if name not in ("step", "epoch"))


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
            self._bar.console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress(name: str, total: int, done: int, *, show: bool) -> Iterator[Progress]:
    """A progress bar around a loop of ``total`` steps."""
    if not show:
        yield Progress()
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn(name),
        rich.BarColumn(bar_width=24),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[text]}"),
    )
    with rich.Progress(*columns) as bar:
        yield Progress(bar, bar.add_task(name, total=total, completed=done, text=""))
