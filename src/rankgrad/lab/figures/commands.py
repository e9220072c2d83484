"""``rankgrad figure``: the figures of the paper and of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankgrad.lab.training.config import chosen
from rankgrad.lab.training.errors import UserError, printable


def figure(
    name: Annotated[str, typer.Argument(help="A figure, 'all', or 'ls' for a list of them.")],
    out: Annotated[Path, typer.Option(help="The folder to write NAME.png, NAME.svg and NAME.md to.")] = Path(
        "figures"
    ),
    run: Annotated[
        Path | None, typer.Option(help="A run's folder, for batch-bias and retrieval-examples.")
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option(help="An .npz with `embeddings` and `labels` (or `names`), for batch-bias.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Result tables: a file or a folder, for ablations and complexity.")
    ] = None,
) -> None:
    """Draw a figure as PNG and SVG with its caption beside it. Some read a run or result tables."""
    from rich.console import Console

    from rankgrad.lab.figures.catalogue import FIGURES, make
    from rankgrad.lab.figures.drawing import FigureInputs

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if name == "ls":
        for known, line in FIGURES.items():
            print(f"{known:20} {line}")
        return
    chosen("NAME", name, ["all", "ls", *FIGURES])
    inputs = FigureInputs(run, embeddings, results, tell=lambda line: console.print(printable(line), markup=False))
    for wanted in FIGURES if name == "all" else [name]:
        try:
            drawings = make(wanted, inputs)
        except UserError as error:
            if name != "all":
                raise
            console.print(printable(f"{wanted}: left out, {error}"), markup=False)
            continue
        for drawing in drawings:
            files = drawing.save(out)
            print(printable(", ".join(map(str, files))), f"{drawing.text}\n", sep="\n")


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(figure)
