"""Measure the losses on CUB-200-2011 in one loop, and print a table: rows x seeds, best and last evaluation.

    python -m benchmarks.cub --data DIR --weights resnet50.safetensors --out runs/cub [--epochs 20] [--seeds 3]
        [--rows 'recall|ap'] [--parallel 3] [--mps] [--minutes 9] [--hold-out 0.5] [key=value ...]
    python -m benchmarks.cub --table --out runs/cub        the table of what is finished

Every row is `rankgrad train cub` with the settings named in the table, so a row can be run again by hand. Runs
that are finished are not run again, others go on from their last checkpoint; --parallel and --minutes as in
benchmarks/voc.py. With --hold-out the training classes alone are split: choose settings there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks import side_by_side
from benchmarks.side_by_side import mean_of
from rankgrad.lab.training.checkpoint import write_text

OURS = "loss.lam={lam} loss.margin={margin} loss.memory={memory}"


def ours(loss: str, lam: float = 0.2, margin: float = 0.02, memory: int = 3) -> str:
    """Settings of one of our losses."""
    return f"{loss} {OURS.format(lam=lam, margin=margin, memory=memory)}"


PROXY = "loss=proxy proxy_lr=0.02"
LOGLOG, LOG = "loss=recall loss.weight=loglog", "loss=recall loss.weight=log"
TRIPLET = "loss=pml:TripletMarginLoss loss.margin=0.2 miner=pml:TripletMarginMiner miner.type_of_triplets=semihard"
ROWS = {
    "proxy": PROXY,
    "proxy, thresholds 0.05": PROXY + " loss.threshold=0.05",
    "proxy, no pairs": PROXY + " loss.pairs=0",
    "ap, window": "loss=ap loss.window=0.1 loss.margin=0.05",
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
    "ProxyNCA": "loss=pml:ProxyNCALoss loss.softmax_scale=3 proxy_lr=0.02 lr=1e-5",
    "ProxyAnchor": "loss=pml:ProxyAnchorLoss loss.margin=0.1 loss.alpha=32 proxy_lr=0.02 lr=1e-5",
}


def settings_of_all(args: argparse.Namespace) -> list[str]:
    """Settings that all rows have."""
    milestone = args.epochs * 35 / 80  # the paper's place in the run
    every = [f"data.root={args.data}", f"weights={args.weights}", f"epochs={args.epochs}"]
    every += [f"milestones=[{milestone:g}]", f"hold_out={args.hold_out}", "save_minutes=60"]
    return [*every, *args.settings]


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side_by_side.add_arguments(parser, out="runs/cub", epochs=20, seeds=3)
    parser.add_argument("--hold-out", type=float, default=0.0)
    args = parser.parse_args()
    if not args.table:
        if args.data is None:
            parser.error("--data is needed to train")
        jobs = side_by_side.jobs_of(args, "cub", ROWS, settings_of_all(args))
        side_by_side.train(jobs, parallel=args.parallel, mps=args.mps, minutes=args.minutes, keep=args.keep)
    write_text(args.out / "table.md", table(args.out, settings_of_all(args)))
    print((args.out / "table.md").read_text())


def table(out: Path, every: list[str]) -> str:
    """The table with what it was measured on."""
    about = side_by_side.machine_of(out)
    private = [setting for setting in every if not setting.startswith(("data.root", "weights"))]
    held_out = "" if "hold_out=0.0" in every else ", held-out training classes"
    lines = [
        f"# CUB-200-2011, ResNet-50{held_out}: mean ± standard deviation over seeds",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}.",
        "",
        f"`rankgrad train cub` with `{' '.join(private)}` and each row's settings. Best: the highest R@1.",
        "",
        "| loss | epochs | seeds | best R@1 | R@2 | R@4 | R@8 | mAP@R | last R@1 | last mAP@R | s a run "
        "| images/s | settings |",
        "|" + "---|" * 13,
    ]
    wanted = [("best", m) for m in ("R@1", "R@2", "R@4", "R@8", "mAP@R")] + [("last", "R@1"), ("last", "mAP@R")]
    for name, settings in ROWS.items():
        folders = side_by_side.results_of(out, name)
        if not folders:
            continue
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        cells = [mean_of([result[which][metric] for result in results]) for which, metric in wanted]
        seconds = statistics.fmean(result["seconds"] for result in results)
        speed = statistics.fmean(result["speed"] for result in results)
        cells += [f"{seconds:.0f}", f"{speed:,.0f}", f"`{settings}`"]
        epochs = f"{results[0]['last']['epoch']:g}"
        lines.append(f"| {name} | {epochs} | {side_by_side.seeds_of(out, name)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    side_by_side.without_traceback(main)
