"""``rankgrad bench``: the tables, as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rankgrad.bench import long_lists, retrieval

Cells = list[list[str]]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _ratio(slow: float | None, fast: float | None) -> str:
    return "-" if slow is None or fast is None else f"{slow / fast:.1f}x"


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"


def _list_cells(table: list[long_lists.Row], gpu: bool) -> Cells:
    head = ["n", "relevant", "plain", "reference", "engine", "plain / engine", "floor", "peak memory / gradient"]
    head += ["replay", "replay with hint", "plain / replay", "launches"] if gpu else []
    cells = [head]
    for row in table:
        line = [f"{row.n:,}", row.relevant, _time(row.plain), _time(row.reference)]
        line.append(_time(row.engine) if row.equal else "differs from the reference")
        line += [_ratio(row.plain, row.engine), _time(row.floor), f"{row.peak / (4 * row.n):.2f}"]
        if gpu:
            line += [_time(row.replay), _time(row.hinted), _ratio(row.plain, row.replay), str(row.launches)]
        cells.append(line)
    return cells


def _retrieval_cells(table: list[retrieval.Row]) -> Cells:
    cells = [["batch", "loss", "eager", "replay", "peak memory", ""]]
    return cells + [
        [f"{r.batch:,}", r.loss, _time(r.eager), _time(r.replay), _size(r.peak), r.note] for r in table
    ]


def _skew_cells(table: list[long_lists.Row]) -> Cells:
    cells = [["n", "relevant", "random", "sorted", "one gap", "all equal"]]
    for row in table:
        if row.skew:
            kinds = [_time(row.skew[kind]) for kind in ("sorted", "one gap", "equal")]
            cells.append([f"{row.n:,}", row.relevant, _time(row.replay or row.engine), *kinds])
    return cells


def _paper_cells(table: list[long_lists.Row], device: str) -> Cells:
    cells = [["n", "paper", "this machine, p = 1,000"]]
    for n, paper in long_lists.PAPER[device].items():
        mine = [r.engine for r in table if r.n == n and r.relevant == "1,000"]
        if mine:
            cells.append([f"{n:,}", _time(paper), _time(mine[0])])
    return cells


def _markdown(cells: Cells) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def _machine(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        name = f"{models[0].split(':')[1].strip() if models else name}, {torch.get_num_threads()} thread(s)"
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for package in ("triton", "numba"):
        try:
            versions.append(f"{package} {__import__(package).__version__}")
        except ModuleNotFoundError:
            versions.append(f"{package} absent")
    return f"{name}; {', '.join(versions)}"


def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda, or both where there is a GPU")] = "both",
    longest: Annotated[int, typer.Option(help="leave out longer lists")] = 10_000_000,
    baselines_up_to: Annotated[int, typer.Option(help="time plain and reference up to this length")] = 10_000_000,
    largest_batch: Annotated[int, typer.Option(help="leave out larger batches of embeddings")] = 16_384,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = torch's choice")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="write the tables here as Markdown")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here as JSON")] = None,
) -> None:
    """Time the losses: the paper's table of list lengths, and batches of embeddings against rival losses."""
    if threads:
        torch.set_num_threads(threads)
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if device not in ("both", *available):
        raise typer.BadParameter(f"{device!r}; this machine has {', '.join(available)}", param_hint="--device")
    sections: list[tuple[str, Cells]] = []
    numbers: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in available if device == "both" else [device]:
            place = torch.device(name)
            lengths = tuple(n for n in long_lists.LENGTHS if n <= longest)
            batches = tuple(b for b in retrieval.BATCHES if b <= (largest_batch if name == "cuda" else 1024))
            task = progress.add_task(f"{name}: lists", total=4 * len(lengths))
            table = []
            for row in long_lists.rows(
                place, lengths, baselines_up_to=baselines_up_to, skew_at=min(1_000_000, lengths[-1])
            ):
                table.append(row)
                progress.advance(task)
            task = progress.add_task(f"{name}: embeddings", total=6 * len(batches))
            pairs = []
            for pair in retrieval.rows(place, batches):
                pairs.append(pair)
                progress.advance(task)
            growth = {k: long_lists.growth(table, k) for k in long_lists.relevant_counts(lengths[0])}
            exponents = [["relevant", "exponent of n, from 1M"]]
            exponents += [[k, "-" if v is None else f"{v:.2f}"] for k, v in growth.items()]
            title = _machine(place)
            sections += [
                (
                    f"{title}: AP loss, forward + backward, one list of n scores",
                    _list_cells(table, name == "cuda"),
                ),
                ("Growth", exponents),
                ("Skewed scores", _skew_cells(table)),
                ("Beside the paper's table", _paper_cells(table, name)),
                (
                    f"{title}: embeddings [batch, 512], 4 of a class, fp32, forward + backward",
                    _retrieval_cells(pairs),
                ),
            ]
            numbers[name] = {
                "machine": title,
                "lists": [dataclasses.asdict(r) for r in table],
                "growth": growth,
                "retrieval": [dataclasses.asdict(r) for r in pairs],
            }
            if name == "cuda":
                small = retrieval.list_launches(place)
                cells = [["replay", "eager", "launches"]]
                cells.append([_time(small["replay"]), _time(small["eager"]), f"{small['launches']:.0f}"])
                sections.append(("Recall loss from a 128 x 512 score matrix", cells))
                numbers[name]["128 x 512"] = small
    console = Console()
    for title, cells in sections:
        shown = Table(*cells[0], title=title)
        for line in cells[1:]:
            shown.add_row(*line)
        console.print(shown)
    command = "rankgrad " + " ".join(sys.argv[1:])
    today = datetime.date.today().isoformat()
    if markdown:
        text = f"# rankgrad bench, {today}\n\n`{command}`\n"
        text += "".join(f"\n## {title}\n\n{_markdown(cells)}\n" for title, cells in sections if len(cells) > 1)
        markdown.write_text(text)
    if json_file:
        json_file.write_text(json.dumps({"date": today, "command": command, **numbers}, indent=1))
    wrong = [r for n in numbers.values() for r in n["lists"] if not r["equal"]]
    if wrong:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands of this room."""
    app.command()(bench)
