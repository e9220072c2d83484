"""``rankgrad sodeep train``: make a sorter for lists of a given length."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

_TESTED = 2000


def train(
    length: Annotated[int, typer.Option(help="The longest list it will sort.", min=1)],
    out: Annotated[Path, typer.Option(help="The file to write: NAME.safetensors.")],
    architecture: Annotated[str, typer.Option(help="lstm or cnn.")] = "lstm",
    hidden: Annotated[int | None, typer.Option(help="Units (lstm, each direction) or channels (cnn).")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 3000,
    batch_size: Annotated[int, typer.Option(help="Lists in a step.", min=1)] = 128,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-2,
    seed: Annotated[int, typer.Option(help="Seed of the first weights and the lists.", min=0)] = 0,
) -> None:
    """Train a network that maps scores to ranks. Minutes on two cores for a few dozen items.

    The file appears when the training is over, whole. If it is there already, made with the same settings, nothing
    is trained; made with others it is replaced.
    """
    from rankgrad.lab import sodeep
    from rankgrad.lab.training import log

    begin = time.monotonic()
    with log.progress("training", steps, 0, show=True) as bar:
        try:
            sorter = sodeep.train(
                length,
                architecture=architecture,
                hidden=hidden,
                layers=layers,
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                seed=seed,
                out=out,
                progress=lambda step, error: bar.advance(step, f"mean error {error:.2f} ranks"),
            )
        except (ValueError, OSError) as fault:
            raise typer.BadParameter(str(fault)) from None
    error, constant = mean_errors(sorter, length)
    print(f"wrong by {error:.2f} ranks on {_TESTED:,} new lists (the mean rank for all: {constant:.2f})")
    print(f"{out} in {time.monotonic() - begin:.0f} s")


def mean_errors(sorter: torch.nn.Module, length: int) -> tuple[float, float]:
    """Mean distance to the true ranks on new lists: of the sorter, and of the mean rank for every item."""
    from rankgrad.engine.ranker import exact_ranks
    from rankgrad.lab.sodeep import synthetic_lists

    # A seed no training has: seeds of trainings are the small numbers people choose.
    scores = synthetic_lists(_TESTED, length, torch.Generator().manual_seed(2**40 + 1))
    true = exact_ranks(scores, None, "average")
    with torch.no_grad():
        error = (sorter(scores) * length - true).abs().mean()
    return float(error), float((true - (length + 1) / 2).abs().mean())


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    verbs = typer.Typer(help="Train sorting networks for the SoDeep baseline.", no_args_is_help=True)
    verbs.callback()(lambda: None)  # without one, typer would drop the name of the only verb
    verbs.command()(train)
    app.add_typer(verbs, name="sodeep")
