"""What a retrieval run adds to its report: the paper's rows beside its own, examples, the hardest queries."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankgrad.lab.report import page
from rankgrad.lab.retrieval.config import Config
from rankgrad.lab.retrieval.images import ImageSource
from rankgrad.lab.retrieval.paper import TABLES
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.metrics import RetrievalMetrics
from rankgrad.pairs import unit_length

_SHOWN, _NEAREST, _SIDE = 8, 8, 96

_STYLE = """<style>
.row { display: flex; gap: 7px; margin: 8px 0; align-items: center; overflow-x: auto; }
.row figure { margin: 0; width: 92px; flex: none; }
.row img { width: 92px; height: 92px; object-fit: cover; border: 4px solid #98a2b3;
  border-radius: 6px; display: block; }
.row .right img { border-color: var(--right); } .row .wrong img { border-color: var(--wrong); }
.row figcaption { font-size: 11px; color: var(--soft); overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.row .query { margin-right: 14px; }
</style>"""


def _thumbnail(source: ImageSource, row: int) -> str:
    """A small JPEG as a data URL."""
    from PIL import Image

    image = Image.fromarray(source.image(row).cpu().numpy())
    size = (_SIDE, _SIDE)
    if min(image.size) < _SIDE:
        image = image.resize(size, Image.Resampling.NEAREST)
    else:
        image.thumbnail((2 * _SIDE, 2 * _SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def write_examples(
    folder: Path,
    found: RetrievalMetrics,
    queries: Tensor,
    gallery: Tensor | None,
    query: ImageSource,
    gallery_source: ImageSource | None,
) -> None:
    """Keep some random queries and the hardest ones, with their nearest items, as ``examples.json``."""
    counts = (found.first > 0).nonzero().flatten().cpu()
    random = counts[torch.randperm(len(counts), generator=torch.Generator().manual_seed(0))[:_SHOWN]]
    worst = found.average_precision.cpu()[counts].argsort(stable=True)[:_SHOWN]
    chosen = {"examples": random.sort().values, "hardest": counts[worst]}
    source, candidates = (
        (query, queries) if gallery is None or gallery_source is None else (gallery_source, gallery)
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
                "name": query.images.names[row],
                "image": _thumbnail(query, row),
                "rank": int(found.first[row]),
                "nearest": [
                    {
                        "name": source.images.names[other],
                        "image": _thumbnail(source, other),
                        "score": round(score, 3),
                        "right": bool(source.images.labels[other] == query.images.labels[row]),
                    }
                    for other, score in zip(others, similar, strict=True)
                    if score > -torch.inf
                ],
            }
            for row, others, similar in zip(
                rows.tolist(), nearest.indices.tolist(), nearest.values.tolist(), strict=True
            )
        ]
    write_text(folder / "examples.json", json.dumps(written))


def _figure(item: dict[str, Any], kind: str, caption: str) -> str:
    name = escape(item["name"])
    return (
        f'<figure class="{kind}"><img src="{item["image"]}" alt="{name}" title="{name}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _row(example: dict[str, Any]) -> str:
    first = f"first right: {example['rank']}"
    figures = [_figure(example, "query", first)]
    for item in example["nearest"]:
        mark = "\u2713" if item["right"] else "\u2717"  # not by colour alone
        figures.append(_figure(item, "right" if item["right"] else "wrong", f"{mark} {item['score']:.3f}"))
    return f'<div class="row">{"".join(figures)}</div>'


def _results(run: Path, config: Config, beside: Sequence[Path]) -> str:
    """R@K of this run, the best evaluation and the last, beside the paper's rows and other runs."""
    ks, rows = TABLES.get(config.data.name, (config.recall_at, []))
    metrics = [f"R@{k}" for k in ks]
    extra = ["mAP@R"]
    cells: list[list[Any]] = [[name, *numbers, None] for name, numbers in rows]
    own = []
    for folder in (*beside, run):
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").is_file() else {}
        for which, label in (("best", "best evaluation"), ("last", "last epoch")):
            if result.get(which):
                own += [len(cells)] if folder == run else []
                whose = "this run" if folder == run else folder.name
                name = f"{whose}, {label} (epoch {result[which]['epoch']:.0f})"
                cells.append([name, *(result[which].get(m) for m in [*metrics, *extra])])
    note = "The paper reports the best evaluation on the test classes, mean of three restarts." if rows else ""
    if config.target is not None:
        note += f" The recipe expects R@1 of about {config.target:g}."
    if config.data.counts == "any" and rows:
        note += " The size of the data set was not checked: the rows may not compare."
    if config.data.hold_out:
        note += " Tested on held-out training classes: not comparable with the rows of the paper."
    return page.table(["method", *metrics, *extra], cells, own=own) + f"<p>{escape(note)}</p>"


def sections(run: Path, config: Config, beside: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """(heading, HTML) of a retrieval run; ``beside``: other runs, in the table of results."""
    out = [("Result, %", _results(run, config, beside))]
    if (run / "examples.json").is_file():
        examples = json.loads((run / "examples.json").read_text())
        told = (
            "<p>A query and its nearest items with their similarity: green has the query's class, red has not.</p>"
        )
        for name, heading in (("examples", "Retrieval examples"), ("hardest", "The hardest queries")):
            rows = "".join(_row(example) for example in examples[name])
            out.append((heading, _STYLE + told + rows))
    return out
