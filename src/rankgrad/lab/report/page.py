"""The frame of a run's report: one HTML file that needs nothing else. Tasks put their own sections into it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankgrad.lab.report.curves import chart
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import printable
from rankgrad.lab.training.log import read_table
from rankgrad.lab.training.run_files import Result, SeedStatistic, read_json_if_there

if TYPE_CHECKING:
    from PIL import Image

_STYLE = """
:root { --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --paper: #fff; --right: #1a9850; --wrong: #d73027; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #f6f7f9; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 24px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 16px 22px; margin: 16px 0; }
h1 { font-size: 24px; margin: 8px 0; }
h2 { font-size: 17px; margin: 0 0 10px; } p { margin: 6px 0; color: var(--soft); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 12px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 600; }
tr.own td { font-weight: 700; background: #eef6f0; } .wide { overflow-x: auto; }
.charts { display: flex; flex-wrap: wrap; gap: 18px; }
section > svg, .charts svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.machine td { text-align: left; }
.settings td { font-family: ui-monospace, monospace; font-size: 12.5px; text-align: left; }
.settings { columns: 2; } .settings tr { break-inside: avoid; }
@media (max-width: 700px) { .settings { columns: 1; } }
"""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, own: Sequence[int] = ()) -> str:
    """An HTML table; the rows numbered in ``own`` stand out. Numbers are shown with one decimal."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(_cell(value))}</td>" for value in row)
        body += f'<tr class="own">{cells}</tr>' if number in own else f"<tr>{cells}</tr>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def data_url(image: Image.Image) -> str:
    """An image as a JPEG inside the page."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def name_of(run: Path) -> str:
    """The name of a run's folder; of one seed of several, with the folder it is in."""
    return f"{run.parent.name}/{run.name}" if run.name.startswith("seed-") else run.name


def evaluations(run: Path, beside: Sequence[Path]) -> Iterator[tuple[str, bool, Mapping[str, float]]]:
    """Evaluations before training, at their best and the last, of other runs, then of this run.

    Each as its name in a table, whether it is of this run, and its metrics. Of a run that is not finished, those
    before training and the last one so far.
    """
    for folder in (*beside, run):
        result, last = read_json_if_there(folder / "result.json", Result), "last epoch"
        if result is None:
            rows, last = read_table(folder / "evaluations.csv", ("step", "epoch")), "last evaluation"
            result = Result(
                first=next((row for row in rows if row["step"] == 0), {}),
                last=next((row for row in rows[::-1] if row["step"] > 0), {}),
            )
        whose = "this run" if folder == run else name_of(folder)
        if result.first:
            yield f"{whose}, before training", folder == run, result.first
        for label, row in (("best evaluation", result.best), (last, result.last)):
            if row:
                yield f"{whose}, {label} (epoch {row['epoch']:.0f})", folder == run, row


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _pairs(values: Mapping[str, Any], kind: str) -> str:
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in values.items())
    return f'<div class="{kind}"><table>{rows}</table></div>'


def document(title: str, sections: Sequence[tuple[str, str]], *, style: str = "") -> str:
    """A page of (heading, HTML) sections."""
    body = "".join(f"<section><h2>{escape(heading)}</h2>{inner}</section>" for heading, inner in sections)
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{style}</style></head><body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )
    return "\n".join(map(printable, text.split("\n")))


def write_report(
    folder: Path,
    *,
    title: str,
    settings: Mapping[str, Any],
    steps: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
    machine: Mapping[str, str],
    sections: Sequence[tuple[str, str]],
) -> Path:
    """The report of one run: the task's result, curves, its other sections, hardware and time, settings."""
    path = folder / "report.html"
    charts = [chart("training loss", {"loss": [(row["step"], row["loss"]) for row in steps]}, "step", smooth=True)]
    metrics = [name for name in (evaluations[0] if evaluations else {}) if name not in ("step", "epoch")]
    if metrics:
        series = {name: [(row["epoch"], row[name]) for row in evaluations] for name in metrics}
        charts.append(chart("evaluation, %", series, "epoch"))
    every = [
        *sections[:1],
        ("Curves", f'<div class="charts">{"".join(charts)}</div>'),
        *sections[1:],
        ("Machine and time", _pairs(machine, "machine")),
        ("Settings", _pairs(settings, "settings")),
    ]
    write_text(path, document(title, every))
    return path


def write_overview(folder: Path, title: str, rows: Sequence[SeedStatistic]) -> Path:
    """The page of several seeds: mean, deviation, and a link to the report of each."""
    path = folder / "report.html"
    cells = [[r.metric, r.of, r.mean, r.deviation, *r.values] for r in rows]
    runs = sorted(p.parent.name for p in folder.glob("*/report.html"))
    links = "".join(f'<li><a href="{escape(name)}/report.html">{escape(name)}</a></li>' for name in runs)
    sections = [
        ("Mean and standard deviation", table(["metric", "of", "mean", "deviation", *runs], cells)),
        ("Runs", f"<ul>{links}</ul>"),
    ]
    write_text(path, document(f"rankgrad: {title}", sections))
    return path
