"""The verbs on recipes and runs: train, ls, show, eval, report."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rankgrad.lab import recipes
from rankgrad.lab.tasks import TASKS, task_class
from rankgrad.lab.training.config import flat, meanings
from rankgrad.lab.training.errors import UserError, printable
from rankgrad.lab.training.run_files import Result

_OUT = Console(soft_wrap=True, highlight=False)


def _root(data: str | None) -> list[str]:
    """--data as a setting: quoted, for a path may look like a number, have a # or bytes that are no UTF-8."""
    if data is None:
        return []
    quoted = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in data)
    return [f'data.root="{quoted}"']


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe (rankgrad ls), a YAML file, or the folder of a run.",
            autocompletion=recipes.recipe_names,
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, e.g. lr=1e-5 loss.lam=4.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The folder, or the file, of the data set.")] = None,
    out: Annotated[str | None, typer.Option(help="The folder of the run; default: a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint, exactly.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", help="With --resume: from the checkpoint before the last one.")
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="How many runs, each with the next seed; reports mean and deviation."),
    ] = 1,
) -> None:
    """Train a recipe. Several processes: torchrun --nproc-per-node N -m rankgrad train ..."""
    from rankgrad import distributed
    from rankgrad.lab.recipes import run
    from rankgrad.lab.training.output import ignoring_write_errors

    overrides = [*(settings or []), *_root(data)]
    with ignoring_write_errors():
        try:
            folder, results = run.run(recipe, overrides, out=out, resume=resume, previous=previous, seeds=seeds)
        except KeyboardInterrupt as error:
            status = 128 + getattr(error, "number", signal.SIGINT)
            message = f"interrupted; {run.resume_command(recipe, out, seeds)}"
            raise UserError(message, status=status) from None
        if distributed.process_index() == 0:
            _tell(folder, results)


def _tell(folder: Path, results: list[Result]) -> None:
    """What came out of a run, or of one with each seed."""
    from rankgrad.lab.recipes import run
    from rankgrad.lab.training import log

    if len(results) > 1:
        names = log.labels(results[0].best)
        for row in run.seed_statistics(results):
            _OUT.print(f"{names[row['metric']]} ({row['of']}): {row['mean']:.2f} +- {row['deviation']:.2f}")
    else:
        (result,) = results
        _OUT.print(f"best  {log.in_words(result.best)}  (epoch {result.best['epoch']:.0f}{run.chosen_by(folder)})")
        _OUT.print(f"last  {log.in_words(result.last)}  in {run.time_of(folder, result)}")
        _OUT.print(f"training speed without evaluations: {result.speed:,.0f} items/s")
    _OUT.print(printable(f"report: {folder / 'report.html'}"), markup=False)
    for line in run.below_start(folder, results):
        _OUT.print(line, markup=False)


def ls() -> None:
    """List recipes, losses and data sets."""
    listings = {"recipe": {name: recipes.summary(name) for name in recipes.recipe_names()}}
    for name in TASKS:
        listings |= {f"{name}: {kind}": entries for kind, entries in task_class(name).listing().items()}
    for kind, entries in listings.items():
        table = Table(kind, "", box=None, header_style="bold")
        for name, line in entries.items():
            table.add_row(name, line)
        _OUT.print(table)
        _OUT.print()


def show(recipe: Annotated[str, typer.Argument(help="A recipe, a YAML file, or the folder of a run.")]) -> None:
    """Print a recipe, then every setting with its value and its meaning."""
    print(recipes.recipe_text(recipe), end="")
    print("\n# Every setting, its value here, and what it means:\n#")
    for key, value, meaning in explained(recipe):
        print(f"#   {f'{key} = {value}':<34} {meaning}".rstrip())


def explained(recipe: str) -> list[tuple[str, str, str]]:
    """(key, value, meaning) of every setting of a recipe."""
    task, config = recipes.load(recipe)
    more = task.loss_arguments(config)
    given = flat(config.model_dump(mode="json"))
    values = given | {key: default for key, (default, _) in more.items() if key not in given}
    meaning_of = meanings(task.config_class) | {key: meaning for key, (_, meaning) in more.items()}
    sections = list(dict.fromkeys(key.partition(".")[0] for key in meaning_of))
    keys = sorted(values, key=lambda key: sections.index(key.partition(".")[0]))
    return [(key, _value(values[key]), meaning_of.get(key, "")) for key in keys]


def _value(value: object) -> str:
    """As a command line takes it."""
    return "null" if value is None else json.dumps(value) if not isinstance(value, str) else value


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run, for its best weights, or a checkpoint in it.")],
    settings: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.")] = None,
    data: Annotated[str | None, typer.Option(help="The folder, or the file, of the data set.")] = None,
) -> None:
    """Measure a run on the test part of its data set."""
    from rankgrad.lab.training import log, machine

    overrides = [*(settings or []), *_root(data)]
    task, checkpoint = recipes.of_checkpoint(recipes.checkpoint_of(run), overrides)
    device = machine.device_of(checkpoint.config.device)
    _OUT.print(log.in_words(task.evaluate_checkpoint(checkpoint, device)))


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with; may be repeated.")
    ] = None,
) -> None:
    """Write the report of a run again, on request compared with other runs."""
    from rankgrad.lab.recipes.run import other_data, write_report

    written = write_report(run, beside or [])
    for line in other_data(run, beside or []):
        _OUT.print(printable(line), markup=False)
    _OUT.print(printable(f"report: {written}"), markup=False)


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (train, ls, show, report):
        app.command()(verb)
    app.command("eval")(evaluate)
