"""Which loss trains the head of a detector best? On a CPU, in minutes: Fast R-CNN's head on frozen features.

    python -m benchmarks.regions --data DIR --weights resnet50.safetensors [--out runs/regions] [--rows REGEX]
        [--seeds 2] [--rates 0.02] [--epochs 5] [--minutes 60] [key=value ...]
    python -m benchmarks.regions --table --out runs/regions        the table of what is finished

A filter for rows of benchmarks/voc.py, whose names and settings these are, before a GPU trains whole detectors.
DIR has VOCdevkit/VOC2007; trained on `train`, judged on `val`. Real images, proposals and boxes, made once and the
same for all rows: features of a frozen ResNet-50 (stride 16, whitened principal components), and proposals of an
RPN trained on them. What is trained is two layers, class logits and boxes of each class behind RoIAlign, by the
library's own RoI heads and losses. Not measured: what a loss does to the backbone and to the proposals. Finished
runs are not run again. key=value are settings of the recipe voc07; precision=bf16 is faster where a CPU has it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from benchmarks import voc
from benchmarks.region_features import STRIDE, Part, descend, ready
from benchmarks.side_by_side import mean_of, without_traceback
from rankgrad import metrics
from rankgrad.detection.boxes import decoded, iou
from rankgrad.detection.drop_in import use_ranking_loss
from rankgrad.detection.inference import detections_of
from rankgrad.detection.region_loss import RegionLoss, class_log_odds
from rankgrad.lab import recipes
from rankgrad.lab.detection import model
from rankgrad.lab.detection.config import Config
from rankgrad.lab.detection.evaluate import evaluate
from rankgrad.lab.detection.proposals import BatchedHeads
from rankgrad.lab.detection.scenes import Objects
from rankgrad.lab.training import machine, optim
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError

#: Proposals are the same for all rows here, and so is the number of sampled regions.
ROWS = {name: told for name, told in voc.ROWS.items() if name.startswith("boxes:") and "rpn=" not in told}
METRICS = [f"{metric} {scores}" for scores in ("softmax", "odds") for metric in ("AP50", "AP", "AP75")]


def settings_of(args: argparse.Namespace, row: str = "", rate: float = 0.02, seed: int = 0) -> Config:
    """The settings of a run."""
    every = ["data=voc", f"data.root={args.data}/VOCdevkit/VOC2007", "data.train=train", "data.test=val"]
    every += [f"weights={args.weights}", "view.short=320", "view.long=640", "pyramid=128", "hidden=512"]
    every += ["proposals=200", "regions=64", f"epochs={args.epochs}", f"milestones=[{0.8 * args.epochs:g}]"]
    every += ["warmup=100", "clip=10", f"lr={rate}", f"seed={seed}", *args.settings]
    return recipes.load("voc07", [*every, *ROWS.get(row, "").split()])[1]


def heads_of(config: Config, classes: int, device: torch.device) -> BatchedHeads:
    """RoI heads with the losses of a row."""
    pool = MultiScaleRoIAlign(["0"], 7, 2)
    pool.scales, pool.map_levels = [1 / STRIDE], initLevelMapper(4, 4)
    hidden, told = config.model.hidden, config.model
    box_head = TwoMLPHead(config.model.pyramid * 7 * 7, hidden)
    predictor = model.FloatPredictor(hidden, 1 + classes)
    thresholds = (told.score_threshold, told.nms_threshold, told.detections)
    heads = BatchedHeads(pool, box_head, predictor, 0.5, 0.5, config.batch.regions, 0.25, None, *thresholds)
    heads.boxes = config.boxes
    if config.loss.name == "ranking":
        detector = nn.Module()
        detector.roi_heads = heads
        use_ranking_loss(detector, RegionLoss(**config.loss.options()).to(device))
    return heads.to(device)


class Watched:
    """What the loss does to the logits of a step's foreground regions, against what cross entropy would do."""

    def __init__(self, heads: BatchedHeads) -> None:
        self.size: list[float] = []
        self.front: list[float] = []
        self.down: list[float] = []
        heads.box_predictor.register_forward_hook(self._note)
        self.heads = heads

    def _note(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        logits = output[0]
        if not logits.requires_grad:
            return
        labels = torch.cat(self.heads.__dict__["_taken"][1])
        wanted = F.one_hot(labels, logits.shape[1])
        plain = (logits.detach().softmax(1) - wanted) / len(labels)
        front = labels > 0

        def note(gradient: Tensor) -> None:
            self.size.append(float(gradient.norm() / plain.norm()))
            self.front.append(float(gradient[front].norm() / plain[front].norm().clamp(min=1e-12)))
            odds = (gradient * wanted).sum(1) - gradient[:, 0]  # of the own class against the background
            self.down.append(float((odds[front] > 0).float().mean()) if bool(front.any()) else 0.0)

        logits.register_hook(note)

    def summary(self) -> dict[str, float]:
        """Medians over the second half of the run."""
        half = len(self.size) // 2
        parts = {"gradient": self.size, "gradient of foreground": self.front, "pushed down": self.down}
        return {name: statistics.median(values[half:]) for name, values in parts.items()}


def train(config: Config, part: Part, classes: int, device: torch.device) -> tuple[BatchedHeads, dict[str, float]]:
    """The heads after training, and what was watched."""
    torch.manual_seed(config.seed)
    heads = heads_of(config, classes, device).train()
    watched, parameters = Watched(heads), list(heads.parameters())
    optimizer = optim.make_optimizer([{"params": parameters}], config.optim)
    sampler = part.sampler(config.batch.size, config.seed)
    for step in range(config.epochs * len(sampler)):
        optim.set_rates(optimizer, config.optim, step, len(sampler), config.epochs)
        rows = sampler.at(step).tolist()
        proposals, sizes = [part.proposals[row].to(device) for row in rows], [part.sizes[row] for row in rows]
        with optim.autocast(config.precision, device):
            _, losses = heads({"0": part.maps(rows, device)}, proposals, sizes, part.targets(rows, device))
        descend(optimizer, parameters, sum(losses.values()), config.optim.clip)
    return heads.eval(), watched.summary()


@torch.inference_mode()
def judged(
    heads: BatchedHeads, part: Part, config: Config, classes: int, device: torch.device
) -> dict[str, float]:
    """Average precisions in percent; the mean IoU of foreground's boxes, and Spearman's rho of scores with it."""
    found: dict[str, dict[int, dict[str, Tensor]]] = {"softmax": {}, "odds": {}}
    quality: list[Tensor] = []
    for rows in part.chunks():
        sizes, proposals = [part.sizes[row] for row in rows], [part.proposals[row].to(device) for row in rows]
        with optim.autocast(config.precision, device):
            pooled = heads.box_roi_pool({"0": part.maps(rows, device)}, proposals, sizes)
            logits, regression = heads.box_predictor(heads.box_head(pooled))
        for scores, out in found.items():
            out.update(zip(rows, detections_of(heads, logits, regression, proposals, sizes, scores), strict=True))
        targets = part.targets(rows, device)
        found_of, labels = heads.assign_targets_to_proposals(
            proposals, [one["boxes"] for one in targets], [one["labels"] for one in targets]
        )
        owners = [
            one["boxes"][at] if len(one["boxes"]) else boxes
            for one, at, boxes in zip(targets, found_of, proposals, strict=True)
        ]
        encoded = heads.box_coder.encode(owners, proposals)
        label = torch.cat(labels)
        overlap = iou(*decoded(heads.box_coder, regression, proposals, label, torch.cat(encoded)))
        odds = class_log_odds(logits, "softmax").gather(1, (label - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        quality.append(torch.stack([label.float(), odds, overlap])[:, label > 0].cpu())
    objects = [Objects(*one) for one in part.objects]
    result = {}
    for scores, out in found.items():
        measured = evaluate([out[row] for row in range(len(objects))], objects, classes)
        result.update(measured.summary(scores))
    label, odds, overlap = torch.cat(quality, 1)
    result["IoU"] = 100 * float(overlap.mean())
    result["rho"] = float(metrics.spearman(odds, overlap, groups=label.long(), num_groups=classes + 1))
    return result


def table(results: dict[str, dict[str, float]], about: str) -> str:
    """What is finished, as Markdown; last epoch."""
    shown = [*METRICS, "IoU", "rho", "gradient", "gradient of foreground", "pushed down", "seconds"]
    lines = ["# Fast R-CNN's head on frozen features, Pascal VOC 2007, train -> val: losses", "", about, ""]
    lines += [f"| loss | rate | seeds | {' | '.join(shown)} |", "|" + "---|" * (len(shown) + 3)]
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for name, result in results.items():
        row, rate, _ = name.split(" / ")
        rows.setdefault((row, rate), []).append(result)
    for (row, rate), runs in rows.items():
        cells = []
        for name in shown:
            values = [run[name] for run in runs]
            cells.append(mean_of(values) if name in METRICS else f"{statistics.fmean(values):.3g}")
        lines.append(f"| {row} | {rate} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is not finished and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", help="a safetensors file of ResNet-50, or none")
    parser.add_argument("--out", type=Path, default=Path("runs/regions"))
    parser.add_argument(
        "--rows", default="^boxes: CE, GIoU$|^boxes: CE . log_ap, GIoU$", help="a regular expression"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="only write the table of what is finished")
    parser.add_argument("settings", nargs="*", help="settings of all rows, key=value")
    args = parser.parse_args()
    kept, device, end = args.out / "results.json", torch.device(args.device), time.monotonic() + 60 * args.minutes
    saved = json.loads(kept.read_text()) if kept.is_file() else {"results": {}}
    told = {"epochs": args.epochs, "settings": args.settings}
    if not args.table:
        if args.data is None or args.weights is None:
            parser.error("--data and --weights are needed to train")
        if saved.setdefault("told", told) != told:
            raise UserError(f"--out: {kept} was begun with other settings: {saved['told']}, now {told}")
        here, there, classes, note = ready(args.out / "features.pt", settings_of(args), device)
        about = machine.describe(device)
        saved["about"] = f"{about['hardware']}. {about['versions']}. {about['started']}. {note}."
        jobs = [(seed, row, rate) for seed in range(args.seeds) for row in ROWS for rate in args.rates]
        for seed, row, rate in jobs:
            name = f"{row} / {rate:g} / {seed}"
            if not re.search(args.rows, row) or name in saved["results"] or time.monotonic() > end:
                continue
            begin, config = time.monotonic(), settings_of(args, row, rate, seed)
            heads, watched = train(config, here, len(classes), device)
            result = {**judged(heads, there, config, len(classes), device), **watched}
            saved["results"][name] = {**result, "seconds": time.monotonic() - begin}
            write_text(kept, json.dumps(saved, indent=1))
            print(name, {key: round(value, 3) for key, value in saved["results"][name].items()}, flush=True)
    options = f"--epochs {saved['told']['epochs']} {' '.join(saved['told']['settings'])}".strip()
    text = table(saved["results"], f"{saved.get('about', '')} `python -m benchmarks.regions {options}`".strip())
    write_text(args.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    without_traceback(main)
