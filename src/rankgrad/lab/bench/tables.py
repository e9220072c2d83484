"""How the tables of ``rankgrad bench`` are shown: as text, as Markdown, and what they were measured on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
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


def machine(device: torch.device) -> str:
    """Hardware and versions in a line."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.is_file() else []
        models = [x for x in lines if x.startswith("model name")]
        name = f"{models[0].split(':')[1].strip() if models else name}, {torch.get_num_threads()} thread(s)"
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for package in ("triton", "numba"):
        try:
            versions.append(f"{package} {__import__(package).__version__}")
        except ModuleNotFoundError:
            versions.append(f"{package} absent")
    return f"{name}; {', '.join(versions)}"
