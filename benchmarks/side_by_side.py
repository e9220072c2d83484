"""Many trainings on one device, some at a time, each in a process that goes on to the next when it is done."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rankgrad.lab import recipes
from rankgrad.lab.recipes import resuming, run
from rankgrad.lab.training import machine, reuse
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import TrainingError, UserError
from rankgrad.lab.training.log import in_words
from rankgrad.lab.training.task import Task

#: In the folder of a run whose training went wrong: what was said last. It is a result too, and not repeated.
FAILED = "failed.txt"


class Job(NamedTuple):
    """A run: ``rankgrad train RECIPE SETTINGS`` into a folder."""

    row: str
    seed: int
    recipe: str
    settings: tuple[str, ...]
    folder: Path


def without_traceback(main: Callable[[], None]) -> None:
    """Run the command; wrong arguments or data end it with a message instead of a traceback."""
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"{error}")


def check_rows(wanted: str, rows: Iterable[str]) -> None:
    """Require that a regular expression matches one of the rows at least."""
    try:
        found = any(re.search(wanted, row) for row in rows)
    except re.error as error:
        raise UserError(f"--rows: expected a regular expression, received {wanted!r} ({error})") from None
    if not found:
        raise UserError(f"--rows: no row matches {wanted!r}; there are {', '.join(rows)}")


def at_least_one(text: str) -> int:
    """A number of processes."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, received {text}")
    return number


def folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text).expanduser()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder {text!r}")
    return path


def folder_of(out: Path, row: str, seed: int) -> Path:
    """Where a run goes."""
    return out / re.sub(r"\W+", "-", row).strip("-") / f"seed-{seed}"


def add_arguments(parser: argparse.ArgumentParser, *, out: str, epochs: int, seeds: int) -> None:
    """The options that all tables of trainings have."""
    parser.add_argument("settings", nargs="*", help="settings for every row")
    parser.add_argument("--data")
    add_running_arguments(parser, out=out, epochs=epochs, seeds=seeds)


def add_running_arguments(parser: argparse.ArgumentParser, *, out: str, epochs: int, seeds: int) -> None:
    """How many runs, where, and for how long."""
    parser.add_argument("--weights", default="library")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--rows", default=".", help="a regular expression")
    parser.add_argument("--parallel", type=at_least_one, default=1, help="runs at a time on the device")
    parser.add_argument("--mps", action="store_true", help="start the multi-process service around the runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, to go on in another call")
    parser.add_argument("--keep", action="store_true", help="keep the weights of finished runs")
    parser.add_argument("--table", action="store_true", help="only write the table of what is finished")


@cache
def _load(recipe: str, settings: tuple[str, ...]) -> tuple[type[Task], Any]:
    """A recipe with its settings; asked for anew after every run, hundreds of times."""
    return recipes.load(recipe, settings)


@cache
def _check_ended(folder: Path, recipe: str, settings: tuple[str, ...]) -> None:
    """A run that ended must have these settings, or the table would mix them."""
    task, config = _load(recipe, settings)
    saved = recipes.load(str(folder))[1]
    resuming.same_settings(folder, task.as_chosen(task.completed(config), saved), "--out")


def jobs_of(args: argparse.Namespace, recipe: str, rows: dict[str, str], every: Sequence[str]) -> list[Job]:
    """All chosen rows and seeds that have not ended, seed by seed."""
    jobs = [
        Job(
            row,
            seed,
            recipe,
            (*every, *settings.split(), f"seed={seed}"),
            folder_of(args.out, row, seed),
        )
        for seed in range(args.seed, args.seed + args.seeds)
        for row, settings in rows.items()
        if re.search(args.rows, row)
    ]
    waiting = []
    for job in jobs:
        given = (*job.settings, *args.settings)
        if args.settings and _load(job.recipe, job.settings)[1] != _load(job.recipe, given)[1]:
            told = " ".join(args.settings)
            raise UserError(f"settings: expected what no row sets itself, received {told}; see row {job.row!r}")
        if ended(job.folder):
            _check_ended(job.folder, job.recipe, job.settings)
        else:
            waiting.append(job)
    return waiting


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """NVIDIA's multi-process service: kernels of several processes run side by side instead of in turns."""
    if wanted and shutil.which("nvidia-cuda-mps-control") is None:
        print("no multi-process service on this machine: the runs take turns", flush=True)
        wanted = False
    if not wanted:
        yield
        return
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


def _work(jobs: Connection, threads: int) -> None:
    """Take jobs until there are none; the images are read, and the network compiled, once for all of them."""
    torch.set_num_threads(threads)
    with reuse.shared():
        while (job := jobs.recv()) is not None:
            job.folder.mkdir(parents=True, exist_ok=True)
            print(f"began {job.row}, seed {job.seed}", flush=True)
            with (job.folder / "output.txt").open("a") as output, redirect_stdout(output), redirect_stderr(output):
                try:
                    run.run(job.recipe, list(job.settings), out=str(job.folder), resume=True)
                    how = told(job.folder)
                except TrainingError as error:
                    print(error)
                    write_text(job.folder / FAILED, f"{error}\n")
                    how = f"failed: {error}"
                except Exception:  # of the machine or the program, not of the loss: tried again in the next call
                    traceback.print_exc()
                    how = f"FAILED, see {job.folder}/output.txt"
            print(f"ended {job.row}, seed {job.seed}: {how}", flush=True)
            jobs.send("ended")


