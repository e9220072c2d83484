"""The cold start of average precision on a linear classifier, as a table; `rankgrad figure cold-start` draws it.

python benchmarks/cold_start.py [--out table.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rankgrad.lab.figures.cold_start import Curve, cold_start
from rankgrad.lab.training import machine
from rankgrad.lab.training.checkpoint import write_text


def table(curves: dict[str, Curve]) -> str:
    """mAP and gradient sizes at the first, the middle and the last measurement."""
    about = machine.describe(torch.device("cpu"))
    first = next(iter(curves.values()))
    shown = [0, len(first.steps) // 5, len(first.steps) // 2, len(first.steps) - 1]
    steps = [first.steps[at] for at in shown]
    lines = [
        "# Cold start: a linear classifier from random weights, 64 inputs, 20 classes, 12 % foreground",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. `python benchmarks/cold_start.py`",
        "",
        "4,096 items a step, memory 3, lambda 0.5, margin 0.15, SGD 0.02 with momentum 0.9. mAP of unseen items "
        "in percent; gradient: its norm at the class logits over that of cross entropy there.",
        "",
        f"| loss | {' | '.join(f'{what}, step {s}' for what in ('mAP', 'gradient') for s in steps)} |",
        "|" + "---|" * (1 + 2 * len(steps)),
    ]
    for name, curve in curves.items():
        reached = [f"{curve.mean_average_precision[at]:.1f}" for at in shown]
        ratio = [f"{curve.gradient[at] / curve.cross_entropy_gradient[at]:.3f}" for at in shown]
        lines.append(f"| {name} | {' | '.join(reached)} | {' | '.join(ratio)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    curves = cold_start()
    print(table(curves))
    if args.out is not None:
        write_text(args.out, table(curves))


if __name__ == "__main__":
    main()
