"""``rankgrad bench reach``: windows beside lambda, embeddings without the matrix, plain calls; with their goals.

The most important sections come first, and the Markdown file is written again, atomically, after every line: a run
that is killed leaves what it has measured. A section that fails is noted, and the next one runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor

from rankgrad.engine import dispatch, reference
from rankgrad.lab.bench import blocks, long_lists, retrieval, tables, timing
from rankgrad.lab.bench.lines import Measurement, cells_of
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.losses import RecallLoss, average_precision_loss
from rankgrad.metrics import average_precision

#: The reaches; the scores are normal, so that a window of 1 is what "automatic" comes to.
REACHES: dict[str, dict[str, Any]] = {"lam": {"lam": 0.5}, "window": {"window": 1.0}, "automatic": {}}
LONGEST_CHECKED = 1_000_000  # on a CPU the reference takes a minute for ten times as many
DIFFERS = "differs from the reference"


class Sizes(NamedTuple):
    """What is measured."""

    lengths: tuple[int, ...] = (1_000_000, 10_000_000)
    dense: int = 10_000_000
    cases: tuple[blocks.Case, ...] = blocks.CASES
    batch: int = 512
    short: tuple[int, int] = (8000, 40)
    wide: tuple[int, int] = (4096, 64)


SMALL = Sizes((9000,), 9000, blocks.SMALL, 64, (80, 40), (160, 64))


def _gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _reaches(
    what: str, losses: dict[str, Callable[[Tensor, Tensor], Tensor]], data: tuple[Tensor, Tensor], checked: bool
) -> Iterator[Measurement]:
    """A line for each reach, beside the first one's: of the device's work alone where there is a GPU."""
    device = data[0].device
    steps: dict[str, timing.Run] = {}
    wrong = set()
    for name, loss in losses.items():
        steps[name] = step = long_lists.step_of(loss, *data)
        if checked:
            found = step().clone()
            with dispatch.forced(reference):
                wrong |= {name} - ({name} if torch.equal(step(), found) else set())
    if _gpu(device):
        steps = {name: timing.recorded(step) for name, step in steps.items()}
    taken = timing.side_by_side(steps, device)
    first = next(iter(losses))
    for name in losses:
        line = Measurement(f"{what}: {name}", taken[name], fault=DIFFERS if name in wrong else "")
        if name != first:
            line.other, line.beside, line.most_ratio = first, taken[first], 1.3
        yield line


def windows(device: torch.device, sizes: Sizes) -> Iterator[Measurement]:
    """AP of one long list by lambda, by a window, and automatic."""
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        name: functools.partial(average_precision_loss, margin=long_lists.MARGIN, **given)
        for name, given in REACHES.items()
    }
    for n in sizes.lengths:
        for relevant in ("1,000", "1 %"):
            data = long_lists.make_list(n, long_lists.relevant_counts(n)[relevant], device)
            yield from _reaches(
                f"AP, one list of {n:,}, {relevant} relevant", losses, data, _gpu(device) or n <= LONGEST_CHECKED
            )


def embeddings(device: torch.device, sizes: Sizes) -> Iterator[Measurement]:
    """Large batches and memories on a GPU; on any device a batch of 512 by each reach."""
    if _gpu(device):
        yield from blocks.lines(device, sizes.cases)
    reaches: dict[str, dict[str, Any]] = {"lam": {"lam": 0.2}, "window": {"window": 0.1}, "automatic": {}}
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        name: RecallLoss(**given, margin=0.05).to(device) for name, given in reaches.items()
    }
    torch.manual_seed(0)
    data = retrieval.batch_of(sizes.batch, device)
    yield from _reaches(f"recall, {sizes.batch} embeddings", losses, data, checked=False)


def calls(device: torch.device, sizes: Sizes) -> Iterator[Measurement]:
    """What plain calls cost with Python's share, forward and backward."""
    gpu, alone_name = _gpu(device), "similarity alone"
    torch.manual_seed(0)
    batch = retrieval.batch_of(128, device)
    steps = {alone_name: long_lists.step_of(retrieval.similarity_alone, *batch)}
    for name, given in REACHES.items():
        steps[name] = long_lists.step_of(RecallLoss(**given).to(device), *batch)
    taken = timing.side_by_side(steps, device)
    alone = taken.pop(alone_name)
    yield Measurement(f"128 embeddings: {alone_name}, eager", alone)
    for name, seconds in taken.items():
        over = 4e-4 if gpu else None
        yield Measurement(f"128 embeddings: recall {name}, eager", seconds, alone_name, alone, most_over=over)
    n = sizes.lengths[0]
    data = long_lists.make_list(n, 1000, device)
    for name, given in REACHES.items():
        step = long_lists.step_of(functools.partial(average_precision_loss, **given), *data)
        yield Measurement(
            f"one list of {n:,}: AP {name}, eager", timing.seconds(step, device), most_time=4e-4 if gpu else None
        )
        if gpu:
            launches = timing.launches(step)
            yield Measurement(f"the same, replayed ({launches} launches)", timing.graph_seconds(step, device))


