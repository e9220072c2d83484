"""What a retrieval run adds to its report: published rows beside its own, the data, examples, hard queries."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from rankgrad.lab.report import page
from rankgrad.lab.report.curves import chart
from rankgrad.lab.retrieval.config import RetrievalConfig
from rankgrad.lab.retrieval.source import Source, Sources
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.log import read_table
from rankgrad.lab.training.run_files import data_notes, read_json_if_there
from rankgrad.metrics import RetrievalMetrics
from rankgrad.pairs import unit_length

_SHOWN, _NEAREST = 8, 8


#: An item of ``examples.json``: an image (as a data URL) or a text.
_Item = TypedDict("_Item", {"name": str, "class": str, "image": NotRequired[str], "text": NotRequired[str]})


class Found(_Item):
    """An item that was found."""

    score: float
    right: bool


class Example(_Item):
    """A query and what it found."""

    rank: int
    nearest: list[Found]


class Examples(TypedDict):
    """``examples.json``."""

    examples: list[Example]
    hardest: list[Example]


_STYLE = """<style>
.row { display: flex; gap: 7px; margin: 8px 0; align-items: center; overflow-x: auto; }
.row figure { margin: 0; width: 92px; flex: none; }
.row img, .row .text { width: 92px; height: 92px; object-fit: cover; border: 4px solid #98a2b3;
  border-radius: 6px; display: block; }
.row .text { font-size: 10px; line-height: 1.25; padding: 3px; overflow: hidden; }
.row .right img, .row .right .text { border-color: var(--right); }
.row .wrong img, .row .wrong .text { border-color: var(--wrong); }
.row figcaption { font-size: 11px; color: var(--soft); overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.row .query { margin-right: 14px; }
</style>"""


def write_examples(
    folder: Path,
    found: RetrievalMetrics,
    queries: Tensor,
    gallery: Tensor | None,
    sources: Sources,
    relevant: Callable[[int, int], bool],
) -> None:
    """Keep some random queries and the hardest ones, with their nearest items, as ``examples.json``."""
    query = sources.query
    counts = (found.first > 0).nonzero().flatten().cpu()
    random = counts[torch.randperm(len(counts), generator=torch.Generator().manual_seed(0))[:_SHOWN]]
    worst = found.average_precision.cpu()[counts].argsort(stable=True)[:_SHOWN]
    chosen = {"examples": random.sort().values, "hardest": counts[worst]}
    source, candidates = (
        (query, queries) if gallery is None or sources.gallery is None else (sources.gallery, gallery)
    )
    unit = unit_length(candidates)
    written: dict[str, list[dict[str, Any]]] = {}
    for name, rows in chosen.items():
        scores = unit_length(queries[rows.to(queries.device)]) @ unit.T
        if gallery is None:
            scores[torch.arange(len(rows)), rows] = -torch.inf
        nearest = scores.topk(min(_NEAREST, scores.shape[1]), dim=1)
        written[name] = [
            {
                **_item(query, row),
                "rank": int(found.first[row]),
                "nearest": [
                    {**_item(source, other), "score": round(score, 3), "right": relevant(row, other)}
                    for other, score in zip(others, similar, strict=True)
                    if score > -torch.inf
                ],
            }
            for row, others, similar in zip(
                rows.tolist(), nearest.indices.tolist(), nearest.values.tolist(), strict=True
            )
        ]
    write_text(folder / "examples.json", json.dumps(written))


def _item(source: Source, row: int) -> dict[str, str]:
    return {"name": source.items.names[row], "class": source.items.class_name(row), **source.shown(row)}


def _figure(item: _Item, kind: str, caption: str) -> str:
    name, of = escape(item["name"]), escape(item["class"])
    inner = f'<div class="text" title="{name}">{escape(item["text"])}</div>' if "text" in item else ""
    inner = inner or f'<img src="{escape(item.get("image", ""))}" alt="{name}" title="{name}">'
    return (
        f'<figure class="{kind}">{inner}<figcaption title="{of}">{of}</figcaption>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _row(example: Example) -> str:
    first = f"first relevant: {example['rank']}"
    figures = [_figure(example, "query", first)]
    for item in example["nearest"]:
        mark = "\u2713" if item["right"] else "\u2717"  # not by colour alone
        figures.append(_figure(item, "right" if item["right"] else "wrong", f"{mark} {item['score']:.3f}"))
    return f'<div class="row">{"".join(figures)}</div>'


def _results(
    run: Path, config: RetrievalConfig, beside: Sequence[Path], rows: Sequence[tuple[str, Any]], note: str
) -> str:
    """R@K of this run, before training, the best evaluation and the last, beside published rows and other runs."""
    headline = data_notes(run).get("headline", "R@1")
    metrics = [*(f"R@{k}" for k in config.recall_at), "mAP@R"]
    if headline not in metrics:  # NDCG of graded texts
        metrics = [headline, *metrics]
    cells: list[list[Any]] = [[name, *numbers, None] for name, numbers in rows]
    own = []
    for name, of_this_run, row in page.evaluations(run, beside):
        own += [len(cells)] if of_this_run else []
        cells.append([name, *(row.get(m) for m in metrics)])
    note += (
        f" The best evaluation is the one with the highest {headline} on the test items themselves, so it is an "
        "optimistic estimate; the last epoch is not chosen by the test items."
    )
    if config.target is not None:
        note += f" The recipe expects R@1 of about {config.target:g}."
    return page.table(["method", *metrics], cells, own=own) + f"<p>{escape(note)}</p>"


def _data(run: Path) -> str:
    """How much there is to train and to test on, the notes on it, and the spread of the embeddings."""
    described = data_notes(run)
    counts = described.get("counts", {})
    parts = [page.table(list(counts), [[f"{many:,}" for many in counts.values()]])] if counts else []
    parts += [f"<p>{escape(line)}</p>" for line in described.get("notes", [])]
    steps = read_table(run / "steps.csv")
    if steps and "spread" in steps[0]:
        lines = {"spread": [(row["step"], row["spread"]) for row in steps]}
        parts.append(chart("spread of the embeddings of a batch", lines, "step", smooth=True))
        parts.append("<p>1 - |mean of the unit embeddings|: 0 means that all items have the same embedding.</p>")
    return "".join(parts)


def sections(
    run: Path,
    config: RetrievalConfig,
    beside: Sequence[Path] = (),
    rows: Sequence[tuple[str, Any]] = (),
    note: str = "",
) -> list[tuple[str, str]]:
    """(heading, HTML) of a retrieval run.

    Args:
        run: Its folder.
        config: Its settings.
        beside: Other runs, in the table of results.
        rows: Published results, ``(method, R@K for each K of the settings)``.
        note: What to know about them.
    """
    out = [("Result, %", _results(run, config, beside, rows, note))]
    if data := _data(run):
        if memory := config.loss.arguments().get("memory"):
            data += f"<p>The memory of {memory} batches is full from step {memory} on.</p>"
        out.append(("Data and embeddings", data))
    if examples := read_json_if_there(run / "examples.json", Examples):
        intro = (
            "<p>A query and its nearest items with their class and similarity: green items are relevant to the "
            "query, red ones are not.</p>"
        )
        for name, heading in (("examples", "Retrieval examples"), ("hardest", "The hardest queries")):
            shown = "".join(_row(example) for example in examples[name])
            out.append((heading, _STYLE + intro + shown))
    return out
