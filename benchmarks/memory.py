"""Memory on Omniglot: a small network from scratch, without memory, with it, and with it in one list.

    python -m benchmarks.memory --data shared/data/omniglot [--out runs/memory] [--steps 300] [--seeds 2]

Trains on one of Omniglot's small background sets and judges on other alphabets, of the second. In one list with
fresh items, as in the paper's text, remembered ones let a network lower the loss by moving all embeddings; how far
they went is 1 - |mean embedding|, 1 for directions all around, 0 for a single one. A run took two to four
minutes on one core of a busy machine.
"""

from __future__ import annotations

import argparse
import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import rankgrad
from benchmarks import side_by_side
from benchmarks.cub import mean_of
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.losses.embedding import EmbeddingLoss
from rankgrad.metrics import retrieval_metrics
from rankgrad.pairs import Lookup, unit_length
from rankgrad.samplers import ClassSampler

SIDE, EMBEDDING, BATCH, PER_CLASS = 28, 64, 128, 4


class OneList(nn.Module):
    """A loss on embeddings that ranks remembered items against fresh ones, as the paper's text has it."""

    def __init__(self, loss: EmbeddingLoss, size: int) -> None:
        super().__init__()
        self.loss, self.memory = loss, rankgrad.EmbeddingMemory(size)

    def forward(self, embeddings: Tensor, labels: Tensor, *, items: Tensor) -> Tensor:
        """The loss of the batch."""
        rows = unit_length(embeddings)
        lists = Lookup(rows, labels, items, rows, labels, items)
        if self.memory.rows:
            old = self.memory.candidates()
            valid = torch.cat([torch.ones_like(items, dtype=torch.bool), old[3]])
            together = [torch.cat(pair) for pair in zip((rows, labels, items), old[:3], strict=True)]
            lists = Lookup(rows, labels, items, *together, valid)
        value = self.loss.mean([lists])
        self.memory.push(rows, labels, items)
        return value


LOSSES: dict[str, Callable[..., EmbeddingLoss]] = {
    "recall, lam 0.2, margin 0.02": lambda **more: rankgrad.RecallLoss(lam=0.2, margin=0.02, **more),
    "AP, window 0.1, margin 0.05": lambda **more: rankgrad.AveragePrecisionLoss(window=0.1, margin=0.05, **more),
}
MEMORIES: dict[str, Callable[[Callable[..., EmbeddingLoss]], nn.Module]] = {
    "none": lambda make: make(),
    "3 batches": lambda make: make(memory=3),
    "3 batches, in one list": lambda make: OneList(make(), 3),
}


def read(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Images to train on and to judge on, ``[N, 1, 28, 28]`` in 0 ... 1, ink is 1, and labels: the characters.

    The two sets share two alphabets, Greek and Latin, which nothing is judged on.
    """
    files = [folder / f"images_background_small{half}.zip" for half in (1, 2)]
    known = _alphabets(files[0])
    return [_read(files[0], known), _read(files[1], _alphabets(files[1]) - known)]


def _alphabets(file: Path) -> set[str]:
    with zipfile.ZipFile(file) as archive:
        return {name.split("/")[1] for name in archive.namelist() if name.endswith(".png")}


def _read(file: Path, alphabets: set[str]) -> tuple[Tensor, Tensor]:
    with zipfile.ZipFile(file) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))
        names = [name for name in names if name.split("/")[1] in alphabets]
        images = [Image.open(io.BytesIO(archive.read(name))).convert("L") for name in names]
    pixels = np.stack([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)) for image in images])
    _, labels = np.unique([name.rsplit("/", 1)[0] for name in names], return_inverse=True)
    return 1 - torch.from_numpy(pixels).float().unsqueeze(1) / 255, torch.from_numpy(labels)


def network() -> nn.Module:
    """Three convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, EMBEDDING))


def train(loss: nn.Module, seed: int, rate: float, steps: int, halves: list[tuple[Tensor, Tensor]]) -> list[float]:
    """R@1 and mAP@R on the other half after training, and 1 - |mean embedding| there."""
    (images, labels), (others, other_labels) = halves
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    sampler = ClassSampler(labels, size=BATCH, per_class=PER_CLASS, seed=seed)
    for step in range(steps):
        rows = sampler.at(step)
        optimizer.zero_grad()
        loss(model(images[rows]), labels[rows], items=rows).backward()
        optimizer.step()
    with torch.no_grad():
        found = unit_length(torch.cat([model.eval()(part) for part in others.split(512)]))
    metrics = retrieval_metrics(found, other_labels).summary((1,))
    return [metrics["R@1"], metrics["mAP@R"], 1 - float(found.mean(0).norm())]


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=side_by_side.folder, required=True, help="the folder with Omniglot's two zip files"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    args = parser.parse_args()
    halves = read(args.data)
    about = machine.describe(torch.device("cpu"))
    lines = [
        "# Memory on Omniglot, a small network from scratch",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. "
        f"`python -m benchmarks.memory --data DIR --steps {args.steps} --seeds {args.seeds} "
        f"--rates {' '.join(f'{rate:g}' for rate in args.rates)}`",
        "",
        f"Trained on small1 ({len(halves[0][1])} images), judged on the alphabets of small2 that it does not have "
        f"({len(halves[1][1])}). "
        f"{args.steps} steps of Adam, batches of {BATCH // PER_CLASS} characters x {PER_CLASS}. Means ± standard "
        "deviation over seeds, at the end. Spread: 1 - |mean embedding| of the judged images.",
        "",
        "| loss | memory | rate | seeds | R@1 | mAP@R | spread |",
        "|" + "---|" * 7,
    ]
    for name, make in LOSSES.items():
        for memory, with_memory in MEMORIES.items():
            for rate in args.rates:
                begin = time.monotonic()
                runs = [train(with_memory(make), seed, rate, args.steps, halves) for seed in range(args.seeds)]
                recall, precision, spread = zip(*runs, strict=True)
                cells = [
                    name,
                    memory,
                    f"{rate:g}",
                    str(args.seeds),
                    mean_of(list(recall)),
                    mean_of(list(precision)),
                ]
                lines.append(f"| {' | '.join(cells)} | {np.mean(spread):.2f} |")
                print(f"{lines[-1]}  {(time.monotonic() - begin) / args.seeds:.0f} s a run", flush=True)
                write_text(args.out / "table.md", "\n".join([*lines, ""]))


if __name__ == "__main__":
    side_by_side.without_traceback(main)
