"""Measure cross entropy against ranking on Pascal VOC 2007 in one loop, and print a table: rows x seeds.

    python -m benchmarks.voc --data DIR --weights resnet50.safetensors --out runs/voc [--rows 'cross|ap']
        [--seeds 3] [--parallel 6] [--mps] [--epochs 5] [--minutes 9] [key=value ...]
    python -m benchmarks.voc --choose ...                  train on `train`, judge on `val`, into runs/voc-val
    python -m benchmarks.voc --choose --rows '^boxes' --epochs 12 --seeds 2 --parallel 6 --mps --data DIR \\
        --weights resnet50.safetensors 'view.jitter=[0.6,1.2]'   each with GIoU on decoded boxes
    python -m benchmarks.voc --table --out runs/voc        the table of what is finished
    python -m benchmarks.voc --cost [--out runs/voc]       what the loss adds to a training step

Every row is `rankgrad train voc07` with the settings named in the table, several at a time on one GPU, in
processes of their own (--mps starts NVIDIA's multi-process service around them). Runs that ended are not run
again, others go on from their last checkpoint. --minutes stops in time what is not finished, for machines that
are lent. Weights of runs that ended are kept with --keep only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import side_by_side
from benchmarks.side_by_side import Job, mean_of
from rankgrad.lab.training.checkpoint import write_text


def ranking(form: str = "log_ap", rank: str = "odds", weight: float = 0.3, ce: float = 1.0, more: str = "") -> str:
    """Settings of a ranking loss; the defaults are the recipe's."""
    told = f"loss.form={form} loss.ranked={rank} loss.ranking_weight={weight:g} loss.cross_entropy={ce:g}"
    return f"loss=ranking {told} {more}".strip()


ROWS = {
    "cross entropy": "loss=cross_entropy",
    "CE + 0.3 log_ap": ranking(),
    "CE + 0.3 log_ap, lambda 0.1": ranking(more="loss.lam=0.1"),
    "CE + 0.3 log_ap, lambda 2.5": ranking(more="loss.lam=2.5"),
    "CE + 0.3 log_ap, no margin": ranking(more="loss.margin=0"),
    "CE + 0.3 log_ap, no memory": ranking(more="loss.memory=0"),
    "CE + 0.3 log_ap, window 2": ranking(more="loss.lam=null loss.window=2"),
    "CE + 0.3 log_ap, automatic reach and margin": ranking(more="loss.lam=null loss.margin=auto"),
    "CE + 0.1 log_ap": ranking(weight=0.1),
    "CE + 1 log_ap": ranking(weight=1),
    "CE + 1 log_ap, window 2": ranking(weight=1, more="loss.lam=null loss.window=2"),
    "CE + 1 ap": ranking("ap", weight=1),
    "CE + 1 ap, window 2": ranking("ap", weight=1, more="loss.lam=null loss.window=2"),
    "CE + 3 ap": ranking("ap", weight=3),
    "CE + 1 log": ranking("log", weight=1),
    "CE + 0.3 log_ap on softmax": ranking(rank="softmax"),
    "CE + 0.3 log_ap on softmax, no margin": ranking(rank="softmax", more="loss.margin=0"),
    "CE + 0.3 log_ap on logits": ranking(rank="logits"),
    "CE + 0.3 log_ap, margin 2": ranking(more="loss.margin=2"),
    "CE + 0.3 log_ap, margin 3": ranking(more="loss.margin=3"),
    "CE + 0.3 log_ap, memory 30": ranking(more="loss.memory=30"),
    "paper: ap on logits": ranking("ap", "logits", weight=1, ce=0),
    "log_ap on logits": ranking(rank="logits", weight=1, ce=0),
    "log_ap on logits, lambda 2.5": ranking(rank="logits", weight=1, ce=0, more="loss.lam=2.5"),
    "log_ap on odds, window 2": ranking(weight=1, ce=0, more="loss.lam=null loss.window=2"),
}

#: Against the baseline that people use: cross entropy with GIoU on decoded boxes, a score threshold of 0.01. Each
#: row differs in one thing from one before it.
GIOU = "score_threshold=0.01 boxes=giou box_weight=10"
ROWS |= {
    "boxes: CE, smooth L1": "loss=cross_entropy score_threshold=0.01",
    "boxes: CE, GIoU": f"loss=cross_entropy {GIOU}",
    "boxes: CE, GIoU, RPN ranked": f"loss=cross_entropy {GIOU} rpn=ranking",
    "boxes: CE + log_ap, smooth L1": ranking(more="score_threshold=0.01"),
    "boxes: CE + log_ap, GIoU": ranking(more=GIOU),
    "boxes: CE + log_ap, GIoU, RPN ranked": ranking(more=f"{GIOU} rpn=ranking"),
    "boxes: CE + log_ap, GIoU, RPN ranked 0.3": ranking(more=f"{GIOU} rpn=ranking rpn_weight=0.3"),
    "boxes: CE + log_ap, GIoU, no memory": ranking(more=f"loss.memory=0 {GIOU}"),
    # without memory there are an eighth of the relevant regions, each with eight times the gradient
    "boxes: CE + 0.04 log_ap, GIoU, no memory": ranking(weight=0.04, more=f"loss.memory=0 {GIOU}"),
}


