"""How the tables of ``rankgrad bench`` are shown: as text, as Markdown, and what they were measured on."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

#: A header and its rows.
Cells = list[list[str]]


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
