"""What the generated parts share: where the repository is, what it has, and Markdown tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def exists(module: str) -> bool:
    """Whether there is such a module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it would be in
        return False


def missing(module: str) -> str:
    """What a page says in place of a module that is not there."""
    return f'!!! warning "Not in this version yet"\n    `{module}` is being written.'


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join([_row(head), "|" + "---|" * len(head), *map(_row, rows)])
