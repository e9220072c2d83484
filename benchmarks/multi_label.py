"""A multi-label classifier on Pascal VOC 2007, where mAP is the metric: what loss trains a ResNet-50 best for it?

    python -m benchmarks.multi_label --data DIR --weights resnet50.safetensors [--out runs/multi-label]
        [--size 224] [--batch 64] [--epochs 8] [--seeds 3] [--rows 'BCE|alone'] [--parallel 3] [--minutes 25]
    python -m benchmarks.multi_label --table --out runs/multi-label          the table of what is finished

DIR has VOCdevkit/VOC2007. An image is relevant to the classes that it shows; a class of which it shows difficult
objects alone is left out for this image, as in the official evaluation. Every row has a learning rate and settings
of its own to choose, by mAP on `val` after training on `train`, with the first seed: the rate with its first
setting, then the other settings at that rate. What is chosen trains on `trainval` and is judged once on `test`,
with all seeds. Finished runs are not run again, results are written
after each. With --parallel so many processes share the device, each with the images in its memory.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet
from torchvision.ops import sigmoid_focal_loss

import rankgrad
from benchmarks.side_by_side import without_traceback
from rankgrad import metrics
from rankgrad.lab.detection import voc
from rankgrad.lab.detection.scenes import scenes_of
from rankgrad.lab.retrieval.images.augment import crops, resized_boxes
from rankgrad.lab.retrieval.images.config import View
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.optim import autocast
from rankgrad.lab.vision.folders import find
from rankgrad.lab.vision.images import MEAN, STD, Store, decode
from rankgrad.lab.vision.weights import load_file
from rankgrad.samplers import random_order

RATES = (3e-5, 1e-4, 3e-4)

#: The loss of logits, relevance and mask, ``[images, classes]`` each.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _mean(each: Tensor, mask: Tensor) -> Tensor:
    return each.where(mask, 0).sum() / mask.sum().clamp(min=1)


def binary_cross_entropy(logits: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """Mean over all pairs of an image and a class."""
    return _mean(F.binary_cross_entropy_with_logits(logits, relevance.to(logits.dtype), reduction="none"), mask)


def focal(gamma: float) -> Loss:
    """Focal loss without weights of classes."""
    return lambda logits, relevance, mask: _mean(
        sigmoid_focal_loss(logits, relevance.to(logits.dtype), alpha=-1, gamma=gamma), mask
    )


def asymmetric(gamma: float, clip: float = 0.05) -> Loss:
    r"""Asymmetric loss: :math:`-(1-y) m^\gamma \log(1-m) - y \log p`, :math:`m = (p - clip)_+`.

    Ridnik et al. 2021. As in its authors' program, no gradient flows through the power.
    """

    def loss(logits: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
        shifted = (logits.sigmoid() - clip).clamp(min=0)
        irrelevant = -(shifted.detach() ** gamma) * torch.log1p(-shifted.clamp(max=1 - 1e-6))
        return _mean(torch.where(relevance, -F.logsigmoid(logits), irrelevant), mask)

    return loss


def ranking(weight: float | None, memory: int, form: str = "log_ap") -> Callable[[], Loss]:
    """mAP and pooled AP with automatic reach and margin, beside BCE or (None) alone."""

    def make() -> Loss:
        module = rankgrad.ClassRankingLoss(form=form, margin="auto", memory=memory)

        def loss(logits: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
            module.memory.follow(logits.device)
            ranks: Tensor = module(logits, relevance, mask)
            return ranks if weight is None else binary_cross_entropy(logits, relevance, mask) + weight * ranks

        return loss

    return make


#: Row -> the settings it chooses from: a name, and what makes the loss for a run.
ROWS: dict[str, dict[str, Callable[[], Loss]]] = {
    "BCE": {"": lambda: binary_cross_entropy},
    "focal": {"gamma 1": lambda: focal(1), "gamma 2": lambda: focal(2)},
    "asymmetric": {"gamma 2": lambda: asymmetric(2), "gamma 4": lambda: asymmetric(4)},
    "BCE + ranking": {
        "0.3 log_ap, memory 7": ranking(0.3, 7),
        "1 log_ap, memory 7": ranking(1.0, 7),
        "1 ap, memory 7": ranking(1.0, 7, "ap"),
        "1 ap, memory 30": ranking(1.0, 30, "ap"),
    },
    "ranking alone": {"log_ap, memory 7": ranking(None, 7), "log_ap, memory 30": ranking(None, 30)},
}


class Images(NamedTuple):
    """A part of the data set: pixels, ``[images, classes]`` relevance and mask."""

    store: Store
    relevance: Tensor
    mask: Tensor


def read(root: Path, part: str, size: int, device: torch.device) -> Images:
    """The images of a list with the classes they show."""
    base = find(root, "VOCdevkit/VOC2007", "VOC2007", "ImageSets")
    base = base.parent if base.name == "ImageSets" else base
    faults: list[str] = []
    scenes = scenes_of(voc.read_list(base, part, workers=8), voc.CLASSES, faults)
    cache = "device" if device.type == "cuda" else "ram"
    store = Store(
        scenes.sources, scenes.names, lambda file: decode(file, 2 * size), cache=cache, workers=16, device=device
    )
    if faults or store.faults:
        raise UserError(f"--data: {(faults + store.faults)[0]}")
    relevance, mask = (torch.zeros(len(scenes), len(voc.CLASSES), dtype=torch.bool) for _ in range(2))
    mask.fill_(True)
    for row, objects in enumerate(scenes.objects):
        mask[row, objects.labels[objects.difficult] - 1] = False
        relevance[row, objects.labels[~objects.difficult] - 1] = True
    mask |= relevance
    return Images(store, relevance.to(device), mask.to(device))


def network_of(weights: str, seed: int) -> nn.Module:
    """ResNet-50 (``tiny``: for trying things out) with weights from a file and a new last layer."""
    torch.manual_seed(seed)
    tiny = weights == "tiny"
    kind = (
        {"block": resnet.BasicBlock, "layers": [1] * 4}
        if tiny
        else {"block": resnet.Bottleneck, "layers": [3, 4, 6, 3]}
    )
    network = resnet.ResNet(**kind)
    width = network.fc.in_features
    network.fc = nn.Identity()
    if not tiny:
        load_file(network, Path(weights).expanduser())
    network.fc = nn.Linear(width, len(voc.CLASSES))
    return network


class Run(NamedTuple):
    """A training."""

    row: str
    setting: str
    rate: float
    seed: int
    train: str
    test: str

    @property
    def name(self) -> str:
        """By which its result is kept."""
        return f"{self.row} [{self.setting}] {self.rate:g}, seed {self.seed}, {self.train} -> {self.test}"


def train(run: Run, train: Images, test: Images, *, weights: str, size: int, batch: int, epochs: int) -> float:
    """mAP in percent on the test images after training, last epoch."""
    device = train.store.device
    network = network_of(weights, run.seed).to(device, memory_format=torch.channels_last)
    forward = torch.compile(network) if device.type == "cuda" else network
    loss, view = ROWS[run.row][run.setting](), View(crop=size, mean=MEAN, std=STD)
    fast, slow = (
        list(network.fc.parameters()),
        [p for n, p in network.named_parameters() if not n.startswith("fc")],
    )
    groups = [{"params": slow, "lr": run.rate}, {"params": fast, "lr": 10 * run.rate}]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
    per_epoch, generator = len(train.relevance) // batch, torch.Generator().manual_seed(run.seed)
    if not per_epoch:
        raise UserError(f"--data: expected at least {batch} images to train on, received {len(train.relevance)}")
    total = epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / per_epoch) * 0.5 * (1 + math.cos(math.pi * step / total)),
    )
    network.train()
    for _ in range(epochs):
        for rows in random_order(len(train.relevance), generator)[: per_epoch * batch].split(batch):
            height, width = train.store.shapes[rows].T
            boxes = resized_boxes(height, width, 0.25, generator)
            flips = torch.rand(len(rows), generator=generator) < 0.5
            images = crops(train.store.fetch(rows), boxes, flips, view)
            with autocast("bf16" if device.type == "cuda" else "fp32", device):
                logits = forward(images)
            value = loss(logits.float(), train.relevance[rows.to(device)], train.mask[rows.to(device)])
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            schedule.step()
    return judged(network, test, view, 2 * batch)


@torch.no_grad()
def judged(network: nn.Module, test: Images, view: View, at_a_time: int) -> float:
    """mAP in percent; each image whole, its sides made equal."""
    network.eval()
    device, scores = test.store.device, []
    for rows in torch.arange(len(test.relevance)).split(at_a_time):
        height, width = test.store.shapes[rows].T
        whole = torch.stack([torch.zeros_like(height), torch.zeros_like(height), width, height], dim=1).float()
        with autocast("bf16" if device.type == "cuda" else "fp32", device):
            scores.append(network(crops(test.store.fetch(rows), whole, None, view)).float())
    together = torch.cat(scores)
    if not bool(together.isfinite().all()):
        return 0.0  # it diverged, and is not to be chosen
    found = metrics.average_precision(together.T, test.relevance.T, mask=test.mask.T)
    return 100 * float(found)


def table(results: dict[str, float], rows: list[str], seeds: int, about: str) -> str:
    """What was chosen on val and measured on test, as Markdown."""
    lines = [
        "# Multi-label classification, Pascal VOC 2007, ResNet-50: mAP by loss",
        "",
        about,
        "",
        "Setting and learning rate chosen by mAP on val after training on train (first seed), then trainval -> "
        "test, last epoch, mean ± standard deviation over seeds.",
        "",
        "| loss | chosen | mAP on val | seeds | mAP on test |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        chosen = best(results, row)
        if chosen is None:
            continue
        finals = [results[r.name] for r in finals_of(chosen, seeds) if r.name in results]
        spread = f" ± {statistics.stdev(finals):.2f}" if len(finals) > 1 else ""
        told = f"{statistics.fmean(finals):.2f}{spread}" if finals else ""
        setting = ", ".join(filter(None, [chosen.setting, f"rate {chosen.rate:g}"]))
        lines.append(f"| {row} | {setting} | {results[chosen.name]:.2f} | {len(finals)} | {told} |")
    lines += ["", "All settings on val:", "", "| loss | setting | rate | mAP on val |", "|---|---|---|---|"]
    for run in (run for row in rows for run in choices_of(row, results) if run.name in results):
        lines.append(f"| {run.row} | {run.setting} | {run.rate:g} | {results[run.name]:.2f} |")
    return "\n".join([*lines, ""])


def choices_of(row: str, results: dict[str, float]) -> list[Run]:
    """The runs a row chooses from, as far as known: its first setting at every rate, others at the best."""
    first, *others = ROWS[row]
    rates = [Run(row, first, rate, 0, "train", "val") for rate in RATES]
    if any(run.name not in results for run in rates):
        return rates
    fastest = max(rates, key=lambda run: results[run.name])
    return [*rates, *(fastest._replace(setting=setting) for setting in others)]


def finals_of(chosen: Run, seeds: int) -> list[Run]:
    """The runs with what was chosen."""
    return [chosen._replace(seed=seed, train="trainval", test="test") for seed in range(seeds)]


def best(results: dict[str, float], row: str) -> Run | None:
    """What a row chooses, once all its choices are measured."""
    runs = choices_of(row, results)
    if any(run.name not in results for run in runs):
        return None
    return max(runs, key=lambda run: results[run.name])


def main() -> None:
    """Run what is not finished and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", help="a safetensors file of ResNet-50; tiny: a small network from scratch")
    parser.add_argument("--out", type=Path, default=Path("runs/multi-label"))
    parser.add_argument("--size", type=int, default=224, help="side of the network's input, in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default=".", help="a regular expression")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on the device")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="only write the table of what is finished")
    args = parser.parse_args()
    rows, device = [row for row in ROWS if re.search(args.rows, row)], torch.device(args.device)
    kept = args.out / "results.json"
    settings = {name: getattr(args, name) for name in ("size", "batch", "epochs")}
    settings["weights"] = Path(args.weights or "").name
    saved = json.loads(kept.read_text()) if kept.is_file() else {"settings": settings, "results": {}}
    results = saved["results"]
    if not args.table:
        if args.data is None or args.weights is None:
            parser.error("--data and --weights are needed to train")
        if saved["settings"] != settings:
            raise UserError(f"--out: {kept} was begun with other settings: {saved['settings']}, now {settings}")
        described = machine.describe(device)
        saved["machine"] = f"{described['hardware']}. {described['versions']}. {described['started']}."
        end = time.monotonic() + 60 * args.minutes
        for run, value, seconds in _measured(args, rows, results, end):
            results[run.name] = value
            write_text(kept, json.dumps(saved, indent=1))
            print(f"{run.name}: {value:.2f} ({seconds:.0f} s)", flush=True)
    options = " ".join(f"--{name} {value}" for name, value in saved["settings"].items())
    about = f"{saved.get('machine', '')} `python -m benchmarks.multi_label {options}`, AdamW."
    write_text(args.out / "table.md", table(results, rows, args.seeds, about.strip()))
    print((args.out / "table.md").read_text())


