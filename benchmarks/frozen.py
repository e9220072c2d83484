"""Compare losses on frozen features: a linear embedding, half of CUB's training classes against the other half.

    python -m benchmarks.frozen --data DIR --weights resnet50.safetensors --out runs/frozen [--rows 'proxy|Anchor']
        [--seeds 4] [--rates 1e-4 2e-4 4e-4] [--settings 'name: loss=... loss.x=...' ...] [-- key=value ...]

A run takes ten seconds on one CPU core instead of half a minute on an H200, so that many forms of a loss can be
tried before the best few train a whole network. The features of each training image are computed
once, for the centre and three random crops. Every row is tried at every learning rate; the table shows all.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import cub
from rankgrad.lab import recipes
from rankgrad.lab.retrieval import losses
from rankgrad.lab.retrieval.images import data as data_sets
from rankgrad.lab.retrieval.images import model
from rankgrad.lab.retrieval.images.config import Config
from rankgrad.lab.retrieval.images.source import ImageSource
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.retrieval.source import Draw
from rankgrad.lab.training import machine, optim
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.config import Optim
from rankgrad.lab.vision.images import leave_out
from rankgrad.metrics import retrieval_metrics
from rankgrad.samplers import ClassSampler

CROPS = 3
EPOCHS = 12
PROXY_RATE = 0.02
#: 16 of 50 classes in a step, 4 images each: the share of the classes that a batch of 128 shows of all 100.
BATCH = 64


class Features(NamedTuple):
    """``views [1 + crops, N, features]``, the centre first, and labels from 0."""

    views: Tensor
    labels: Tensor


def extract(source: ImageSource, network: nn.Module, config: Config, crops: int) -> Features:
    """Features of all images: the centre, and random crops."""
    generator = torch.Generator().manual_seed(0)
    views = []
    for view in range(1 + crops):
        parts = []
        for rows in torch.arange(len(source)).split(64):
            draw = Draw(generator, total=len(rows), first=0) if view else None
            with torch.inference_mode(), optim.autocast(config.precision, source.device):
                parts.append(network(source.inputs(rows, draw=draw)).float().cpu())
        views.append(torch.cat(parts))
        print(f"features: view {view + 1} of {1 + crops}, {len(views[-1])} images", flush=True)
    return Features(torch.stack(views).clone(), source.items.labels.unique(return_inverse=True)[1])


def both_halves(file: Path, config: Config, device: torch.device) -> tuple[Features, Features]:
    """Features to train on and to judge on, from the file if it is there."""
    made_by = recipes.dump(config)
    if file.is_file():
        kept = torch.load(file, weights_only=True)
        if kept["settings"] != made_by:
            raise SystemExit(f"--out: {file} was made with other settings; say another folder")
        return Features(*kept["train"]), Features(*kept["test"])
    splits = data_sets.read(config.data)
    network, _ = model.build(config.model, config.view.crop, config.seed)
    backbone = network.eval().backbone.to(device, memory_format=torch.channels_last)
    sources = [ImageSource(part, config.data, config.view, device) for part in (splits.train, splits.query)]
    leave_out([source.store for source in sources], len(splits.train) + len(splits.query), config.data.broken)
    found = [extract(source, backbone, config, crops) for source, crops in zip(sources, (CROPS, 0), strict=True)]
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"settings": made_by, "train": tuple(found[0]), "test": tuple(found[1])}, file)
    return found[0], found[1]


def train(settings: str, rate: float, seed: int, halves: tuple[Features, Features]) -> list[dict[str, float]]:
    """Train a linear layer with the loss of these settings; its evaluations, one each two epochs."""
    _, config = recipes.load("cub", settings.split())
    here, there = halves
    torch.manual_seed(seed)
    classes, size = int(here.labels.max()) + 1, config.model.embedding
    layer = nn.Linear(here.views.shape[2], size)
    loss = losses.build(config.loss, config.miner, classes=classes, embedding=size)
    groups = [
        {"params": list(layer.parameters())},
        {"params": list(loss.parameters()), "scale": PROXY_RATE / rate, "weight_decay": 0.0},
    ]
    rule = Optim(name="adam", lr=rate, weight_decay=4e-4, milestones=(EPOCHS * 35 / 80,))
    optimizer = optim.make_optimizer(groups, rule)
    sampler = ClassSampler(here.labels, size=BATCH, per_class=4, seed=seed)
    evaluations = []
    for step in range(EPOCHS * len(sampler)):
        optim.set_rates(optimizer, rule, step, len(sampler), EPOCHS)
        rows = sampler.at(step)
        views = torch.randint(len(here.views), (len(rows),))
        optimizer.zero_grad()
        loss(layer(here.views[views, rows]), here.labels[rows], rows).backward()
        optimizer.step()
        if (step + 1) % (2 * len(sampler)) == 0:
            with torch.no_grad():
                embeddings = nn.functional.normalize(layer(there.views[0]))
            evaluations.append(retrieval_metrics(embeddings, there.labels).summary((1,)))
    return evaluations


def line(name: str, settings: str, rate: float, runs: list[list[dict[str, float]]]) -> str:
    """A row of the table: best and last evaluations, means over seeds."""
    best = [max(run, key=lambda row: row["R@1"]) for run in runs]
    cells = [f"{rate:g}", str(len(runs))]
    cells += [cub.mean_of([row[metric] for row in best]) for metric in ("R@1", "mAP@R")]
    cells += [cub.mean_of([run[-1][metric] for run in runs]) for metric in ("R@1", "mAP@R")]
    return f"| {name} | {' | '.join(cells)} | `{settings}` |"


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/frozen"))
    parser.add_argument("--rows", default=".", help="a regular expression: which rows of benchmarks/cub.py")
    parser.add_argument("--settings", nargs="*", default=[], help="further rows, 'name: key=value ...'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 2e-4, 4e-4])
    parser.add_argument("common", nargs="*", help="settings for the features, key=value")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common = [f"data.root={args.data}", f"weights={args.weights}", "hold_out=0.5", "data.cache=ram", *args.common]
    config = ImageTask.completed(recipes.load("cub", common)[1])
    halves = both_halves(args.out / "features.pt", config, device)
    rows = {name: settings for name, settings in cub.ROWS.items() if re.search(args.rows, name)}
    for name, _, settings in (row.partition(": ") for row in args.settings):
        rows[name] = settings
    about = machine.describe(torch.device("cpu"))
    lines = [
        "# CUB-200-2011, frozen features and a linear embedding: held-out training classes",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. {EPOCHS} epochs, batches of {BATCH // 4} "
        f"classes x 4, proxies at rate {PROXY_RATE}. Means ± standard deviation over seeds, at the highest R@1.",
        "",
        "| loss | rate | seeds | R@1 | mAP@R | R@1 at the end | mAP@R at the end | settings (not its rates) |",
        "|" + "---|" * 8,
    ]
    for name, settings in rows.items():
        for rate in args.rates:
            begin = time.monotonic()
            runs = [train(settings, rate, seed, halves) for seed in range(args.seeds)]
            lines.append(line(name, settings, rate, runs))
            print(f"{lines[-1]}  {(time.monotonic() - begin) / args.seeds:.0f} s a run", flush=True)
            write_text(args.out / "table.md", "\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
