"""The cold start of average precision on a linear classifier: a table, and with --figure a picture.

python benchmarks/cold_start.py [--figure cold_start.png] [--out table.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rankgrad.detection.cold_start import Curve, cold_start
from rankgrad.training import machine
from rankgrad.training.checkpoint import write_text


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


def draw(curves: dict[str, Curve], path: Path) -> None:
    """mAP, and the size of the gradient against cross entropy's, over the steps."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for name, curve in curves.items():
        style = "--" if "+" in name else "-"
        left.plot(curve.steps, curve.mean_average_precision, style, label=name)
        ratio = [a / b for a, b in zip(curve.gradient, curve.cross_entropy_gradient, strict=True)]
        right.plot(curve.steps, ratio, style, label=name)
    left.set(xlabel="step", ylabel="mAP of unseen items, %", ylim=(0, 100))
    right.set(xlabel="step", ylabel="gradient at the logits / cross entropy's", yscale="log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    curves = cold_start()
    print(table(curves))
    if args.out is not None:
        write_text(args.out, table(curves))
    if args.figure is not None:
        draw(curves, args.figure)


if __name__ == "__main__":
    main()