def _next(rows: list[str], results: dict[str, float], begun: set[str], seeds: int) -> Run | None:
    """What to do next: choices of all rows, then, of rows that have chosen, a seed of each before the next."""
    wanted = [run for row in rows for run in choices_of(row, results)]
    chosen = [one for row in rows if (one := best(results, row)) is not None]
    wanted += [finals_of(one, seeds)[seed] for seed in range(seeds) for one in chosen]
    return next((run for run in wanted if run.name not in results and run.name not in begun), None)


def _measured(
    args: argparse.Namespace, rows: list[str], results: dict[str, float], end: float
) -> Iterator[tuple[Run, float, float]]:
    """Each run with its mAP and its seconds, as they come; a process that dies takes one run with it."""
    context, begun = multiprocessing.get_context("spawn"), set[str]()
    workers: dict[Connection, tuple[Run, multiprocessing.process.BaseProcess]] = {}
    free: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
    while True:
        while time.monotonic() < end and len(workers) < args.parallel:
            run = _next(rows, results, begun, args.seeds)
            if run is None:
                break
            begun.add(run.name)
            if not free:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, args))
                process.start()
                theirs.close()
                free.append((ours, process))
            pipe, process = free.pop()
            pipe.send(run)
            workers[pipe] = run, process
        if not workers:
            break
        for pipe in wait(list(workers)):
            assert isinstance(pipe, Connection)
            run, process = workers.pop(pipe)
            try:
                value, seconds = pipe.recv()
            except EOFError:
                print(f"FAILED {run.name}", flush=True)
                continue
            free.append((pipe, process))
            yield run, value, seconds
    for pipe, process in free:
        pipe.send(None)
        process.join()


def _work(pipe: Connection, args: argparse.Namespace) -> None:
    """Do runs until there are none; images are read once."""
    parts: dict[str, Images] = {}
    while (run := pipe.recv()) is not None:
        for part in (run.train, run.test):
            if part not in parts:
                parts[part] = read(args.data, part, args.size, torch.device(args.device))
        began = time.monotonic()
        sizes = {"weights": args.weights, "size": args.size, "batch": args.batch, "epochs": args.epochs}
        value = train(run, parts[run.train], parts[run.test], **sizes)
        pipe.send((value, time.monotonic() - began))


if __name__ == "__main__":
    without_traceback(main)
