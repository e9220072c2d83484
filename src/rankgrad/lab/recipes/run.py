"""Run a recipe: choose the folder, train (once or with several seeds), write the report."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from rankgrad import distributed
from rankgrad.lab import callbacks, recipes
from rankgrad.lab.recipes import BEFORE_TRIALS, TRIALS, resuming
from rankgrad.lab.report import page
from rankgrad.lab.training import checkpoint, machine, reuse
from rankgrad.lab.training.config import flat
from rankgrad.lab.training.errors import DataError, TrainingError, UserError, printable
from rankgrad.lab.training.log import read_table
from rankgrad.lab.training.loop import Trainer
from rankgrad.lab.training.run_files import (
    Machine,
    Result,
    SeedStatistic,
    data_notes,
    read_json,
    read_json_if_there,
)
from rankgrad.lab.training.task import Task, Training

#: Bytes that must be free where a run is written.
ROOM = 256 << 20
#: The file in the folder of a trial whose training failed: why.
FAILED = "failed.txt"
#: Settings of how data are read, which do not change what they are.
_READING = {"data.workers", "data.cache", "data.counts", "data.broken"}


def folder_for(name: str, out: str | None, *, resume: bool) -> Path:
    """``out``, or ``runs/NAME``, ``runs/NAME-2``, ...: a new one, or with ``resume`` the latest."""
    if out is not None:
        folder = Path(out)
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"--out: {folder} already has a run; --resume continues it")
        return folder
    if recipes.is_run(name):
        if not resume:
            raise UserError(
                f"RECIPE: {name} is a run; --resume continues it, --out DIR starts another one like it"
            )
        return Path(name)
    stem = Path("runs") / Path(name).stem
    number, latest, folder = 1, stem, stem
    while folder.exists():
        number, latest = number + 1, folder
        folder = stem.with_name(f"{stem.name}-{number}")
    return latest if resume else folder


def _check_place(folder: Path) -> None:
    """Check that a run can be written there, before data is read and a network trained."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"--out: expected a folder, {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out: cannot write to {place.resolve()}")
    free = shutil.disk_usage(place).free
    if free < ROOM:
        raise UserError(
            f"--out: expected {ROOM >> 20} MiB for checkpoints in {place.resolve()}, found {free / 2**20:.0f} free"
        )


def resume_command(name: str, out: str | None, seeds: int) -> str:
    """The command that continues an interrupted run."""
    folder = folder_for(name, out, resume=True)
    begun = sorted(path.parent for path in [*folder.glob("config.yaml"), *folder.glob("seed-*/config.yaml")])
    begun = begun or ([folder] if (folder / BEFORE_TRIALS).is_file() else [])
    if not begun:
        return "nothing has been trained yet"
    if seeds == 1 and begun == [folder]:
        return f"resume with: rankgrad train {shlex.quote(str(folder))} --resume"
    first, where = shlex.quote(str(begun[0])), shlex.quote(str(folder))
    several = f" --seeds {seeds}" if seeds > 1 else ""
    return f"resume with: rankgrad train {first} --out {where}{several} --resume"


def run(
    name: str,
    overrides: Sequence[str] = (),
    *,
    out: str | None = None,
    resume: bool = False,
    previous: bool = False,
    seeds: int = 1,
) -> tuple[Path, list[Result]]:
    """Train a recipe.

    Args:
        name: A recipe, a YAML file, or the folder of a run.
        overrides: ``key=value`` texts.
        out: The folder of the run.
        resume: Continue the run in the folder.
        previous: With ``resume``: from the checkpoint before the last one.
        seeds: How many runs, with the seeds ``seed``, ``seed + 1``, ...; each has a folder of its own inside.

    Returns:
        The folder and the result of each seed.
    """
    if previous and (seeds > 1 or not resume):
        raise UserError("--previous: expected --resume and a single seed; a seed's own folder is a run too")
    task, config = recipes.load(name, overrides)
    device = distributed.start(machine.device_of(config.device))
    folder = distributed.same_everywhere(folder_for(name, out, resume=resume))
    _check_place(folder)
    callbacks.build(config.callbacks)  # a wrong name or a missing package is an error before data is read
    config = task.completed(config)
    if seeds == 1 and resume and not (folder / "config.yaml").is_file() and any(folder.glob("seed-*/config.yaml")):
        raise UserError(f"--resume: {folder} was started with --seeds: give the same --seeds again")
    begun = [*folder.glob("config.yaml"), *folder.glob("seed-*/config.yaml")]
    print_note = _note_printer()
    with reuse.shared():  # the trials and all seeds read their data once
        if resume and begun:  # what was chosen stays
            given, config = config, task.as_chosen(config, recipes.load(str(begun[0].parent))[1])
            if config != given and (folder / BEFORE_TRIALS).is_file():
                resuming.same_settings(folder, given, "--resume", folder / BEFORE_TRIALS)
            chosen = data_notes(folder).get("chosen", [])
        else:
            trials = _trials(task, config, folder, device, previous=previous)
            config, chosen = task.chosen(config, device, trials, print_note)
            previous = previous and not (folder / TRIALS).is_dir()  # it was that of a trial
        if seeds == 1:
            result = _train_run(
                task,
                config,
                folder,
                device,
                resume=resume,
                previous=previous,
                chosen=chosen,
                print_note=print_note,
            )
            return folder, [result]
        results = []
        for seed in range(config.seed, config.seed + seeds):
            seeded, place = config.model_copy(update={"seed": seed}), folder / f"seed-{seed}"
            results.append(
                _train_run(task, seeded, place, device, resume=resume, chosen=chosen, print_note=print_note)
            )
    if distributed.process_index() == 0:
        checkpoint.write_text(folder / "seeds.json", json.dumps(seed_statistics(results), indent=1))
        write_report(folder)
    return folder, results


def _note_printer() -> Callable[[str], None]:
    """A function that prints a note in the first process, once however many runs have it."""
    printed: set[str] = set()

    def print_note(note: str) -> None:
        if note not in printed and distributed.process_index() == 0:
            print(printable(note), flush=True)
        printed.add(note)

    return print_note


def _trials(kind: type[Task], config: Any, folder: Path, device: torch.device, *, previous: bool) -> Training:
    """Trains for :meth:`Task.chosen`, each run in a folder of its own; one that ended before is not run again."""
    place, first = folder / TRIALS, distributed.process_index() == 0

    def train(name: str, settings: Any) -> dict[str, float]:
        run = place / name
        before = (
            read_json_if_there(run / "result.json", Result),
            (run / FAILED).is_file(),
            (run / "config.yaml").is_file(),
        )
        result, failed, begun = distributed.same_everywhere(before)
        if begun:
            resuming.same_settings(run, settings, "--resume")
            if result is not None or failed:
                return {} if failed else dict(result.last)
        if first:
            # What --resume continues, if the trials are interrupted.
            checkpoint.write_text(folder / BEFORE_TRIALS, recipes.dump(config))
            print(printable(f"to choose settings, on a part of the training data: {run}"), flush=True)
        try:
            again = previous and any(run.glob("state*.pt"))
            result = _train_run(kind, settings, run, device, resume=True, previous=again)
        except TrainingError as error:
            if first:
                checkpoint.write_text(run / FAILED, f"{error.what}\n")
            if distributed.active():  # the other processes may not have met it
                what = f"{error.what}, in a run to choose settings by ({run})"
                raise TrainingError(what, "--resume leaves it out and goes on.") from None
            print(printable(f"{run}: {error.what}"))
        except DataError as error:  # of this part of the data; of all of it the run itself will say so
            if first:
                print(printable(f"{run}: {error}"))
        if first:
            for path in (*run.glob("*.safetensors"), *run.glob("*.pt")):  # hundreds of megabytes
                path.unlink()
        metrics: dict[str, float] = distributed.same_everywhere({} if result is None else dict(result.last))
        return metrics

    return train


def _train_run(
    kind: type[Task],
    config: Any,
    folder: Path,
    device: torch.device,
    *,
    resume: bool,
    previous: bool = False,
    chosen: Sequence[str] = (),
    print_note: Callable[[str], None] = lambda note: None,
) -> Result:
    """Train one run to its end; ``print_note`` is called with each note on its data and settings."""
    if resume and (folder / "config.yaml").is_file():
        resuming.same_version(folder, kind)
        resuming.same_settings(folder, config, "--resume")
    task = kind(config, device)
    task.notes = [*task.notes, *chosen]
    described_data = task.describe() | {"chosen": list(chosen)}
    if resume:
        resuming.same_data(folder, described_data)
    trainer = Trainer(task, config, folder, device)
    if distributed.process_index() == 0:
        checkpoint.remove_parts(folder)
        for note in task.notes:
            print_note(note)
        if config.evaluate_every == "auto" and trainer.evaluate_every > 1:
            print_note(f"evaluates every {trainer.evaluate_every} epochs (evaluate_every)")
        checkpoint.write_text(folder / "data.json", json.dumps(described_data, indent=1))
        checkpoint.write_text(folder / "config.yaml", recipes.dump(config))
        described = machine.describe(device)
        if resume and (folder / "machine.json").is_file():
            described["started"] = read_json(folder / "machine.json", Machine).get("started", "")
        checkpoint.write_text(folder / "machine.json", json.dumps(described, indent=1))
    distributed.wait()
    result = trainer.fit(resume=resume, previous=previous)
    if distributed.process_index() == 0:
        checkpoint.write_text(folder / "result.json", json.dumps(vars(result), indent=1))
        write_report(folder)
    return result


def seed_statistics(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, of the best evaluations and of the last ones."""
    rows = []
    for which in ("best", "last"):
        for metric in getattr(results[0], which):
            if metric in ("step", "epoch"):
                continue
            values = [getattr(result, which)[metric] for result in results]
            found = {"mean": statistics.fmean(values), "deviation": statistics.stdev(values), "values": values}
            rows.append({"metric": metric, "of": which, **found})
    return rows


def below_start(folder: Path, results: Sequence[Result]) -> list[str]:
    """Lines for each run whose network was better before training than after it."""
    notes = data_notes(folder)
    metric, advice = notes.get("headline", ""), notes.get("advice", "try a lower lr")
    lines = []
    for number, result in enumerate(results, 1):
        which = "this run" if len(results) == 1 else f"run {number} of {len(results)}"
        if result.best.get("step") == 0 < result.last.get("step", 0):
            of = "" if len(results) == 1 else f" of {which}"
            lines.append(
                f"best.safetensors{of} is the network before training; the trained one is last.safetensors"
            )
        if metric in result.first and result.last[metric] < result.first[metric]:
            values = f"{metric} {result.first[metric]:.1f} before training, {result.last[metric]:.1f} after it"
            lines.append(f"{which} ended below its start: {values}; {advice}")
    return lines


def chosen_by(folder: Path) -> str:
    """What chose the best evaluation."""
    metric = data_notes(folder).get("headline", "")
    return f", by {metric}{'' if metric.startswith('validation') else ' on the test part'}" if metric else ""


def other_data(folder: Path, beside: Sequence[Path]) -> list[str]:
    """A line for each other run whose data, or the split of them, differ from this run's."""

    def known(run: Path) -> dict[str, Any]:
        settings = flat(recipes.load(str(run))[1].model_dump(mode="json", include={"data"}))
        return {k: v for k, v in settings.items() if k not in _READING} | data_notes(run).get("counts", {})

    lines, own = [], known(folder) if beside else {}
    for other in beside:
        found = known(other)
        differ = [
            f"{key} {found.get(key)!r} (this run: {own.get(key)!r})"
            for key in dict.fromkeys([*own, *found])
            if own.get(key) != found.get(key)
        ]
        if differ:
            lines.append(
                f"The data differ, so the rows may not compare. {page.name_of(other)}: {'; '.join(differ)}"
            )
    return lines


def _unfinished(steps: Sequence[Mapping[str, float]]) -> str:
    last = f"Its last step is {steps[-1]['step']:.0f}" if steps else "It has no step yet"
    return f"This run is not finished: it was interrupted, or is still training. {last}; --resume continues it."


def time_of(folder: Path, result: Result) -> str:
    """How long a run took."""
    trials = [read_json_if_there(path, Result) for path in folder.glob(f"{TRIALS}/*/result.json")]
    before = sum(trial.seconds for trial in trials if trial is not None)
    return machine.duration(result.seconds) + (f", after trials of {machine.duration(before)}" if before else "")


def _time(folder: Path, result: Result | None) -> dict[str, str]:
    if result is None:
        return {"time": "not finished"}
    return {"time": time_of(folder, result), "speed": f"{result.speed:,.0f} items/s in training"}


def write_report(folder: Path, beside: Sequence[Path] = ()) -> Path:
    """The report of a run, from the files in its folder, with others beside it; of several seeds, that of each."""
    for other in beside:
        if not (other / "config.yaml").is_file():
            raise UserError(f"--beside: no run in {str(other)!r} (it has no config.yaml)")
        if not (other / "result.json").is_file():
            raise UserError(f"--beside: the run in {str(other)!r} is not finished (it has no result.json)")
    runs = sorted(path.parent for path in folder.glob("seed-*/config.yaml"))
    if runs and (folder / "seeds.json").is_file():
        if beside:
            raise UserError(f"--beside: expected a single run as RUN, received several; one is {runs[0]}")
        for one in runs:
            write_report(one)
        return page.write_overview(folder, folder.name, read_json(folder / "seeds.json", list[SeedStatistic]))
    if not (folder / "config.yaml").is_file():
        resumed = (
            f"; interrupted in its {TRIALS}: --resume continues it" if (folder / BEFORE_TRIALS).is_file() else ""
        )
        raise UserError(f"RUN: no run in {str(folder)!r} (it has no config.yaml{resumed})")
    task, config = recipes.load(str(folder))
    for other in beside:
        if recipes.load(str(other))[0] is not task:
            raise UserError(f"--beside: expected a run of the same task as {folder}, received {other}")
    described = read_json_if_there(folder / "machine.json", Machine) or {}
    result = read_json_if_there(folder / "result.json", Result)
    first, *others = task.report_sections(folder, config, beside)
    steps = read_table(folder / "steps.csv", ("step", "loss"))
    lines = below_start(folder, [result]) if result is not None else [_unfinished(steps)]
    lines += other_data(folder, beside)
    first = first[0], "".join(f"<p>{escape(line)}</p>" for line in lines) + first[1]
    return page.write_report(
        folder,
        title=f"rankgrad: {folder.name}",
        settings=flat(config.model_dump(mode="json")),
        steps=steps,
        evaluations=read_table(folder / "evaluations.csv", ("step", "epoch")),
        machine={**described, **_time(folder, result)},
        sections=[first, *others],
    )