def settings_of_all(args: argparse.Namespace) -> list[str]:
    """Settings that all rows have: small images, a short run."""
    every = [f"data.root={args.data}", "data.counts=any"]
    if args.choose:
        every = ["data=voc", f"data.root={args.data}/VOCdevkit/VOC2007", "data.train=train", "data.test=val"]
    every += [f"weights={args.weights}", f"epochs={args.epochs}"]
    every += ["view.short=360", "view.long=720", f"milestones=[{0.8 * args.epochs:g}]", "warmup=300", "clip=10"]
    every += [f"evaluate_every={args.epochs}", "save_minutes=3", "data.cache=device", "batch.test_size=32"]
    return [*every, *args.settings]


def finished(out: Path, rows: list[str]) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """(result, average precisions by class) of every finished run of each row."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        for folder in side_by_side.results_of(out, row):
            if (folder / "classes.json").is_file():
                result = json.loads((folder / "result.json").read_text())
                found.setdefault(row, []).append((result, json.loads((folder / "classes.json").read_text())))
    return found


def table(out: Path, rows: list[str], every: list[str]) -> str:
    """The table with what it was measured on; last evaluations, no choosing on the test images."""
    about = side_by_side.machine_of(out)
    private = [setting for setting in every if not setting.startswith(("data.root", "weights"))]
    found = finished(out, rows)
    metrics = [f"{m} {s}" for s in ("softmax", "odds") for m in ("AP50", "AP50-11", "AP", "AP75")]
    part = "trained on train, judged on val" if "data.test=val" in every else "trainval -> test"
    lines = [
        f"# Pascal VOC 2007, {part} (short side 240, shown at 360), Faster R-CNN R50-FPN: CE against ranking",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}.",
        "",
        f"`rankgrad train voc07` with `{' '.join(private)}` and each row's settings. AP50: area; AP50-11: "
        "11 points; AP, AP75: COCO's. Each judged with softmax scores and with odds (own: with the logits alone, "
        "where these were trained). Last epoch, mean ± standard deviation over seeds.",
        "",
        f"| loss | seeds | {' | '.join(metrics)} | AP50 own | s a run | images/s | settings |",
        "|" + "---|" * (len(metrics) + 6),
    ]
    for row, runs in found.items():
        cells = [mean_of([result["last"][m] for result, _ in runs]) for m in metrics]
        own = [r["last"].get("AP50 logits") for r, _ in runs]
        cells.append(mean_of(own) if None not in own else "")
        cells.append(f"{statistics.fmean(r['seconds'] for r, _ in runs):.0f}")
        cells.append(f"{statistics.fmean(r['speed'] for r, _ in runs):.0f}")
        lines.append(f"| {row} | {side_by_side.seeds_of(out, row)} | {' | '.join(cells)} | `{ROWS[row]}` |")
    if found:
        lines += ["", "AP50 (area) by class, softmax scores / odds, mean over seeds:", ""]
        names = list(next(iter(found.values()))[0][1]["softmax"]["AP50"])
        lines += [f"| class | {' | '.join(found)} |", "|" + "---|" * (len(found) + 1)]
        for name in names:
            cells = []
            for runs in found.values():
                pair = [[c[s]["AP50"][name] for _, c in runs] for s in ("softmax", "odds")]
                cells.append(" / ".join("-" if None in v else f"{statistics.fmean(v):.1f}" for v in pair))
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def write_table(args: argparse.Namespace) -> str:
    """Write the table of what is finished."""
    text = table(args.out, list(ROWS), settings_of_all(args))
    write_text(args.out / "table.md", text)
    return text


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Runs that have not ended, seed by seed."""
    return side_by_side.jobs_of(args, "voc07", ROWS, settings_of_all(args))


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side_by_side.add_arguments(parser, out="runs/voc", epochs=5, seeds=1)
    parser.add_argument("--choose", action="store_true", help="train on `train`, judge on `val`")
    parser.add_argument("--cost", action="store_true", help="only measure what the loss costs")
    args = parser.parse_args(words)
    side_by_side.check_rows(args.rows, ROWS)
    if args.choose and args.out == parser.get_default("out"):
        args.out = args.out.with_name("voc-val")
    if args.cost and args.settings:
        parser.error(f"--cost takes no settings, received {args.settings}")
    if args.data is None and not (args.cost or args.table):
        parser.error("--data is needed to train")
    return args


def main() -> None:
    """Run the rows and write the table."""
    args = parsed()
    if args.cost:
        from benchmarks.voc_cost import measure

        write_text(args.out / "cost.md", measure())
        print((args.out / "cost.md").read_text())
        return
    if not args.table:
        side_by_side.train(
            jobs_of(args), parallel=args.parallel, mps=args.mps, minutes=args.minutes, keep=args.keep
        )
    print(write_table(args))


if __name__ == "__main__":
    side_by_side.without_traceback(main)