def told(folder: Path) -> str:
    """How a finished run ended, in a line."""
    result = json.loads((folder / "result.json").read_text())
    return f"{in_words(result['last'])}  {result['speed']:,.0f} images/s  {result['seconds']:.0f} s"


def train(
    jobs: Sequence[Job],
    *,
    parallel: int,
    mps: bool,
    minutes: float,
    further: Callable[[], Sequence[Job]] = lambda: (),
    keep: bool = False,
) -> None:
    """Do the jobs, ``parallel`` at a time; one that fails is reported, what is late is stopped.

    Args:
        jobs: What to do, in this order.
        parallel: Processes.
        mps: Whether to start the multi-process service around them.
        minutes: What is not done by then is stopped; it goes on from its checkpoint in another call.
        further: Asked whenever a job has ended: all jobs that are open now, those that depend on results among
            them, in the order in which to do them. Those that were begun before are not begun again.
        keep: Whether the weights of runs that ended stay. A ResNet-50 leaves half a gigabyte.
    """
    end = time.monotonic() + 60 * minutes
    threads = max(1, (os.cpu_count() or 1) // max(parallel, 1))
    context = multiprocessing.get_context("spawn")
    begun: set[Path] = set()
    doing: dict[int, Job] = {}
    workers: dict[int, tuple[Any, Connection]] = {}  # process, and where it takes jobs and says that they ended
    with multi_process_service(mps):
        while True:
            waiting = {job.folder: job for job in (*jobs, *further()) if job.folder not in begun}
            free = [number for number in range(parallel) if number not in doing]
            for number, job in zip(free, waiting.values(), strict=False):
                if number not in workers or workers[number][1].closed:
                    ours, theirs = context.Pipe()
                    worker = context.Process(target=_work, args=(theirs, threads))
                    worker.start()
                    theirs.close()  # so that ours ends when the process does
                    workers[number] = worker, ours
                begun.add(job.folder)
                doing[number] = job
                workers[number][1].send(job)
            number = _next({n: workers[n][1] for n in doing}, doing, end) if doing else None
            if number is None:
                break
            if not keep:
                _leave_out_weights(doing[number].folder)
            del doing[number]
        for number, (worker, asked) in workers.items():
            if number in doing:
                print("out of time: stopped a run, the next call goes on from its checkpoint", flush=True)
                worker.terminate()
            elif not asked.closed:
                asked.send(None)
        for worker, _ in workers.values():
            worker.join()


def _next(said: dict[int, Connection], doing: dict[int, Job], end: float) -> int | None:
    """The worker whose job ended next; None when the time is up. One whose process died is reported."""
    left = None if end == float("inf") else max(0.0, end - time.monotonic())
    ready = wait(list(said.values()), left)
    for number, its in said.items():
        if its in ready:
            try:
                its.recv()
            except EOFError:
                print(f"ended {doing[number].row}, seed {doing[number].seed}: its process died", flush=True)
                its.close()  # another process takes its place
            return number
    return None


def _leave_out_weights(folder: Path) -> None:
    """Remove the weights of a run that ended; one that did not keeps what it goes on from."""
    if ended(folder):
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.pt")]:
            path.unlink()


def ended(folder: Path) -> bool:
    """Whether a run is over: finished, or its training went wrong."""
    return (folder / "result.json").is_file() or (folder / FAILED).is_file()


def ended_of(out: Path, row: str) -> list[Path]:
    """Folders of a row's runs that ended."""
    return [folder for folder in sorted(folder_of(out, row, 0).parent.glob("seed-*")) if ended(folder)]


def results_of(out: Path, row: str) -> list[Path]:
    """Folders of a row's finished runs."""
    return [folder for folder in ended_of(out, row) if (folder / "result.json").is_file()]


def seeds_of(out: Path, row: str) -> str:
    """How many runs of a row finished, and how many failed: ``3``, ``2, 1 failed``."""
    finished, all_ended = len(results_of(out, row)), len(ended_of(out, row))
    return f"{finished}, {all_ended - finished} failed" if all_ended > finished else f"{finished}"


def mean_of(values: list[float]) -> str:
    """``71.2 ± 0.3``."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def machine_of(out: Path) -> dict[str, str]:
    """What the runs ran on; the table may be made elsewhere."""
    described = [json.loads(path.read_text()) for path in out.glob("*/seed-*/machine.json")]
    return min(described, key=lambda one: one["started"], default=machine.describe(torch.device("cpu")))
