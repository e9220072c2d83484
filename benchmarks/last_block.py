"""Compare losses where a network's last block and its head learn, on cached images: a filter on a CPU.

    python -m benchmarks.last_block cub=DIR flowers=DIR cars=DIR --weights resnet50.safetensors
        [--out runs/last-block] [--rows 'Pair|^Multi'] [--rates 1e-4 3e-4] [--seeds 2] [--set key=value ...]

A run takes under a minute on one CPU core. What the blocks before the last one give is computed once, for every
training image as many random crops as there are epochs: a step takes the crops of its epoch. All else is the
default recipe (`rankgrad show folder`) with smaller images: head, batches, one epoch in which the backbone waits,
cosine schedule (`epochs` and `optim.clip` do not count). Half of the *training* classes train, the others judge;
last epoch.

Data sets and rows are those of `python -m benchmarks.embeddings`. Rates are higher than for a whole network.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.embeddings import ROWS, prepared
from benchmarks.side_by_side import mean_of, without_traceback
from rankgrad.lab import recipes
from rankgrad.lab.retrieval import losses
from rankgrad.lab.retrieval.images import data as data_sets
from rankgrad.lab.retrieval.images import model
from rankgrad.lab.retrieval.images.config import Config
from rankgrad.lab.retrieval.images.source import ImageSource
from rankgrad.lab.retrieval.images.task import ImageTask
from rankgrad.lab.retrieval.source import Draw
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.training import machine, optim
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.metrics import retrieval_metrics
from rankgrad.samplers import ClassSampler

EPOCHS = 12
IMAGES = ["view.resize=146", "view.crop=128", "view.test_crop=160", "hold_out=0.5", "data.cache=ram"]


class Features(NamedTuple):
    """``views [crops, N, C, H, W]`` in float16, and labels from 0."""

    views: Tensor
    labels: Tensor


def some_of(items: Items, most: int) -> Items:
    """The first ``most`` images of every class."""
    order = items.labels.argsort(stable=True)
    counts = items.labels.unique(return_counts=True)[1]
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return items.take(order[place < most]).renumbered()


def extract(items: Items, body: nn.Module, config: Config, crops: int) -> Features:
    """What the body gives: of random crops, or with 0 of the centre."""
    source = ImageSource(items, config.data, config.view, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    views = []
    for number in range(max(crops, 1)):
        parts = []
        for rows in torch.arange(len(source)).split(64):
            draw = Draw(generator, total=len(rows), first=0) if crops else None
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                images = source.inputs(rows, draw=draw).contiguous(memory_format=torch.channels_last)
                parts.append(body(images).to(torch.float16))
        views.append(torch.cat(parts))
        print(f"view {number + 1} of {max(crops, 1)}: {len(source)} images", flush=True)
    return Features(torch.stack(views).clone(), items.labels)


class Tail(nn.Module):
    """The last block of a ResNet with pooling and head; what it takes is what the blocks before it give."""

    def __init__(self, network: model.Embedder) -> None:
        super().__init__()
        self.network = network
        self.backbone = network.backbone.layer4[-1]
        network.backbone = nn.Sequential(self.backbone, network.backbone.avgpool, nn.Flatten())

    def forward(self, features: Tensor) -> Tensor:
        """Embeddings ``[B, dim]``."""
        return self.network(features.float().contiguous(memory_format=torch.channels_last))


def cut(config: Config) -> tuple[nn.Module, Tail]:
    """A new network in two parts: what is computed once, and what learns."""
    assert config.view.crop is not None
    network, _ = model.build(config.model, config.view.crop, config.seed)
    whole = network.backbone
    names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
    body = nn.Sequential(*(getattr(whole, name) for name in names), whole.layer4[:-1]).eval()
    return body.to(memory_format=torch.channels_last), Tail(network)


def features_of(file: Path, config: Config, most: int) -> tuple[Features, Features]:
    """To train on and to judge on, from the file if it is there."""
    made_by = recipes.dump(config) + f"most: {most}\ncrops: {EPOCHS}\n"
    if file.is_file():
        kept = torch.load(file, weights_only=True, mmap=True)
        if kept["made by"] == made_by:
            return Features(*kept["train"]), Features(*kept["test"])
    splits = data_sets.read(config.data)
    body, _ = cut(config)
    found = [
        extract(some_of(items, most), body, config, crops)
        for items, crops in ((splits.train, EPOCHS), (splits.query, 0))
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"made by": made_by, "train": tuple(found[0]), "test": tuple(found[1])}, file)
    return found[0], found[1]


def train(config: Config, rate: float, seed: int, here: Features, there: Features) -> tuple[float, float]:
    """R@1 and mAP@R after training with the loss of these settings."""
    config = config.with_rate(rate).model_copy(update={"seed": seed})
    torch.manual_seed(seed)
    tail, classes = cut(config)[1], int(here.labels.max()) + 1
    tail.network.train()  # which leaves frozen batch norms as they are
    loss = losses.build(config.loss, config.miner, classes=classes, embedding=config.model.embedding)
    block = list(tail.backbone.parameters())
    known = {id(one) for one in block}
    proxies = {"params": list(loss.parameters()), "scale": config.proxy_lr / rate, "weight_decay": 0.0}
    groups = [
        {"params": [one for one in block if one.requires_grad], "begin": config.head_epochs},
        {"params": [one for one in tail.parameters() if id(one) not in known], "scale": config.embedding_lr},
        proxies,
    ]
    optimizer = optim.make_optimizer(groups, config.optim)
    per_class = config.batch.per_class
    sampler = ClassSampler(
        here.labels, size=min(config.batch.size, classes * per_class), per_class=per_class, seed=seed
    )
    for step in range(EPOCHS * len(sampler)):
        optim.set_rates(optimizer, config.optim, step, len(sampler), EPOCHS)
        rows = sampler.at(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = tail(here.views[step // len(sampler), rows])
        loss(embeddings, here.labels[rows], rows).backward()
        optim.hold_back(optimizer)
        optimizer.step()
    with torch.inference_mode():
        found = torch.cat([tail.eval()(views) for views in there.views[0].split(128)])
    summary = retrieval_metrics(found, there.labels).summary((1,))
    return summary["R@1"], summary["mAP@R"]


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="NAME=DIR: cub, flowers, cars")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/last-block"))
    parser.add_argument("--rows", default=".", help="a regular expression: which rows of benchmarks/embeddings.py")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--most", type=int, default=30, help="images of a class")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], help="settings for every run")
    args = parser.parse_args()
    about = machine.describe(torch.device("cpu"))
    lines = [
        "# A ResNet-50's last block and head on cached images: held-out training classes, R@1 / mAP@R",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. {EPOCHS} epochs, {args.most} images of a "
        f"class, {args.seeds} seeds.",
    ]
    for name, folder in (text.split("=", 1) for text in args.data):
        root = prepared(name, Path(folder).expanduser(), args.out)
        common = [f"data.root={root}", f"weights={args.weights}", *IMAGES, *args.settings]
        features = features_of(
            args.out / f"{name}.pt", ImageTask.completed(recipes.load("folder", common)[1]), args.most
        )
        lines += ["", f"## {name}", "", f"| loss | {' | '.join(f'{rate:g}' for rate in args.rates)} |"]
        lines += ["|" + "---|" * (1 + len(args.rates))]
        for row in (row for row in ROWS if re.search(args.rows, row)):
            config = ImageTask.completed(recipes.load("folder", [*common, *ROWS[row].split()])[1])
            cells = []
            for rate in args.rates:
                runs = [train(config, rate, seed, *features) for seed in range(args.seeds)]
                cells.append(" / ".join(mean_of(list(values)) for values in zip(*runs, strict=True)))
            lines.append(f"| {row} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            write_text(args.out / "table.md", "\n".join([*lines, ""]))


if __name__ == "__main__":
    without_traceback(main)
