"""Losses on embeddings at their best: CUB, Oxford Flowers 102 and Omniglot from scratch, one head for all.

    python -m benchmarks.embeddings cub=DIR flowers=DIR omniglot=DIR --weights resnet50.safetensors
        [--out runs/embeddings] [--rows 'proxy|Anchor'] [--seeds 3] [--parallel 6] [--mps] [--minutes 9]
        [--set key=value ...]
    python -m benchmarks.embeddings cub=DIR flowers=DIR omniglot=DIR --table      of what is finished

First every loss trains at each of three learning rates, with the layers behind the backbone at once and ten
times that rate, on half of the *training* classes, and is judged on the other half (one seed, last epoch). Its
best setting there then trains on all training classes with three seeds and is judged on the test classes. The
table has the last epoch, never the best of several. Runs that are finished are not run again; a run that
collapses counts as 0. All else is the default recipe (`rankgrad show folder`).

CUB: DIR has CUB_200_2011. Flowers: DIR/.../<class number>/<image>; classes 1 to 51 train, 52 to 102 test.
Omniglot: DIR has images_background_small{1,2}.zip; the first trains, and of the second the three alphabets test
that the first does not have (a small network, from scratch, rates 30 times higher).
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import side_by_side
from benchmarks.side_by_side import Job, mean_of
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.images import SUFFIXES

TRIPLET = "loss=pml:TripletMarginLoss loss.margin=0.2 miner=pml:TripletMarginMiner miner.type_of_triplets=semihard"
#: Ours with the values that stand in their Modules, baselines with their authors' values.
ROWS = {
    "ProxyRanking (default)": "loss=proxy",
    "PairRanking": "loss=pair",
    "AP": "loss=ap",
    "recall, loglog": "loss=recall",
    "ProxyAnchor": "loss=pml:ProxyAnchorLoss loss.margin=0.1 loss.alpha=32 proxy_lr=0.02",
    "ProxyNCA": "loss=pml:ProxyNCALoss loss.softmax_scale=3 proxy_lr=0.02",
    "MultiSimilarity": "loss=pml:MultiSimilarityLoss loss.alpha=2 loss.beta=50 loss.base=0.5",
    "Contrastive": "loss=pml:ContrastiveLoss loss.neg_margin=0.5",
    "Triplet, semi-hard": TRIPLET,
    "FastAP": "loss=pml:FastAPLoss loss.num_bins=10",
    "SmoothAP": "loss=surrogate:smoothap",
}
RATES = (1e-5, 3e-5, 1e-4)
EMBEDDING_RATES = (1, 10)
SMALL = "backbone=tiny weights=none precision=fp32 embedding=128 view.resize=28 view.crop=28 view.scale=0.6"


class DataSet(NamedTuple):
    """A data set of the table: recipe, settings, epochs, and how much higher its rates are."""

    recipe: str
    settings: str
    epochs: int
    faster: float


SETS = {
    "cub": DataSet("cub-proxy", "", 15, 1),
    "flowers": DataSet("folder", "compile=true data.cache=device", 15, 1),
    "omniglot": DataSet("folder", f"{SMALL} view.flip=false data.cache=device", 27, 30),
}
UNSEEN = ("Japanese_(katakana)", "Sanskrit", "Tagalog")  # alphabets of the second set that the first has not


def prepared(name: str, source: Path, out: Path) -> Path:
    """The data set as a folder with ``train`` and ``test``, made once; CUB has a reader of its own."""
    if not source.is_dir():
        raise UserError(f"{name}: no such folder {str(source)!r}")
    if name == "cub":
        return source
    made = out / "data" / name
    if not (made / "complete").is_file():
        {"flowers": _flowers, "omniglot": _omniglot}[name](source, made)
        write_text(made / "complete", "")
    return made


def _flowers(source: Path, made: Path) -> None:
    """Links to the images: classes 1 to 51 train, the others test."""
    found = [path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.parent.name.isdigit()]
    if not found:
        raise UserError(f"flowers: expected images in folders named by class numbers in {source}, found none")
    for path in found:
        part = "train" if int(path.parent.name) <= 51 else "test"
        link = made / part / f"{int(path.parent.name):03d}" / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(path.resolve())


def _omniglot(source: Path, made: Path) -> None:
    """The drawings of every character; names of classes are unique over alphabets."""
    for number, part in ((1, "train"), (2, "test")):
        with zipfile.ZipFile(source / f"images_background_small{number}.zip") as pack:
            for name in pack.namelist():
                _, alphabet, *rest = name.split("/")
                if not name.endswith(".png") or (part == "test" and alphabet not in UNSEEN):
                    continue
                path = made / part / f"{alphabet} {rest[0]}" / rest[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pack.read(name))


def tries(name: str, row: str) -> dict[str, str]:
    """All settings of a loss on a data set, by the name of the run."""
    rates = {f"{rate:g} x{head}": (rate * SETS[name].faster, head) for rate in RATES for head in EMBEDDING_RATES}
    return {
        f"{name} held out, {row}, {label}": f"{ROWS[row]} lr={rate:g} embedding_lr={head}"
        for label, (rate, head) in rates.items()
    }


def score(out: Path, run: str) -> tuple[float, float] | None:
    """R@1 and mAP@R of a run's last epoch; 0 where its embeddings collapsed, None where it is not finished."""
    folder = side_by_side.folder_of(out, run, 0)
    if (folder / "result.json").is_file():
        last = json.loads((folder / "result.json").read_text())["last"]
        return last["R@1"], last["mAP@R"]
    output = folder / "output.txt"
    return (0.0, 0.0) if output.is_file() and "the embeddings collapsed" in output.read_text() else None