def dense(device: torch.device, sizes: Sizes) -> Iterator[Measurement]:
    """Half of a long list relevant, and no hint."""
    data = long_lists.make_list(sizes.dense, sizes.dense // 2, device)
    steps = {"plain": long_lists.step_of(long_lists.plain_loss, *data)}
    for name, given in REACHES.items():
        steps[name] = long_lists.step_of(
            functools.partial(average_precision_loss, margin=long_lists.MARGIN, **given), *data
        )
    taken = timing.side_by_side(steps, device, budget=0.2)
    plain = taken.pop("plain")
    for name, seconds in taken.items():
        what = f"AP, one list of {sizes.dense:,}, 50 % relevant, no hint: {name}"
        yield Measurement(what, seconds, "plain", plain, most_ratio=1.0 if name == "lam" else None)


def batches(device: torch.device, sizes: Sizes) -> Iterator[Measurement]:
    """Many short lists: the metric beside the loss, float64 beside the reference."""
    torch.manual_seed(0)
    scores = torch.randn(sizes.short, device=device)
    relevance = torch.rand(sizes.short, device=device) < 0.1
    loss = functools.partial(average_precision_loss, lam=0.5)
    taken = timing.side_by_side(
        {
            "loss": long_lists.step_of(loss, scores, relevance),
            "metric": lambda: average_precision(scores, relevance),
        },
        device,
    )
    what = f"metrics.average_precision, {list(sizes.short)}"
    most = None if _gpu(device) else 1.5  # the goal is a CPU's
    yield Measurement(what, taken["metric"], "AP loss with gradient", taken["loss"], most_ratio=most)
    wide = torch.randn(sizes.wide, device=device, dtype=torch.float64)
    step = long_lists.step_of(loss, wide, torch.rand(sizes.wide, device=device) < 0.1)

    def by_reference() -> None:
        with dispatch.forced(reference):
            step()

    taken = timing.side_by_side({"engine": step, "reference": by_reference}, device)
    what = f"AP, float64 {list(sizes.wide)}"
    yield Measurement(what, taken["engine"], "the reference engine", taken["reference"], most_ratio=1.3)


SECTIONS: dict[str, Callable[[torch.device, Sizes], Iterator[Measurement]]] = {
    "Windows beside lambda": windows,
    "Embeddings without the similarity matrix": embeddings,
    "Plain calls": calls,
    "Half of the items relevant": dense,
    "Many short lists": batches,
}


def reach(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: tables.ThreadsOption = 0,
    rehearse: Annotated[bool, typer.Option(help="small inputs, to see that everything runs")] = False,
    markdown: tables.MarkdownOption = None,
) -> None:
    """Measure windows beside lambda, losses without the matrix and the cost of plain calls, beside their goals."""
    if threads:
        torch.set_num_threads(threads)
    place, begin = machine.device_of(device), time.monotonic()
    head = f"# rankgrad bench reach, {tables.today()}\n\n"
    head += f"`{tables.command()}`; {machine.summary(place)}. Forward and backward. "
    head += 'The column "goal" has the limit that a row must meet; "eager" includes the time of Python.\n'
    done: dict[str, list[Measurement]] = {}
    console = Console()
    for title, measure in SECTIONS.items():
        found = done[title] = []
        try:
            for line in measure(place, SMALL if rehearse else Sizes()):
                found.append(line)
                console.print(" | ".join(line.cells()), soft_wrap=True, highlight=False)
                _write(markdown, head, done, begin)
        except Exception as error:  # what was measured stays, and what comes next may still run
            found.append(Measurement(title, fault=f"failed: {type(error).__name__}: {str(error)[:300]}"))
            console.print_exception(max_frames=8)
            _write(markdown, head, done, begin)
        if place.type == "cuda":
            torch.cuda.empty_cache()
    if any(line.fault for lines in done.values() for line in lines):
        raise typer.Exit(1)


def _write(markdown: Path | None, head: str, done: dict[str, list[Measurement]], begin: float) -> None:
    if markdown is None:
        return
    tables_of = "".join(f"\n## {title}\n\n{tables.markdown(cells_of(lines))}\n" for title, lines in done.items())
    lines = [line for found in done.values() for line in found if line.met is not None]
    met = f"{sum(line.met is True for line in lines)} of {len(lines)} goals met"
    write_text(markdown, f"{head}{tables_of}\n{met}, in {time.monotonic() - begin:.0f} s.\n")
