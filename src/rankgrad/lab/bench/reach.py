"""``rankgrad bench reach``: a window beside lambda, for the same lists, and what a plain call costs."""

from __future__ import annotations

import datetime
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from rankgrad.engine import dispatch, reference
from rankgrad.lab.bench import blocks, long_lists, retrieval, tables, timing
from rankgrad.lab.bench.tables import Cells, in_time
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.losses import RecallLoss, average_precision_loss, recall_loss

LENGTHS = (1_000_000, 10_000_000)
BATCHES = (512, 4096)
#: Queries, candidates if they are others, and torch's precision of float32 products ("high": TF32 on a GPU).
EMBEDDINGS = ((16_384, 0, "highest"), (65_536, 0, "high"), (4096, 1_000_000, "high"))
#: The reaches; the scores are normal, so that a window of 1 is what "automatic" comes to.
REACHES: dict[str, dict[str, Any]] = {"lam": {"lam": 0.5}, "window": {"window": 1.0}, "automatic": {}}

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Row:
    """One loss on one input; times in seconds, None where not measured."""

    lists: str
    relevant: str
    reach: str
    eager: float | None
    replay: float | None
    plain: float | None = None
    equal: bool = True

    @property
    def time(self) -> float | None:
        """What the device needs: the replay, or on a CPU the call."""
        return self.eager if self.replay is None else self.replay


def _measure(lists: str, relevant: str, reach: str, loss: Loss, data: tuple[Tensor, Tensor]) -> Row:
    device = data[0].device
    step = long_lists.step_of(loss, *data)
    with dispatch.forced(reference):
        expected = step().clone()
    if not torch.equal(step(), expected):
        return Row(lists, relevant, reach, None, None, equal=False)
    replay = timing.graph_seconds(step, device) if device.type == "cuda" else None
    return Row(lists, relevant, reach, timing.seconds(step, device, budget=0.2), replay)


def _list_rows(device: torch.device, longest: int) -> Iterator[Row]:
    for n in (n for n in LENGTHS if n <= longest):
        for name in ("1,000", "1 %", "50 %"):
            p = long_lists.relevant_counts(n)[name]
            data = long_lists.make_list(n, p, device)
            hints = {"": None, ", max_relevant": p} if name == "50 %" and device.type == "cuda" else {"": None}
            plain = None
            if name == "50 %":
                plain = timing.seconds(long_lists.step_of(long_lists.plain_loss, *data), device, budget=0.2)
            for (suffix, hint), (reach, given) in itertools.product(hints.items(), REACHES.items()):
                loss = functools.partial(
                    average_precision_loss, margin=long_lists.MARGIN, max_relevant=hint, **given
                )
                row = _measure(f"one list of {n:,}", name + suffix, reach, loss, data)
                row.plain = plain
                yield row


def _batch_rows(device: torch.device) -> Iterator[Row]:
    for batch in BATCHES:
        torch.manual_seed(0)
        labels = torch.arange(batch, device=device) // retrieval.PER_CLASS
        data = torch.randn(batch, batch, device=device), labels[:, None] == labels
        for reach, given in REACHES.items():
            loss = functools.partial(recall_loss, weight="log", **given)
            yield _measure(f"{batch:,} lists of {batch:,}", str(retrieval.PER_CLASS), reach, loss, data)


def _calls(device: torch.device) -> Cells:
    """What plain calls cost with Python's share: forward and backward."""
    cells = [["call", "eager", "over the similarity alone", "replay", "launches"]]
    gpu = device.type == "cuda"

    def line(name: str, step: Callable[[], Tensor], alone: float | None) -> float:
        taken = timing.seconds(step, device)
        replay = timing.graph_seconds(step, device) if gpu else None
        over = "" if alone is None else in_time(max(taken - alone, 0.0))
        cells.append([name, in_time(taken), over, in_time(replay), str(timing.launches(step)) if gpu else "-"])
        return taken

    torch.manual_seed(0)
    batch = retrieval.batch_of(128, device)
    alone = line("128 embeddings: similarity alone", long_lists.step_of(retrieval.similarity_alone, *batch), None)
    for reach, given in REACHES.items():
        loss = RecallLoss(**given).to(device)
        line(f"128 embeddings: recall, {reach}", long_lists.step_of(loss, *batch), alone)
    data = long_lists.make_list(LENGTHS[0], 1000, device)
    for reach, given in REACHES.items():
        step = long_lists.step_of(functools.partial(average_precision_loss, **given), *data)
        line(f"one list of {LENGTHS[0]:,}: AP, {reach}", step, None)
    return cells


