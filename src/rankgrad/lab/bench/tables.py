"""What the commands of ``rankgrad bench`` share: options, command and date, tables as text and Markdown."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from rankgrad.lab.training.config import chosen

#: A header and its rows.
Cells = list[list[str]]

DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, or both where there is a GPU")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 = torch's choice")]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", help="write the tables here as Markdown")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write the numbers here as JSON")]


def devices(device: str, threads: int) -> list[str]:
    """The devices that the options mean, with as many CPU threads."""
    if threads:
        torch.set_num_threads(threads)
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return available if chosen("--device", device, ["both", *available]) == "both" else [device]


def command() -> str:
    """The command that runs now."""
    return "rankgrad " + " ".join(sys.argv[1:])


def today() -> str:
    """``2026-11-18``."""
    return datetime.date.today().isoformat()


def in_time(seconds: float | None) -> str:
    """``3.2 s``, ``12 ms``, ``90 us``, or a dash."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def in_mib(size: int | None) -> str:
    """``1,024 MiB``, or a dash."""
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"


def show(console: Console, title: str, cells: Cells) -> None:
    """Print a table."""
    shown = Table(*cells[0], title=title)
    for line in cells[1:]:
        shown.add_row(*line)
    console.print(shown)


def markdown(cells: Cells) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])
