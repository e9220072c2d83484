"""Options of the command ``rankgrad`` itself, and what a shell completes."""

from __future__ import annotations

from typing import Annotated

import typer

import rankgrad


def _version(asked: bool) -> None:
    if asked:
        print(f"rankgrad {rankgrad.__version__}")
        raise typer.Exit


def of_the_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train directly for ranking metrics."""
