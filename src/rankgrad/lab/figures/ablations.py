"""Memory, margin and lambda on CUB-200-2011, from the tables that ``benchmarks/cub.py`` writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import read_lines

_DEFAULT = Path("benchmarks/results")
_BASE = "recall loglog"
#: Row of the table -> the paper's R@1 (CUB, 80 epochs, mean of three), where it has one.
PAPER = {_BASE: 64.0, f"{_BASE}, no memory": 62.5, f"{_BASE}, no margin": 63.2}
#: Panel -> (what stands on the axis, row of the table).
PANELS = {
    "memory": [
        ("recall", _BASE),
        ("recall,\nwithout", f"{_BASE}, no memory"),
        ("AP", "ap"),
        ("AP,\nwithout", "ap, no memory"),
    ],
    "margin": [("0.02", _BASE), ("without", f"{_BASE}, no margin")],
    "lambda": [("0.04", f"{_BASE}, lambda 0.04"), ("0.2", _BASE), ("1", f"{_BASE}, lambda 1")],
}

CAPTION = """R@1 on CUB-200-2011 (test classes) when one thing is changed: the memory of 3 batches, the margin,
and lambda over a factor of 25. Filled: the best evaluation, as the paper reports; open: the last epoch; error
bars are one standard deviation over seeds.{epochs} Grey diamonds: the paper, with its own weights and 80 epochs.
Compare within a panel, each has its own axis.{seen} From {files}.{missing}"""


class Score(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float = 0.0  # of a single run


class Ablation(NamedTuple):
    """R@1 of one row of the table."""

    best: Score
    last: Score


#: Rows by name, of runs of as many epochs (0 where the table does not say).
Rows = dict[int, dict[str, Ablation]]


def read_table(text: str) -> Rows:
    """Rows of tables with the columns ``loss``, ``best R@1``, ``last R@1``, maybe ``epochs``; nothing without."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    heads = [at for at, cells in enumerate(lines) if {"loss", "best R@1", "last R@1"} <= set(cells)]
    found: Rows = {}
    for at in heads:
        columns = {name: number for number, name in enumerate(lines[at])}
        for cells in lines[at + 1 :]:
            numbers = [
                re.findall(r"[\d.]+", cells[columns[of]])
                for of in ("best R@1", "last R@1")
                if len(cells) == len(columns)
            ]
            if len(numbers) == 2 and all(len(pair) in (1, 2) for pair in numbers):
                epochs = int(cells[columns["epochs"]]) if "epochs" in columns else 0
                line = Ablation(*(Score(*map(float, pair)) for pair in numbers))
                found.setdefault(epochs, {})[cells[columns["loss"]]] = line
    return found


def read_results(path: Path) -> tuple[Rows, list[str]]:
    """All rows under a file or folder, later files last, and the names of the files that had some."""
    if not path.exists():
        raise UserError(f"--results: no such file or folder {str(path)!r}")
    files = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    rows: Rows = {}
    used = []
    for file in files:
        text = "\n".join(read_lines(file, 10_000_000, argument="--results"))
        try:
            table = read_table(text)
        except ValueError as error:
            raise UserError(f"--results: {file}: expected a table of benchmarks/cub.py ({error})") from None
        for epochs, lines in table.items():
            rows[epochs] = rows.get(epochs, {}) | lines
        if table:
            used.append(file.name)
    if not rows:
        raise UserError(f"--results: no table of benchmarks/cub.py in {str(path)!r}")
    return rows, used


def draw(inputs: FigureInputs) -> list[Drawing]:
    """One panel each; missing rows are reported."""
    found, files = read_results(inputs.results or _DEFAULT)
    wanted = list(dict.fromkeys(row for panel in PANELS.values() for _, row in panel))
    # One thing is changed at a time: all rows of runs of the same length, the length of which most were measured.
    epochs, rows = max(found.items(), key=lambda kind: (len(kind[1].keys() & wanted), kind[0]))
    lacking = [row for row in wanted if row not in rows]
    if len(lacking) == len(wanted):
        raise UserError(f"--results: {', '.join(files)} has none of the rows {', '.join(map(repr, wanted))}")
    if lacking:
        inputs.tell(f"not in the tables: {', '.join(lacking)}")
    missing = f" Not measured: {', '.join(lacking)}." if lacking else ""
    with style.applied():
        figure = style.sheet(7.4, 3.3)
        widths = [len(panel) for panel in PANELS.values()]
        grid = figure.subplots(1, len(PANELS), width_ratios=widths)  # own axes: a collapse would hide the rest
        for axes, (name, panel) in zip(grid, PANELS.items(), strict=True):
            style.letter(axes, name)
            _panel(axes, panel, rows)
        grid[0].set_ylabel("R@1, %")
        grid[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    after = f" After {epochs} epochs." if epochs else ""
    caption = CAPTION.format(epochs=after, seen=_seen(rows), files=", ".join(files), missing=missing)
    return [Drawing("ablations", figure, caption)]


def _seen(rows: dict[str, Ablation]) -> str:
    """How much each change of the recall loss moved the best and the last R@1."""
    changed = {row.removeprefix(f"{_BASE}, "): line for row, line in rows.items() if row.startswith(f"{_BASE}, ")}
    if _BASE not in rows or not changed:
        return ""
    base = rows[_BASE]
    moved = [
        f"{line.best.mean - base.best.mean:+.1f} ({line.last.mean - base.last.mean:+.1f}) with {name}"
        for name, line in changed.items()
    ]
    return f" What to see: {base.best.mean:.1f} ({base.last.mean:.1f} at the end) moves by {', '.join(moved)}."


def _panel(axes: Axes, panel: list[tuple[str, str]], rows: dict[str, Ablation]) -> None:
    here = [(at, rows[row]) for at, (_, row) in enumerate(panel) if row in rows]
    for which, fill in (("best", style.BLUE), ("last", "white")):
        scores = [(at, getattr(line, which)) for at, line in here]
        aside = -0.09 if which == "best" else 0.09
        axes.errorbar(
            [at + aside for at, _ in scores], [score.mean for _, score in scores],
            [score.deviation for _, score in scores], fmt="o", ms=6, mfc=fill, color=style.BLUE, elinewidth=1.2,
            capsize=2.5, label=which,
        )  # fmt: skip
    papers = [(at, PAPER[row]) for at, (_, row) in enumerate(panel) if row in PAPER]
    axes.plot(*zip(*papers, strict=True), "D", color=style.GREY, ms=4.5, mfc="none", label="paper, best")
    for at, (_, row) in enumerate(panel):
        if row not in rows:
            axes.text(at, 0.02, "not\nmeasured", transform=axes.get_xaxis_transform(), ha="center", fontsize=7,
                      color=style.GREY)  # fmt: skip
    axes.set_xticks(range(len(panel)), [label for label, _ in panel])
    axes.set_xlim(-0.6, len(panel) - 0.4)
    axes.grid(True, axis="y")
