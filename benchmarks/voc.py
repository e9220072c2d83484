"""Measure cross entropy against ranking on Pascal VOC 2007 in one loop, and print a table: rows x seeds.

    python benchmarks/voc.py --data DIR --weights resnet50.safetensors --out runs/voc [--rows 'cross|ap']
        [--seeds 3] [--parallel 6] [--mps] [--epochs 5] [--minutes 9] [key=value ...]
    python benchmarks/voc.py --table --out runs/voc        the table of what is finished
    python benchmarks/voc.py --cost [--out runs/voc]       what the loss adds to a training step

Every row is `rankgrad train voc07` with the settings named in the table, several at a time on one GPU, in
processes of their own (--mps starts NVIDIA's multi-process service around them). Finished runs are not run
again, others go on from their last checkpoint. --minutes stops in time what is not finished, for machines that
are lent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from rankgrad.training import machine
from rankgrad.training.checkpoint import write_text

BLEND, ALONE = "loss=ranking", "loss=ranking loss.cross_entropy=0"
ROWS = {
    "cross entropy": "loss=cross_entropy",
    "CE + ap on odds": f"{BLEND} loss.form=ap loss.rank=odds",
    "CE + log_ap on odds": f"{BLEND} loss.form=log_ap loss.rank=odds",
    "CE + log on odds": f"{BLEND} loss.form=log loss.rank=odds",
    "CE + ap on softmax": f"{BLEND} loss.form=ap loss.rank=softmax",
    "CE + log_ap on softmax": f"{BLEND} loss.form=log_ap loss.rank=softmax",
    "paper: ap on logits": f"{ALONE} loss.form=ap loss.rank=logits",
    "log_ap on logits": f"{ALONE} loss.form=log_ap loss.rank=logits",
    "log on logits": f"{ALONE} loss.form=log loss.rank=logits",
    "log_ap on odds": f"{ALONE} loss.form=log_ap loss.rank=odds",
    "CE + ap on odds, lambda 0.1": f"{BLEND} loss.form=ap loss.rank=odds loss.lam=0.1",
    "CE + ap on odds, lambda 2.5": f"{BLEND} loss.form=ap loss.rank=odds loss.lam=2.5",
    "CE + ap on odds, no margin": f"{BLEND} loss.form=ap loss.rank=odds loss.margin=0",
    "CE + ap on odds, margin 1": f"{BLEND} loss.form=ap loss.rank=odds loss.margin=1",
    "CE + ap on odds, no memory": f"{BLEND} loss.form=ap loss.rank=odds loss.memory=0",
    "CE + ap on odds, weight 3": f"{BLEND} loss.form=ap loss.rank=odds loss.weight=3",
    "CE + log_ap on odds, lambda 0.1": f"{BLEND} loss.form=log_ap loss.rank=odds loss.lam=0.1",
    "CE + log_ap on odds, lambda 2.5": f"{BLEND} loss.form=log_ap loss.rank=odds loss.lam=2.5",
    "CE + log_ap on odds, no margin": f"{BLEND} loss.form=log_ap loss.rank=odds loss.margin=0",
    "CE + log_ap on odds, weight 0.3": f"{BLEND} loss.form=log_ap loss.rank=odds loss.weight=0.3",
}


def settings_of_all(args: argparse.Namespace) -> list[str]:
    """Settings that all rows have: small pictures, a short run."""
    every = [f"data.root={args.data}", f"weights={args.weights}", f"epochs={args.epochs}", "data.counts=any"]
    every += ["view.short=360", "view.long=720", f"milestones=[{0.8 * args.epochs:g}]", "warmup=300", "clip=10"]
    every += [f"evaluate_every={args.epochs}", "save_minutes=3", "data.cache=device", "batch.test_size=32"]
    return [*every, *args.settings]


def folder_of(out: Path, row: str, seed: int) -> Path:
    """Where a run goes."""
    return out / re.sub(r"\W+", "-", row).strip("-") / f"seed-{seed}"


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """NVIDIA's multi-process service: kernels of several processes run side by side instead of in turns."""
    if wanted and shutil.which("nvidia-cuda-mps-control") is None:
        print("no multi-process service on this machine: the runs take turns", flush=True)
        wanted = False
    if not wanted:
        yield
        return
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


def work(jobs: Any, every: list[str], out: Path, threads: int) -> None:
    """A process that takes jobs until there are none; the pictures are read once for all of its jobs."""
    from rankgrad.recipes import run

    torch.set_num_threads(threads)
    while (job := jobs.get()) is not None:
        row, seed = job
        folder = folder_of(out, row, seed)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"began {row}, seed {seed}", flush=True)
        with (folder / "output.txt").open("a") as output, redirect_stdout(output), redirect_stderr(output):
            try:
                run.run("voc07", [*every, *ROWS[row].split(), f"seed={seed}"], out=str(folder), resume=True)
                how = told(folder)
            except Exception:
                traceback.print_exc()
                how = f"FAILED, see {folder}/output.txt"
        print(f"ended {row}, seed {seed}: {how}", flush=True)