def _products(queries: Tensor, candidates: Tensor) -> Callable[[], None]:
    """The similarities of all pairs, a block of 2^26 of them at a time."""
    rows = max(128, (1 << 26) // len(candidates))

    def run() -> None:
        for start in range(0, len(queries), rows):
            queries[start : start + rows] @ candidates.T

    return run


def _embeddings(device: torch.device) -> Cells:
    """Large batches, and queries against many candidates: time and memory beside one product of their matrices."""
    cells = [["embeddings", "products", "loss", "eager", "one product", "ratio", "memory over the inputs"]]
    before = torch.get_float32_matmul_precision()
    for queries, candidates, precision in EMBEDDINGS:
        name = f"{queries:,} against {candidates:,}" if candidates else f"{queries:,}"
        torch.set_float32_matmul_precision(precision)
        torch.manual_seed(0)
        batch = retrieval.batch_of(queries, device)
        others = retrieval.batch_of(candidates, device) if candidates else None
        one = timing.seconds(_products(batch[0], batch[0] if others is None else others[0]), device, budget=0.2)
        for reach in ("window", "automatic"):
            module = RecallLoss(**REACHES[reach]).to(device)
            against = {} if others is None else {"ref_embeddings": others[0], "ref_labels": others[1]}
            loss: Loss = functools.partial(module, **against)
            step = long_lists.step_of(loss, *batch)
            try:
                taken, peak = timing.seconds(step, device, budget=0.2), timing.peak_bytes(step, device)
                line = [in_time(taken), in_time(one), f"{taken / one:.1f}x", f"{peak / 2**20:,.0f} MiB"]
            except torch.OutOfMemoryError:
                line = ["does not fit", in_time(one), "-", "-"]
            cells.append([name, "TF32" if precision == "high" else "fp32", f"recall, {reach}", *line])
            torch.cuda.empty_cache()
    torch.set_float32_matmul_precision(before)
    return cells


def _cells(table: list[Row]) -> Cells:
    cells = [["lists", "relevant", "reach", "eager", "replay", "over lam", "plain"]]
    lam: float | None = None
    for row in table:
        lam = row.time if row.reach == "lam" else lam
        ratio = "-" if row.time is None or lam is None else f"{row.time / lam:.2f}x"
        eager = in_time(row.eager) if row.equal else "differs from the reference"
        cells.append([row.lists, row.relevant, row.reach, eager, in_time(row.replay), ratio, in_time(row.plain)])
    return cells


def reach(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    longest: Annotated[int, typer.Option(help="leave out longer lists")] = LENGTHS[-1],
    markdown: Annotated[Path | None, typer.Option(help="write the tables here as Markdown")] = None,
) -> None:
    """Time windows beside lambda, and the cost of plain calls."""
    place = torch.device(device)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("lists", total=None)
        table = []
        for row in (*_list_rows(place, longest), *_batch_rows(place)):
            table.append(row)
            progress.advance(task)
    title = machine.in_a_line(place)
    sections = [(f"{title}: AP and recall losses, forward + backward", _cells(table)), ("Calls", _calls(place))]
    if place.type == "cuda":
        sections.append(("Embeddings without the similarity matrix, forward + backward", blocks.cells(place)))
    console = Console()
    for name, cells in sections:
        tables.show(console, name, cells)
    if markdown:
        command = "rankgrad " + " ".join(sys.argv[1:])
        text = f"# rankgrad bench reach, {datetime.date.today().isoformat()}\n\n`{command}`\n"
        text += "".join(f"\n## {name}\n\n{tables.markdown(cells)}\n" for name, cells in sections)
        write_text(markdown, text)
    if not all(row.equal for row in table):
        raise typer.Exit(1)
