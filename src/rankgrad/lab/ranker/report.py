"""What a ranker's run adds to its report: metrics before and after training, baselines, single queries."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from rankgrad.lab.ranker import comparison
from rankgrad.lab.ranker.config import Config
from rankgrad.lab.ranker.data import Queries
from rankgrad.lab.report import page
from rankgrad.lab.training.run_files import read_json_if_there
from rankgrad.metrics import ndcg

_SHOWN, _PLACES = 8, 20

_STYLE = """<style>
.query { display: flex; gap: 3px; align-items: center; margin: 4px 0; }
.query b { width: 190px; flex: none; font-weight: 400; }
.query b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.query i { width: 24px; flex: none; text-align: center; font-style: normal; border-radius: 4px; }
</style>"""


Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RankedQuery(TypedDict):
    """A query and the grades of its first items."""

    query: str
    ndcg: Number
    items: int
    grades: list[Number]


class RankedQueries(TypedDict):
    """``queries.json``."""

    highest: Number
    hardest: list[RankedQuery]
    easiest: list[RankedQuery]


def examples(queries: Queries, scores: Tensor, config: Config) -> dict[str, Any]:
    """The best and the worst test queries by NDCG: their grades in the order of the scores."""
    values = ndcg(
        scores,
        queries.grades,
        k=config.ndcg_at[-1],
        gain=config.gain,
        groups=queries.groups,
        num_groups=len(queries),
        reduction="none",
    )
    counts = queries.groups[queries.grades >= config.relevant].unique()
    worst = counts[values[counts].argsort(dim=0, stable=True)]
    chosen = {"hardest": worst[:_SHOWN], "easiest": worst.flip(0)[:_SHOWN]}
    return {
        "highest": float(queries.grades.max()),
        **{
            name: [_example(queries, scores, row, float(values[row])) for row in rows.tolist()]
            for name, rows in chosen.items()
        },
    }


def _example(queries: Queries, scores: Tensor, row: int, value: float) -> RankedQuery:
    """A query with the grades of its first items."""
    own = queries.groups == row
    order = scores[own].argsort(dim=0, descending=True, stable=True)
    grades = queries.grades[own][order[:_PLACES]]
    return {
        "query": queries.ids[row],
        "ndcg": round(100 * value, 1),
        "items": int(own.sum()),
        "grades": grades.tolist(),
    }


def _row(example: RankedQuery, highest: float) -> str:
    cells = "".join(
        f'<i style="background:rgba(26,152,80,{0.08 + 0.7 * grade / highest:.2f})">{grade:g}</i>'
        for grade in example["grades"]
    )
    label = f"{example['query']}: {example['ndcg']:.1f}, {example['items']} items"
    return f'<div class="query"><b title="{escape(label)}">{escape(label)}</b>{cells}</div>'


def _results(run: Path, config: Config, beside: Sequence[Path]) -> str:
    """Test metrics of this run before training, at its best evaluation and the last; baselines and other runs."""
    metrics = [*(f"NDCG@{k}" for k in config.ndcg_at), "MAP", "MRR"]
    chosen_by = f"validation NDCG@{config.ndcg_at[-1]}"
    cells: list[list[Any]] = []
    own = []
    for name, of_this_run, row in page.evaluations(run, beside):
        own += [len(cells)] if of_this_run else []
        cells.append([name, row.get(chosen_by), *(row.get(metric) for metric in metrics)])
    for name, result in comparison.results(run, config):
        when = f"{result.best['epoch']:.0f} trees" if name == "lightgbm" else f"epoch {result.best['epoch']:.0f}"
        label = f"{comparison.NAMES[name]}, best evaluation ({when})"
        cells.append([label, *(result.best.get(metric) for metric in (chosen_by, *metrics))])
    gain = "2^grade - 1" if config.gain == "exponential" else "the grade"
    note = (
        f"Test queries with an item of grade {config.relevant:g} or higher; gain of NDCG: {gain}. The best "
        f"evaluation is the one with the highest {chosen_by}; the test queries choose nothing."
    )
    if config.target is not None:
        note += f" The recipe expects test NDCG@{config.ndcg_at[-1]} of about {config.target:g}."
    return page.table(["run", chosen_by, *metrics], cells, own=own) + f"<p>{escape(note)}</p>"


def sections(run: Path, config: Config, beside: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """(heading, HTML) of a ranker's run; ``beside``: other runs, in the table of results."""
    out = [("Result, %", _results(run, config, beside))]
    found: RankedQueries | None = read_json_if_there(run / "queries.json", RankedQueries)
    if found:
        intro = f"<p>Test queries with NDCG@{config.ndcg_at[-1]}; grades of the first items, best score first.</p>"
        for heading, shown in (
            ("The hardest queries", found["hardest"]),
            ("The easiest queries", found["easiest"]),
        ):
            rows = "".join(_row(example, found["highest"] or 1) for example in shown)
            out.append((heading, _STYLE + intro + rows))
    return out