def train_all(args: argparse.Namespace, rows: list[str]) -> None:
    """Train all rows and seeds, some at a time; a run that fails is told and left."""
    waiting = [(row, seed) for seed in range(args.seed, args.seed + args.seeds) for row in rows]
    waiting = [job for job in waiting if not (folder_of(args.out, *job) / "result.json").is_file()]
    end = time.monotonic() + 60 * args.minutes
    many = min(args.parallel, len(waiting))
    threads = max(1, (os.cpu_count() or 1) // max(many, 1))
    context = multiprocessing.get_context("spawn")
    with multi_process_service(args.mps):
        jobs = context.Queue()
        for job in [*waiting, *[None] * many]:
            jobs.put(job)
        workers = [
            context.Process(target=work, args=(jobs, settings_of_all(args), args.out, threads))
            for _ in range(many)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(None if end == float("inf") else max(0.0, end - time.monotonic()))
        for worker in workers:
            if worker.is_alive():
                print("out of time: stopped a run, the next call goes on from its checkpoint", flush=True)
                worker.terminate()
                worker.join()
        jobs.cancel_join_thread()


def told(folder: Path) -> str:
    """How a finished run ended, in a line."""
    result = json.loads((folder / "result.json").read_text())
    numbers = "  ".join(f"{k} {v:.1f}" for k, v in result["last"].items() if k.startswith("AP50 "))
    return f"{numbers}  {result['speed']:.0f} pictures/s  {result['seconds']:.0f} s"


def finished(out: Path, rows: list[str]) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """(result, average precisions by class) of every finished run of each row."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        for folder in sorted(folder_of(out, row, 0).parent.glob("seed-*")):
            if (folder / "result.json").is_file() and (folder / "classes.json").is_file():
                result = json.loads((folder / "result.json").read_text())
                found.setdefault(row, []).append((result, json.loads((folder / "classes.json").read_text())))
    return found


def mean_of(values: list[float]) -> str:
    """``71.2 ± 0.3``."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def table(out: Path, rows: list[str], every: list[str]) -> str:
    """The table with what it was measured on; last evaluations, no choosing on the test pictures."""
    described = sorted(out.glob("*/seed-*/machine.json"))  # of the runs: the table may be made elsewhere
    about = json.loads(described[0].read_text()) if described else machine.describe(torch.device("cpu"))
    private = [setting for setting in every if not setting.startswith(("data.root", "weights"))]
    found = finished(out, rows)
    metrics = [f"{m} {s}" for s in ("softmax", "odds") for m in ("AP50", "AP50-11", "AP")]
    lines = [
        "# Pascal VOC 2007 (short side 240, shown at 360), Faster R-CNN R50-FPN: cross entropy against ranking",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}.",
        "",
        f"`rankgrad train voc07` with `{' '.join(private)}` and each row's settings. AP50: area; AP50-11: 11 "
        "points; AP: COCO's. Each judged with softmax scores and with odds (own: with the logits alone, where "
        "these were trained). Last epoch, mean ± standard deviation over seeds.",
        "",
        f"| loss | seeds | {' | '.join(metrics)} | AP50 own | s a run | pictures/s | settings |",
        "|" + "---|" * (len(metrics) + 6),
    ]
    for row, runs in found.items():
        cells = [mean_of([result["last"][m] for result, _ in runs]) for m in metrics]
        own = [r["last"].get("AP50 logits") for r, _ in runs]
        cells.append(mean_of(own) if None not in own else "")
        cells.append(f"{statistics.fmean(r['seconds'] for r, _ in runs):.0f}")
        cells.append(f"{statistics.fmean(r['speed'] for r, _ in runs):.0f}")
        lines.append(f"| {row} | {len(runs)} | {' | '.join(cells)} | `{ROWS[row]}` |")
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


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="settings for every row")
    parser.add_argument("--data")
    parser.add_argument("--weights", default="library")
    parser.add_argument("--out", type=Path, default=Path("runs/voc"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", default=".", help="a regular expression")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on the device")
    parser.add_argument("--mps", action="store_true", help="start the multi-process service around the runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, to go on in another call")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--cost", action="store_true", help="only measure what the loss costs")
    args = parser.parse_args()
    if args.cost:
        from benchmarks.voc_cost import measure

        write_text(args.out / "cost.md", measure())
        print((args.out / "cost.md").read_text())
        return
    rows = [row for row in ROWS if re.search(args.rows, row)]
    if not args.table:
        if args.data is None:
            parser.error("--data is needed to train")
        train_all(args, rows)
    write_text(args.out / "table.md", table(args.out, list(ROWS), settings_of_all(args)))
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