def best(out: Path, name: str, row: str) -> str | None:
    """The settings with the highest R@1 on held-out classes; None as long as some are not finished."""
    scores = {settings: score(out, run) for run, settings in tries(name, row).items()}
    if any(found is None for found in scores.values()):
        return None
    return max(scores, key=lambda settings: scores[settings] or (0.0, 0.0))


def _every(args: argparse.Namespace, name: str) -> list[str]:
    epochs = args.epochs or SETS[name].epochs
    common = [f"epochs={epochs}", f"evaluate_every={epochs}", "save_minutes=60", "data.workers=4"]
    weights = [] if "weights=" in SETS[name].settings else [f"weights={args.weights}"]
    return [*SETS[name].settings.split(), *common, *weights, f"data.root={args.data[name]}", *args.settings]


def jobs_of(args: argparse.Namespace) -> tuple[list[Job], list[Job]]:
    """Unfinished runs on held-out classes, and on the test classes of losses whose setting is chosen."""
    choosing, testing = [], []
    one = copy.copy(args)
    one.seeds, one.seed, one.rows = 1, 0, "."
    all_rows = copy.copy(args)
    all_rows.rows = "."
    for name in args.data:
        for row in args.losses:
            runs = {run: text for run, text in tries(name, row).items() if score(args.out, run) is None}
            every = [*_every(args, name), "data.hold_out=0.5"]
            choosing += side_by_side.jobs_of(one, SETS[name].recipe, runs, every)
            if (settings := best(args.out, name, row)) is not None:
                chosen = {f"{name}, {row}": settings}
                testing += side_by_side.jobs_of(all_rows, SETS[name].recipe, chosen, _every(args, name))
    return choosing, testing


def table(args: argparse.Namespace) -> str:
    """The results on the test classes, then what the settings were chosen from."""
    about = side_by_side.machine_of(args.out)
    lines = [
        "# Losses on embeddings: test classes, last epoch, mean ± standard deviation over seeds",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}.",
        "",
        "`python -m benchmarks.embeddings`: learning rate (1e-5, 3e-5 or 1e-4; Omniglot 30 times that) and the "
        "rate of the layers behind the backbone (x1, x10) of every loss are chosen on held-out training classes; "
        "all have the same head.",
        "",
    ]
    for name in args.data:
        lines += [f"## {name}", "", "| loss | seeds | R@1 | mAP@R | chosen |", "|" + "---|" * 5]
        for row in args.losses:
            folders = side_by_side.results_of(args.out, f"{name}, {row}")
            results = [json.loads((folder / "result.json").read_text())["last"] for folder in folders]
            if results:
                cells = [mean_of([result[metric] for result in results]) for metric in ("R@1", "mAP@R")]
                lines.append(f"| {row} | {len(results)} | {' | '.join(cells)} | `{best(args.out, name, row)}` |")
        heads = [f"{rate:g} x{head}" for rate in RATES for head in EMBEDDING_RATES]
        lines += ["", "Held-out training classes, one seed, R@1 / mAP@R:", ""]
        lines += [f"| loss | {' | '.join(heads)} |", "|" + "---|" * (1 + len(heads))]
        for row in args.losses:
            scores = [score(args.out, run) for run in tries(name, row)]
            if any(found is not None for found in scores):
                cells = [_cell(found) for found in scores]
                lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(found: tuple[float, float] | None) -> str:
    if found is None:
        return ""
    return "{:.1f} / {:.1f}".format(*found) if any(found) else "collapsed"


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the data prepared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="NAME=DIR: cub, flowers, omniglot")
    side_by_side.add_running_arguments(parser, out="runs/embeddings", epochs=0, seeds=3)
    parser.add_argument("--set", dest="settings", nargs="*", default=[], help="settings for every run")
    args = parser.parse_args(words)
    args.losses = [row for row in ROWS if re.search(args.rows, row)]
    given = dict(text.partition("=")[::2] for text in args.data)
    unknown = sorted(set(given) - set(SETS))
    if unknown or not all(given.values()):
        parser.error(f"data: expected NAME=DIR with a name of {', '.join(SETS)}, received {' '.join(args.data)}")
    args.data = {name: prepared(name, Path(folder).expanduser(), args.out) for name, folder in given.items()}
    return args


def main() -> None:
    """Choose, test, and write the table."""
    args = parsed()
    if not args.table:
        end = time.monotonic() + 60 * args.minutes
        for part in (0, 1):  # what is chosen first can then be tested
            minutes = (end - time.monotonic()) / 60
            if (jobs := jobs_of(args)[part]) and minutes > 0:
                side_by_side.train(jobs, parallel=args.parallel, mps=args.mps, minutes=minutes)
    write_text(args.out / "table.md", table(args))
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
