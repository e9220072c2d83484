"""``rankgrad bench``: the tables, as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from rankgrad.lab.bench import long_lists, retrieval, tables
from rankgrad.lab.bench.complexity_table import complexity
from rankgrad.lab.bench.reach import reach
from rankgrad.lab.bench.tables import Cells, in_mib, in_time
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text


def _ratio(slow: float | None, fast: float | None) -> str:
    return "-" if slow is None or fast is None else f"{slow / fast:.1f}x"


def _list_cells(table: list[long_lists.LongListRow], gpu: bool) -> Cells:
    head = ["n", "relevant", "plain", "reference", "engine", "plain / engine", "floor", "peak memory / gradient"]
    head += ["replay", "replay with hint", "plain / replay", "launches"] if gpu else []
    cells = [head]
    for row in table:
        line = [f"{row.n:,}", row.relevant, in_time(row.plain), in_time(row.reference)]
        line.append(in_time(row.engine) if row.equal else "differs from the reference")
        line += [_ratio(row.plain, row.engine), in_time(row.floor), f"{row.peak / (4 * row.n):.2f}"]
        if gpu:
            line += [in_time(row.replay), in_time(row.hinted), _ratio(row.plain, row.replay), str(row.launches)]
        cells.append(line)
    return cells


def _retrieval_cells(table: list[retrieval.RetrievalRow]) -> Cells:
    cells = [["batch", "loss", "eager", "replay", "peak memory", ""]]
    return cells + [
        [f"{r.batch:,}", r.loss, in_time(r.eager), in_time(r.replay), in_mib(r.peak), r.note] for r in table
    ]


def _skew_cells(table: list[long_lists.LongListRow]) -> Cells:
    cells = [["n", "relevant", "random", "sorted", "one gap", "all equal"]]
    for row in table:
        if row.skew:
            kinds = [in_time(row.skew[kind]) for kind in ("sorted", "one gap", "equal")]
            cells.append([f"{row.n:,}", row.relevant, in_time(row.replay or row.engine), *kinds])
    return cells


def _paper_cells(table: list[long_lists.LongListRow], device: str) -> Cells:
    cells = [["n", "paper", "this machine, p = 1,000"]]
    for n, paper in long_lists.PAPER[device].items():
        mine = [r.engine for r in table if r.n == n and r.relevant == "1,000"]
        if mine:
            cells.append([f"{n:,}", in_time(paper), in_time(mine[0])])
    return cells


Sections = list[tuple[str, Cells]]


def _sections(
    place: torch.device, table: list[long_lists.LongListRow], pairs: list[retrieval.RetrievalRow]
) -> Sections:
    """The tables of a device, of what has been measured so far."""
    title = machine.summary(place)
    exponents = [["relevant", "exponent of n, from 1M"]]
    for k in long_lists.relevant_counts(long_lists.LENGTHS[0]):
        found = long_lists.growth(table, k)
        exponents.append([k, "-" if found is None else f"{found:.2f}"])
    return [
        (f"{title}: AP loss, forward + backward, one list of n scores", _list_cells(table, place.type == "cuda")),
        ("Growth", exponents),
        ("Skewed scores", _skew_cells(table)),
        ("Beside the paper's table", _paper_cells(table, place.type)),
        (f"{title}: embeddings [batch, 512], 4 of a class, fp32, forward + backward", _retrieval_cells(pairs)),
    ]


def _measured(
    place: torch.device,
    lengths: tuple[int, ...],
    baselines_up_to: int,
    batches: tuple[int, ...],
    progress: Progress,
    save: Callable[[Sections], None],
) -> tuple[Sections, dict[str, Any]]:
    """The tables of one device, and their numbers for JSON; ``save`` gets the tables after every row."""
    on_gpu = place.type == "cuda"
    table: list[long_lists.LongListRow] = []
    pairs: list[retrieval.RetrievalRow] = []
    task = progress.add_task(f"{place.type}: lists", total=4 * len(lengths))
    for row in long_lists.rows(
        place, lengths, baselines_up_to=baselines_up_to, skew_at=min(1_000_000, lengths[-1])
    ):
        table.append(row)
        progress.advance(task)
        save(_sections(place, table, pairs))
    task = progress.add_task(f"{place.type}: embeddings", total=(7 if on_gpu else 6) * len(batches))
    for pair in retrieval.rows(place, batches):
        pairs.append(pair)
        progress.advance(task)
        save(_sections(place, table, pairs))
    sections = _sections(place, table, pairs)
    numbers: dict[str, Any] = {
        "machine": machine.summary(place),
        "lists": [dataclasses.asdict(r) for r in table],
        "growth": {k: long_lists.growth(table, k) for k in long_lists.relevant_counts(lengths[0])},
        "retrieval": [dataclasses.asdict(r) for r in pairs],
    }
    if on_gpu:
        small = retrieval.list_launches(place)
        cells = [["replay", "eager", "launches"]]
        cells.append([in_time(small["replay"]), in_time(small["eager"]), f"{small['launches']:.0f}"])
        sections.append(("Recall loss from a 128 x 512 score matrix", cells))
        numbers["128 x 512"] = small
    return sections, numbers


def bench(
    context: typer.Context,
    device: tables.DeviceOption = "both",
    longest: Annotated[int, typer.Option(min=long_lists.LENGTHS[0], help="leave out longer lists")] = 10_000_000,
    baselines_up_to: Annotated[int, typer.Option(help="time plain and reference up to this length")] = 10_000_000,
    largest_batch: Annotated[int, typer.Option(help="leave out larger batches of embeddings")] = 16_384,
    threads: tables.ThreadsOption = 0,
    markdown: tables.MarkdownOption = None,
    json_file: tables.JsonOption = None,
) -> None:
    """Time the losses: the paper's table of list lengths, and batches of embeddings against baseline losses."""
    if context.invoked_subcommand is not None:
        return
    names = tables.devices(device, threads)
    sections: Sections = []
    numbers: dict[str, Any] = {}

    def save(found: Sections) -> None:  # a run that is killed leaves what it has measured
        if markdown:
            text = f"# rankgrad bench, {tables.today()}\n\n`{tables.command()}`\n"
            tables_found = [(title, cells) for title, cells in sections + found if len(cells) > 1]
            text += "".join(f"\n## {title}\n\n{tables.markdown(cells)}\n" for title, cells in tables_found)
            write_text(markdown, text)

    lengths = tuple(n for n in long_lists.LENGTHS if n <= longest)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in names:
            largest = largest_batch if name == "cuda" else min(largest_batch, 1024)
            batches = tuple(b for b in retrieval.BATCHES if b <= largest)
            found, numbers[name] = _measured(torch.device(name), lengths, baselines_up_to, batches, progress, save)
            sections += found
    console = Console()
    for title, cells in sections:
        tables.show(console, title, cells)
    save([])
    if json_file:
        head = {"date": tables.today(), "command": tables.command()}
        write_text(json_file, json.dumps(head | numbers, indent=1))
    wrong = [r for n in numbers.values() for r in n["lists"] if not r["equal"]]
    wrong += [r for n in numbers.values() for r in n["retrieval"] if "differs" in r["note"]]
    if wrong:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command: ``bench`` alone measures our losses, its subcommands the rest."""
    verbs = typer.Typer(invoke_without_command=True, callback=bench)
    verbs.command()(complexity)
    verbs.command()(reach)
    app.add_typer(verbs, name="bench")
