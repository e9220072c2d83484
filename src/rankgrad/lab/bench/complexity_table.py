"""``rankgrad bench complexity``: the measured complexity table, its files and its plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from rankgrad.lab.bench import complexity as measured
from rankgrad.lab.bench import tables
from rankgrad.lab.bench.tables import Cells, in_time
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.config import chosen


def short(n: int) -> str:
    """``300``, ``3k``, ``10M``."""
    for size, letter in ((10**6, "M"), (1000, "k")):
        if n >= size:
            return f"{n / size:g}{letter}"
    return str(n)


def times(curves: Sequence[measured.CostCurve], lengths: Sequence[int]) -> Cells:
    """Time of each method at each length, or why there is none."""
    table = [["method", *(short(n) for n in lengths)]]
    for curve in curves:
        at = {point.n: in_time(point.seconds) if point.seconds else point.note for point in curve.points}
        table.append([curve.label, *(at.get(n, "") for n in lengths)])
    return table


def growth(curves: Sequence[measured.CostCurve]) -> Cells:
    """The exponent of n measured, beside the claim's."""
    table = [["method", "claimed", "exponent", "of the claim", "over"]]
    for curve in curves:
        numbers = ["-" if x is None else f"{x:.2f}" for x in (curve.exponent, curve.claimed)]
        over = f"{short(curve.fitted[0])} to {short(curve.fitted[-1])}" if len(curve.fitted) > 1 else "-"
        table.append([curve.label, curve.claim, *numbers, over])
    return table


def show(console: Console, title: str, curves: Sequence[measured.CostCurve], lengths: Sequence[int]) -> None:
    """Print both tables, the wide one in as many parts as the window needs."""
    columns = max(2, (console.width - 26) // 11)
    console.print(title, style="bold")
    for start in range(0, len(lengths), columns):
        tables.show(console, "", times(curves, lengths[start : start + columns]))
    tables.show(console, "", growth(curves))


def complexity(
    device: tables.DeviceOption = "both",
    seconds: Annotated[float, typer.Option(help="a call that would take longer is not made", min=0.01)] = 60.0,
    longest: Annotated[int, typer.Option(help="leave out longer lists", min=100)] = 10_000_000,
    methods: Annotated[str, typer.Option(help="only these, with commas between them")] = "",
    threads: tables.ThreadsOption = 0,
    markdown: tables.MarkdownOption = None,
    json_file: tables.JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="draw it here: FILE.png and FILE.svg")] = None,
) -> None:
    """Time every method of the paper's complexity table as lists grow, with the exponent beside the claim."""
    places = tables.devices(device, threads)
    names = [chosen("--methods", name.strip(), list(measured.contenders())) for name in methods.split(",") if name]
    lengths = [n for n in measured.LENGTHS if n <= longest]
    console = Console()
    text = ""
    numbers: dict[str, Any] = {}
    for place in places:
        where, summary = torch.device(place), machine.summary(torch.device(place))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            rows = len(names) or len(measured.contenders())
            task = progress.add_task(place, total=rows * len(lengths))
            curves: dict[str, measured.CostCurve] = {}
            for curves, name, n in measured.measure(where, lengths, limit=seconds, names=names or None):
                progress.update(task, advance=1, description=f"{place}: {curves[name].label}, n = {short(n)}")
        found = list(curves.values())
        show(console, f"{summary}: forward + backward, one list of n scores, 1 % relevant", found, lengths)
        text += f"\n## {summary}\n\n{tables.markdown(times(found, lengths))}\n\n{tables.markdown(growth(found))}\n"
        numbers[place] = {"machine": summary, "curves": [dataclasses.asdict(curve) for curve in found]}
    today = tables.today()
    everything = {"date": today, "command": tables.command(), "seconds": seconds, "devices": numbers}
    if markdown:
        head = f"# Complexity, measured, {today}\n\n`{tables.command()}`\n\n{READING.format(seconds=seconds)}\n"
        write_text(markdown, head + text)
    if json_file:
        write_text(json_file, json.dumps(everything, indent=1))
    if plot:
        from rankgrad.lab.figures import complexity as figure
        from rankgrad.lab.figures import style

        for file in style.save(figure.plot(everything), plot.parent, plot.stem):
            console.print(str(file), markup=False, soft_wrap=True)


READING = """n scores in one list, 1 % of them relevant (p = n / 100), float32. Times are medians of eager calls,
forward and backward; calls over half a second are made once. "> {seconds:g} s" and "out of memory" end a method's
row: its shorter lists say that the next one would exceed the limit, and the call is not made (or it was made and
did). Exponents: least squares of log time against log n over the last three times, and the same for the claimed
number of operations."""
