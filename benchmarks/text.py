"""Compare losses on texts with a small bi-encoder: classes (BANKING77) and graded similarity (STS benchmark).

    python -m benchmarks.text --model DIR --banking77 DIR --stsb DIR --out runs/text [--workers 14] [--seconds 200]
        [--tasks banking77 stsb] [--steps 200] [--seeds 3]

BANKING77: a fixed random half of the 77 intents trains, the others are judged (R@1, mAP@R, every text a query).
STS-B: Spearman's correlation of cosine and score. Every method is tried at the same number of settings, with one
seed: on BANKING77 a third of the training intents is held out for that, on STS-B the development set is there. The
best setting, and the best number of steps, then trains with three seeds and is judged on the test part. All runs
lie side by side in worker processes; ``--seconds`` bounds the search, round by round (one more setting of every
method), so that all methods have had as many tries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import side_by_side
from benchmarks.text_runs import Setting, run_classes, run_pairs, start


def tries(method: str, rates: list[float], choices: list[dict[str, float | str]], **batch: int) -> list[Setting]:
    """Every choice at every rate, the middle ones first."""
    return [Setting(method, lr, options=tuple(one.items()), **batch) for one in choices for lr in rates]


RATES = [5e-5, 2e-5, 1e-4]
CLASSES = [
    tries("rankgrad AP", RATES, [{"window": 0.4, "margin": 0.05, "log": True}], per_class=4, batch=96)
    + tries("rankgrad AP", RATES, [{}], per_class=8),
    tries("rankgrad recall", RATES, [{"window": 0.4, "margin": 0.05, "weight": "log"}], per_class=4, batch=96)
    + tries("rankgrad recall", RATES, [{}], per_class=8),
    tries("rankgrad proxies", RATES, [{}], per_class=4, batch=96)
    + tries("rankgrad proxies", RATES, [{}], per_class=8),
    tries("MultipleNegativesRanking", RATES, [{"scale": 20.0}, {"scale": 40.0}]),
    tries("MultipleNegativesRanking, P x K", RATES, [{"scale": 20.0}, {"scale": 40.0}], per_class=2, batch=48),
    tries("BatchHardTriplet", RATES, [{"margin": 0.2}], per_class=4, batch=96)
    + tries("BatchHardTriplet", RATES, [{"margin": 0.4}], per_class=8),
    tries("BatchHardSoftMarginTriplet", RATES, [{}], per_class=4, batch=96)
    + tries("BatchHardSoftMarginTriplet", RATES, [{}], per_class=8),
]
GRADED = [
    tries(method, RATES, [options], batch=64) + tries(method, RATES, [options], batch=256)
    for method, options in (
        ("rankgrad Spearman", {"lam": 0.3}),
        ("CoSENT", {"scale": 20.0}),
        ("CosineSimilarity", {}),
    )
]


# Side by side


def begin(folder: str) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    start(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def search(
    pool: Any, tasks: dict[str, Task], until: float, steps: int
) -> dict[str, tuple[float, int, Setting, int]]:
    """Of every method its best setting: the value, the steps, the setting, and how many were tried."""
    rounds = max(len(settings) for task in tasks.values() for settings in task.grid)
    order = [
        (task, settings[at], at)
        for at in range(rounds)
        for task in tasks.values()
        for settings in task.grid
        if at < len(settings)
    ]
    futures = {
        pool.submit(task.run, setting=one, seed=0, final=False, steps=steps): (task, one, at)
        for task, one, at in order
    }
    found: dict[str, dict[int, tuple[float, int, Setting]]] = {one.method: {} for _, one, _ in order}
    for future in as_completed(futures):
        task, one, at = futures[future]
        if future.cancelled():
            continue
        try:
            value, step = max((point[task.measure], int(point["step"])) for point in future.result()[1:])
        except Exception as error:  # a setting that fails is one that is not chosen
            print(f"FAILED  {one.method}: {one}: {type(error).__name__}: {error}", flush=True)
            value, step = -1.0, 0
        found[one.method][at] = (value, step, one)
        print(f"choose  {one.method}: {one}: {task.measure} {value:.2f} at step {step}", flush=True)
        if time.monotonic() > until:
            for other in futures:
                other.cancel()
    tried = min(next(n for n in range(rounds + 1) if n not in values) for values in found.values())
    if not tried:
        raise SystemExit("text: not one setting of every method ended within --seconds")
    chosen = {name: max((values[at] for at in range(tried)), key=lambda v: v[0]) for name, values in found.items()}
    return {name: (*best, tried) for name, best in chosen.items() if best[1]}


@dataclass
class Task:
    """What to compare: a title, the settings of every method, how to run one, and what decides."""

    title: str
    grid: list[list[Setting]]
    run: Callable[..., list[dict[str, float]]]
    measure: str
    columns: tuple[str, ...]


def table(task: Task, chosen: dict[str, Any], finals: dict[str, list[list[dict[str, float]]]]) -> list[str]:
    columns = task.columns
    lines = ["", f"## {task.title}", "", f"| loss | {' | '.join(columns)} | steps | setting, of {{}} tried |"]
    first = next(iter(finals.values()))[0][0]
    lines += [
        "|" + "---|" * (len(columns) + 3),
        f"| none | {' | '.join(f'{first[c]:.1f}' for c in columns)} | 0 | |",
    ]
    tried = 0
    for name in finals:
        _, step, setting, tried = chosen[name]
        cells = []
        for column in columns:
            values = [curve[-1][column] for curve in finals[name]]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {step} | {setting} |")
    return [line.format(tried) if "{}" in line else line for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=side_by_side.folder, required=True, help="folder of a SentenceTransformer")
    parser.add_argument(
        "--banking77", type=side_by_side.folder, required=True, help="folder with train.csv and test.csv"
    )
    parser.add_argument(
        "--stsb",
        type=side_by_side.folder,
        required=True,
        help="folder with sts-train.csv, sts-dev.csv and sts-test.csv",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=140, help="no new run of the search after that")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["banking77", "stsb"], choices=["banking77", "stsb"])
    args = parser.parse_args()
    begun = time.monotonic()
    tasks = {
        "banking77": Task(
            "BANKING77: intents that were not trained on",
            CLASSES,
            partial(run_classes, str(args.model), str(args.banking77)),
            "mAP@R",
            ("R@1", "mAP@R"),
        ),
        "stsb": Task(
            "STS-B", GRADED, partial(run_pairs, str(args.model), str(args.stsb)), "Spearman", ("Spearman",)
        ),
    }
    tasks = {name: tasks[name] for name in args.tasks}
    with ProcessPoolExecutor(args.workers, get_context("spawn"), begin, (str(args.model),)) as pool:
        chosen = search(pool, tasks, begun + args.seconds, args.steps)
        futures = {
            pool.submit(task.run, setting=chosen[name][2], seed=seed, final=True, steps=chosen[name][1]): (
                name,
                seed,
            )
            for seed in range(args.seeds)
            for task in tasks.values()
            for name in (settings[0].method for settings in task.grid)
            if name in chosen
        }
        finals: dict[str, list[Any]] = {}
        for future in as_completed(futures):
            name, seed = futures[future]
            finals.setdefault(name, []).append(future.result())
            print(f"judge   {name}, seed {seed}: {finals[name][-1][-1]}", flush=True)
    packages = ("torch", "sentence-transformers", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        "# Texts: a bi-encoder of 22M parameters (all-MiniLM-L6-v2)",
        "",
        f"{device}. {versions}. {time.strftime('%Y-%m-%d')}, {time.monotonic() - begun:.0f} s in all. AdamW, "
        f"bf16, up to {args.steps} steps; setting and steps chosen on validation with one seed, mean ± standard "
        f"deviation of {args.seeds} seeds on the test part.",
    ]
    for task in tasks.values():
        names = [settings[0].method for settings in task.grid if settings[0].method in finals]
        lines += table(task, chosen, {name: finals[name] for name in names})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text("\n".join([*lines, ""]))
    record = {
        name: {"value": v, "step": k, "setting": asdict(s), "tried": n} for name, (v, k, s, n) in chosen.items()
    }
    (args.out / "runs.json").write_text(json.dumps({"chosen": record, "finals": finals}, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    side_by_side.without_traceback(main)
