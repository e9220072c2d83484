"""Measure the losses on CUB-200-2011 in one loop, and print a table: rows x seeds, best and last evaluation.

    python benchmarks/cub.py --data DIR --weights resnet50.safetensors --out runs/table [--epochs 20] [--seeds 3]
        [--rows 'recall|ap'] [--hold-out 0.5] [key=value ...]

Every row is `rankgrad train cub` with the settings named in the table, so a row can be run again by hand. Runs
that are finished are not run again. With --hold-out the training classes alone are split: choose settings there.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

import torch

from rankgrad.recipes import run
from rankgrad.training import machine
from rankgrad.training.checkpoint import write_text

OURS = "loss.lam={lam} loss.margin={margin} loss.memory={memory}"


def ours(loss: str, lam: float = 0.2, margin: float = 0.02, memory: int = 3) -> str:
    """Settings of one of our losses."""
    return f"{loss} {OURS.format(lam=lam, margin=margin, memory=memory)}"


LOGLOG, LOG = "loss=recall loss.weight=loglog", "loss=recall loss.weight=log"
TRIPLET = "loss=pml:TripletMarginLoss loss.margin=0.2 miner=pml:TripletMarginMiner miner.type_of_triplets=semihard"
ROWS = {
    "recall loglog": ours(LOGLOG),
    "recall log": ours(LOG),
    "ap": ours("loss=ap", margin=0.05),
    "recall loglog, no memory": ours(LOGLOG, memory=0),
    "ap, no memory": ours("loss=ap", margin=0.05, memory=0),
    "recall loglog, no margin": ours(LOGLOG, margin=0),
    "recall loglog, lambda 0.04": ours(LOGLOG, lam=0.04),
    "recall loglog, lambda 1": ours(LOGLOG, lam=1),
    "FastAP": "loss=pml:FastAPLoss loss.num_bins=10",
    "SmoothAP": "loss=pml:SmoothAPLoss lr=1e-5",
    "MultiSimilarity": "loss=pml:MultiSimilarityLoss loss.alpha=2 loss.beta=50 lr=1e-5",
    "Triplet, semi-hard": TRIPLET + " lr=1e-5",
    "Contrastive": "loss=pml:ContrastiveLoss loss.neg_margin=0.5 lr=1e-5",
    "ProxyNCA": "loss=pml:ProxyNCALoss loss.softmax_scale=3 proxy_lr=2000 lr=1e-5",
    "ProxyAnchor": "loss=pml:ProxyAnchorLoss loss.margin=0.1 loss.alpha=32 proxy_lr=2000 lr=1e-5",
}


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="settings for every row")
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default=".", help="a regular expression")
    parser.add_argument("--hold-out", type=float, default=0.0)
    args = parser.parse_args()
    milestone = args.epochs * 35 / 80  # the paper's place in the run
    every = [f"data.root={args.data}", f"weights={args.weights}", f"epochs={args.epochs}"]
    every += [f"milestones=[{milestone:g}]", f"hold_out={args.hold_out}", "save_minutes=60", *args.settings]

    lines: list[str] = []
    for name, settings in ROWS.items():
        if not re.search(args.rows, name):
            continue
        folder = args.out / re.sub(r"\W+", "-", name).strip("-")
        begin = time.monotonic()
        _, results = run.run("cub", [*every, *settings.split()], out=str(folder), resume=True, seeds=args.seeds)
        seconds = (time.monotonic() - begin) / args.seeds
        found = {(row["of"], row["metric"]): (row["mean"], row["deviation"]) for row in run.spread(results)}
        wanted = [("best", m) for m in ("R@1", "R@2", "R@4", "R@8", "mAP@R")] + [
            ("last", "R@1"),
            ("last", "mAP@R"),
        ]
        cells = [f"{found[key][0]:.1f} ± {found[key][1]:.1f}" for key in wanted]
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:.0f} | {results[-1].speed:,.0f} | `{settings}` |")
        write_text(args.out / "table.md", table(lines, args.seeds, every))
    print((args.out / "table.md").read_text())


def table(lines: list[str], seeds: int, every: list[str]) -> str:
    """The table with what it was measured on."""
    told = machine.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    private = [setting for setting in every if not setting.startswith(("data.root", "weights"))]
    head = [
        f"# CUB-200-2011, ResNet-50, {seeds} seeds, mean ± standard deviation",
        "",
        f"{told['hardware']}. {told['versions']}. {told['started']}.",
        "",
        f"`rankgrad train cub` with `{' '.join(private)}` and each row's settings. Best: the highest R@1.",
        "",
        "| loss | best R@1 | R@2 | R@4 | R@8 | mAP@R | last R@1 | last mAP@R | s a run | pictures/s | settings |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines, ""])


if __name__ == "__main__":
    main()
