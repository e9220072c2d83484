"""What a detection run adds to its report: results, AP by class, gradients and detections, beside other runs'."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from typing_extensions import NotRequired, TypedDict

from rankgrad.lab.detection.config import Config
from rankgrad.lab.detection.evaluate import DetectionMetrics
from rankgrad.lab.detection.paper import TABLE
from rankgrad.lab.report import page
from rankgrad.lab.report.curves import COLOURS, chart
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.log import read_table
from rankgrad.lab.training.run_files import data_notes, read_json_if_there
from rankgrad.lab.vision.images import Store

_SHOWN, _SIDE = 8, 320
_METRICS = {"voc": ("AP50", "AP50-11", "AP", "AP75"), "coco": ("AP", "AP50", "AP75")}

Number = Annotated[float, Field(allow_inf_nan=False)]


class Box(TypedDict):
    """A box on an image: found, or missed."""

    box: tuple[Number, Number, Number, Number]
    name: str
    score: NotRequired[Number]
    kind: Literal["right", "wrong", "missed", "neither"]


class Scene(TypedDict):
    """An image with its boxes."""

    name: str
    image: str
    width: int
    height: int
    boxes: list[Box]


class Detections(TypedDict):
    """``detections.json`` of a run."""

    threshold: Number
    scores: str
    right: bool
    examples: list[Scene]
    hardest: list[Scene]


class ClassPrecisions(BaseModel):
    """The average precision of every class, in percent; None where there is no object of it."""

    AP50: dict[str, Number | None]


class ByClass(TypedDict):
    """``classes.json``: by the way of scoring."""

    softmax: ClassPrecisions
    odds: ClassPrecisions


Heading = Literal["examples", "hardest"]
_HEADINGS: dict[Heading, str] = {"examples": "Detections", "hardest": "The most confident mistakes"}

_BARS_STYLE = """<style>
.bars td:nth-child(2) { width: 500px; } .bars .bar { height: 8px; margin: 1px 0; }
.bars i { display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 12px; }
</style>"""
_STYLE = """<style>
.scene { display: flex; flex-wrap: wrap; gap: 12px; margin: 10px 0 16px; }
.scene figure { margin: 0; } .scene svg { display: block; border-radius: 6px; }
.scene figcaption { font-size: 12px; color: var(--soft); max-width: 320px; }
.scene rect { fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; }
.scene .right { stroke: #35d06a; } .scene .wrong { stroke: #ff4d3d; }
.scene .missed { stroke: #ffd43b; stroke-dasharray: 5 4; }
.scene .neither { stroke: #cfd4dc; stroke-dasharray: 2 3; }
.scene text { font: 600 11px system-ui, sans-serif; fill: #fff; }
.scene text { paint-order: stroke; stroke: #000c; stroke-width: 3px; }
</style>"""


def _image(source: Store, row: int) -> tuple[str, float, int, int]:
    """A small JPEG as a data URL, its scale, width and height."""
    from PIL import Image

    image = Image.fromarray(source.image(row).cpu().numpy())
    scale = _SIDE / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    return page.data_url(image), scale, *image.size


def write_examples(
    folder: Path,
    source: Any,
    classes: Sequence[str],
    scores: str,
    found: dict[str, list[dict[str, torch.Tensor]]],
    metrics: dict[str, DetectionMetrics],
) -> None:
    """Keep the average precisions of the classes as ``classes.json``, and some detections as ``detections.json``.

    Args:
        folder: Of the run.
        source: The test images with their scenes.
        classes: Their names.
        scores: Which way of scoring is shown on images.
        found: Detections for each way of scoring.
        metrics: Their average precisions.
    """
    table = {
        name: {
            metric: dict(zip(classes, _percent(values), strict=True)) for metric, values in one.by_class().items()
        }
        for name, one in metrics.items()
    }
    write_text(folder / "classes.json", json.dumps(table))
    shown, judged, objects = found[scores], metrics[scores], source.scenes.objects
    rows = [row for row, o in enumerate(objects) if bool((~o.difficult).any())]
    right = math.isfinite(judged.threshold)  # whether any detection is
    threshold = judged.threshold if right else _threshold_for(shown, len(rows))
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    examples = sorted(rows[i] for i in shuffled[:_SHOWN])
    wrong = {row: _best_wrong(shown[row], judged, row) for row in range(len(objects))}
    hardest = sorted((row for row in wrong if wrong[row] >= threshold), key=lambda row: -wrong[row])

    def scenes(rows: list[int]) -> list[dict[str, Any]]:
        return [_scene(source, row, classes, shown[row], judged, threshold) for row in rows]

    written = {"threshold": threshold, "scores": scores, "right": right}
    written |= {"examples": scenes(examples), "hardest": scenes(hardest[: _SHOWN // 2])}
    write_text(folder / "detections.json", json.dumps(written))


def _threshold_for(detections: list[dict[str, torch.Tensor]], count: int) -> float:
    """The score that so many detections reach, the most confident ones; 0 if there are none."""
    scores = torch.cat([one["scores"] for one in detections])
    best = scores.topk(min(len(scores), count)).values
    return float(best.min()) if len(best) else 0.0


def _percent(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else 100 * value for value in values.tolist()]


def _best_wrong(one: dict[str, torch.Tensor], metrics: DetectionMetrics, row: int) -> float:
    """The highest score of a wrong detection on an image."""
    scores = one["scores"][metrics.outcomes[row] == 0]
    return float(scores.max()) if len(scores) else -1.0


def _scene(
    source: Any,
    row: int,
    classes: Sequence[str],
    one: dict[str, torch.Tensor],
    metrics: DetectionMetrics,
    threshold: float,
) -> dict[str, Any]:
    """An image with its detections above the threshold and the objects that none of them found."""
    from torchvision.ops import box_iou

    image, scale, wide, high = _image(source, row)
    objects = source.scenes.objects[row]
    kept = one["scores"] >= threshold
    boxes = [
        {
            "box": [round(v * scale, 1) for v in box],
            "name": classes[label - 1],
            "score": round(score, 3),
            "kind": {1: "right", 0: "wrong", -1: "neither"}[outcome],
        }
        for box, label, score, outcome in zip(
            one["boxes"][kept].tolist(),
            one["labels"][kept].tolist(),
            one["scores"][kept].tolist(),
            metrics.outcomes[row][kept].tolist(),
            strict=True,
        )
    ]
    close = (box_iou(objects.boxes, one["boxes"][kept]) >= 0.5) & (objects.labels[:, None] == one["labels"][kept])
    for number in ((~close.any(1)) & ~objects.difficult).nonzero().flatten().tolist():
        box = [round(v * scale, 1) for v in objects.boxes[number].tolist()]
        boxes.append({"box": box, "name": classes[int(objects.labels[number]) - 1], "kind": "missed"})
    return {"name": source.scenes.names[row], "image": image, "width": wide, "height": high, "boxes": boxes}


def _drawn(scene: Scene, whose: str) -> str:
    marks = {"right": "\u2713 ", "wrong": "\u2717 ", "missed": "missed ", "neither": "difficult "}
    parts = []
    for box in scene["boxes"]:
        left, top, right, bottom = box["box"]
        size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
        parts.append(f'<rect class="{box["kind"]}" x="{left}" y="{top}" {size}/>')
    for box in scene["boxes"]:  # words above all rectangles
        left, top = max(box["box"][0], 0) + 3, max(box["box"][1], 0) + 13
        score = f" {box['score']:.2f}" if "score" in box else ""
        parts.append(f'<text x="{left}" y="{top}">{marks[box["kind"]]}{escape(box["name"])}{score}</text>')
    size = f'width="{scene["width"]}" height="{scene["height"]}"'
    name = escape(scene["name"])
    return (
        f'<figure><svg {size} role="img" aria-label="{name}"><image href="{escape(scene["image"])}" {size}/>'
        f"{''.join(parts)}</svg><figcaption>{escape(whose)}</figcaption></figure>"
    )


def _scenes(runs: dict[str, Detections], heading: Heading) -> str:
    """Detections of the other runs on the images of this run (the last one), then its own."""
    own = list(runs)[-1]
    out = []
    for scene in runs[own][heading]:
        figures = []
        for name, seen in runs.items():
            same = [s for s in (*seen["examples"], *seen["hardest"]) if s["name"] == scene["name"]]
            figures += (
                [_drawn(same[0], f"{scene['name']}: {name}" if len(runs) > 1 else scene["name"])] if same else []
            )
        out.append(f'<div class="scene">{"".join(figures)}</div>' if len(runs) > 1 else "".join(figures))
    return "".join(out) if len(runs) > 1 else f'<div class="scene">{"".join(out)}</div>'


def bars(values: dict[str, dict[str, float | None]], title: str) -> str:
    """Bars in percent as an HTML table: a row for each class, a bar for each run."""
    names = dict.fromkeys(name for of_run in reversed(values.values()) for name in of_run)  # this run's first
    looks = [f"background:{colour}" for _, colour in zip(values, itertools.cycle(COLOURS), strict=False)]
    keys = [f'<i style="{look}"></i>{escape(run)}' for run, look in zip(values, looks, strict=True)]
    rows = ""
    for name in names:
        found = [of_run.get(name) for of_run in values.values()]
        drawn = "".join(
            f'<div class="bar" style="width:{value:.1f}%;{look}"></div>'
            for value, look in zip(found, looks, strict=True)
            if value is not None
        )
        numbers = " / ".join("-" if value is None else f"{value:.1f}" for value in found)
        rows += f"<tr><td>{escape(name)}</td><td>{drawn}</td><td>{numbers}</td></tr>"
    head = f"<p><b>{escape(title)}</b> {' '.join(keys)}</p>"
    return f'<div class="wide bars">{head}<table>{rows}</table></div>'


def _results(run: Path, config: Config, beside: Sequence[Path]) -> str:
    """AP of this run and others, both ways of scoring, with the paper's rows."""
    metrics = _METRICS[config.protocol()]
    header, cells, own = ["run", "scores", *metrics], [], []
    paper = TABLE.get((config.data.name, config.model.backbone))
    if paper is not None:
        for name, value in zip(("paper, cross entropy", "paper, RaMBO"), paper, strict=True):
            cells.append([name, "", value, *[None] * (len(metrics) - 1)])
    for name, of_this_run, row in page.evaluations(run, beside):
        for scores in ("softmax", "odds", "logits"):
            if f"AP50 {scores}" in row:
                own += [len(cells)] if of_this_run else []
                cells.append([name, scores, *(row.get(f"{metric} {scores}") for metric in metrics)])
    note = (
        "AP50 is the area under the curve at IoU 0.5, AP50-11 Pascal VOC 2007's mean of 11 points; AP75 at IoU "
        "0.75 and AP, the mean over IoU 0.5 to 0.95, are COCO's."
        if config.protocol() == "voc"
        else "COCO's numbers: AP is the mean over IoU 0.5 to 0.95, AP50 and AP75 are at IoU 0.5 and 0.75."
    )
    note += " Scores: softmax probabilities, or the sigmoid of the log-odds of a class against the background."
    if paper is not None:
        note += " The paper's rows: mmdetection, mean of three seeds."
    if config.target is not None:
        note += f" The recipe expects {metrics[0]} of about {config.target:g}."
    if config.data.counts == "any" and paper is not None:
        note += " The size of the data set was not checked: the rows may not compare."
    return page.table(header, cells, own=own) + f"<p>{escape(note)}</p>"


def _gradients(runs: dict[str, Path]) -> str:
    """How large the gradient at the class logits is, and how large cross entropy's would be."""
    charts = []
    for name, folder in runs.items():
        rows = [row for row in read_table(folder / "steps.csv") if "logit_gradient" in row]
        series = {
            "this loss": [(row["step"], row["logit_gradient"]) for row in rows],
            "cross entropy's": [(row["step"], row["logit_gradient_ce"]) for row in rows],
        }
        charts.append(chart(f"norm at the class logits: {name}", series, "step", smooth=True))
    note = "Norm of the gradient of this loss, and of cross entropy, at the class logits of a batch."
    return f'<div class="charts">{"".join(charts)}</div><p>{note}</p>'


def sections(run: Path, config: Config, beside: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """(heading, HTML) of a detection run; ``beside``: other runs to compare with, shown before it."""
    folders = (*beside, run)
    names = {page.name_of(folder) if beside else "this run": folder for folder in folders}
    if len(names) < len(folders):  # of the same name in different places
        names = {str(folder): folder for folder in folders}
    out = [("Result, %", _results(run, config, beside))]
    if lines := data_notes(run).get("notes"):
        out.append(("Data", "".join(f"<p>{escape(line)}</p>" for line in lines)))
    by_class = {name: read_json_if_there(folder / "classes.json", ByClass) for name, folder in names.items()}
    by_class = {name: found for name, found in by_class.items() if found}
    if by_class:
        drawn = [
            bars({name: found[scores].AP50 for name, found in by_class.items()}, f"AP50, {scores} scores")
            for scores in ("softmax", "odds")
        ]
        out.append(("Average precision by class, %", _BARS_STYLE + "".join(drawn)))
    if config.precision != "fp16":
        out.append(("Gradients at the classifier", _gradients(names)))
    kept = {name: read_json_if_there(folder / "detections.json", Detections) for name, folder in names.items()}
    seen = {name: found for name, found in kept.items() if found}
    if seen and (run / "detections.json").is_file():
        shown_from = " ".join(
            f"{f'{name}: ' if beside else ''}{_shown_from(found)}" for name, found in seen.items()
        )
        marks = (
            "\u2713 green is right, \u2717 red is wrong, dashed yellow was missed, grey is of a difficult object."
        )
        above = f"{_STYLE}<p>{escape(shown_from)} {marks}</p>"
        for heading, title in _HEADINGS.items():
            if list(seen.values())[-1][heading]:
                out.append((title, above + _scenes(seen, heading)))
    return out


def _shown_from(found: Detections) -> str:
    """Which detections of a run are drawn."""
    why = "the threshold with the best F1" if found["right"] else "the most confident: none is right"
    return f"Detections with a score ({found['scores']}) of at least {found['threshold']:.2g}, {why}."
