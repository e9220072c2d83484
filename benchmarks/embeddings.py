"""Losses on embeddings at their best: CUB, Oxford Flowers 102, Stanford Cars, Omniglot from scratch; one head.

    python -m benchmarks.embeddings cub=DIR flowers=DIR cars=DIR omniglot=DIR --weights resnet50.safetensors
        [--out runs/embeddings] [--rows 'Proxy|^AP'] [--tested Proxy] [--seeds 3] [--parallel 6] [--mps]
        [--minutes 9] [--set key=value ...]
    python -m benchmarks.embeddings cub=DIR flowers=DIR omniglot=DIR --table      of what is finished

Settings are chosen on *training* classes: every loss trains on a part of them and is judged on the others (one
seed, ten epochs, last epoch), at three learning rates, then at the best of these with the layers behind the
backbone at ten times its rate. The better setting then trains on all training classes, with three seeds and all
epochs, and is judged on the test classes. The table has the last epoch, never the best of several; a run that
fails (its embeddings collapse, its loss is not finite) counts as 0. All else is the default recipe
(`rankgrad show folder`). The row "folder as it stands" is that recipe on the data as a folder of classes, with
nothing set but the data and the weights; on Omniglot the small network and its image size too.

Runs that are finished or failed are not run again: a call that `--minutes` ended goes on in the next one, from a
copy of the folder of results on another machine too. First all losses are chosen for, then tested with the first
seed, then with the others, so that an early end leaves a table with fewer seeds.

CUB: DIR has CUB_200_2011. Flowers and Cars: DIR/.../<class number>/<image>; classes 1 to 51 and 1 to 98 train, the
others test. Of Cars its training images are enough; no loss and no rate was chosen on it. Omniglot: DIR has
images_background_small{1,2}.zip; the first trains, and of the second the three alphabets test that the first does
not have (a small network, from scratch, rates 30 times higher).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import side_by_side
from benchmarks.side_by_side import Job, mean_of
from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.images.data.benchmarks import read_cub
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.images import SUFFIXES

MULTI = "loss=pml:MultiSimilarityLoss loss.alpha=2 loss.beta=50 loss.base=0.5"
TRIPLET = "loss=pml:TripletMarginLoss loss.margin=0.2 miner=pml:TripletMarginMiner miner.type_of_triplets=semihard"
#: Ours with the values that stand in their Modules, baselines with their authors' values.
ROWS = {
    "ProxyRanking (default)": "loss=proxy",
    "PairRanking": "loss=pair",
    "PairRanking, memory 3": "loss=pair loss.memory=3",
    "AP": "loss=ap",
    "recall, loglog": "loss=recall",
    "AP, memory 3": "loss=ap loss.memory=3",
    "recall, loglog, memory 3": "loss=recall loss.memory=3",
    "ProxyAnchor": "loss=pml:ProxyAnchorLoss loss.margin=0.1 loss.alpha=32 proxy_lr=0.02",
    "ProxyNCA": "loss=pml:ProxyNCALoss loss.softmax_scale=3 proxy_lr=0.02",
    "MultiSimilarity": MULTI,
    "MultiSimilarity, miner": f"{MULTI} miner=pml:MultiSimilarityMiner miner.epsilon=0.1",
    "Contrastive": "loss=pml:ContrastiveLoss loss.neg_margin=0.5",
    "Triplet, semi-hard": TRIPLET,
    "FastAP": "loss=pml:FastAPLoss loss.num_bins=10",
    "SmoothAP": "loss=surrogate:smoothap",
}
AS_IT_STANDS = "folder as it stands"
RATES = (1e-5, 3e-5, 1e-4)
HEADS = (1, 10)  #: rates of the layers behind the backbone, times its own
TINY = "backbone=tiny weights=none embedding=128 view.resize=28 view.crop=28"
SMALL = f"{TINY} precision=fp32 data.cache=device"


class DataSet(NamedTuple):
    """A data set of the table: recipe, settings, epochs, and how much higher its rates are."""

    recipe: str
    settings: str
    epochs: int
    choosing: int  #: epochs of the runs that settings are chosen from
    held_out: float  #: share of the training classes that they are judged on
    faster: float
    stands: str = ""  #: settings of the row "folder as it stands"


#: A third of Flowers' training classes leaves the 32 of a full batch.
SETS = {
    "cub": DataSet("cub-proxy", "", 15, 10, 0.5, 1),
    "flowers": DataSet("folder", "compile=true data.cache=device", 15, 10, 0.35, 1),
    "cars": DataSet("folder", "compile=true data.cache=device", 15, 10, 0.5, 1),
    "omniglot": DataSet("folder", SMALL, 27, 27, 0.5, 30, TINY),
}
TRAINING = {"flowers": 51, "cars": 98}  # the last of the classes to train on, where they have numbers
UNSEEN = ("Japanese_(katakana)", "Sanskrit", "Tagalog")  # alphabets of the second set that the first has not


def prepared(name: str, source: Path, out: Path) -> Path:
    """The data set as a folder with ``train`` and ``test``, made once."""
    if not source.is_dir():
        raise UserError(f"{name}: no such folder {str(source)!r}")
    made = out / "data" / name
    complete = made / "complete"  # how many images, and of what; links do not travel with a copy of the results
    before = complete.read_text() if complete.is_file() else ""
    origin = before.partition(" of ")[2]
    if origin not in ("", str(source.resolve())) and _many(made):  # finished runs there may be of those images
        raise UserError(f"--out: {made} has the images of {origin}; give another folder for those of {source}")
    if before != f"{_many(made)} of {source.resolve()}":
        if name in TRAINING:
            _numbered(name, source, made)
        else:
            {"cub": _cub, "omniglot": _omniglot}[name](source, made)
        write_text(complete, f"{_many(made)} of {source.resolve()}")
    return made


def _many(made: Path) -> int:
    """Images of a prepared data set that can be opened."""
    return sum(path.is_file() for path in made.glob("*/*/*"))


def _link(path: Path, folder: Path) -> None:
    """An image of a data set in the folder of its class."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / path.name
    if not link.exists():
        link.unlink(missing_ok=True)  # to a place on another machine
        link.symlink_to(path.resolve())


def _cub(source: Path, made: Path) -> None:
    """Links to the images as the official lists have them."""
    splits = read_cub(Data(name="cub", root=str(source), counts="any"))
    for part, items in (("train", splits.train), ("test", splits.query)):
        for row, path in enumerate(items.sources):
            _link(Path(str(path)), made / part / items.class_name(row))


def _numbered(name: str, source: Path, made: Path) -> None:
    """Links to the images: the first half of the classes trains, the others test."""
    found = [path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.parent.name.isdigit()]
    if not found:
        raise UserError(f"{name}: expected images in folders named by class numbers in {source}, found none")
    for path in found:
        part = "train" if int(path.parent.name) <= TRAINING[name] else "test"
        _link(path, made / part / f"{int(path.parent.name):03d}")


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


def tried(name: str, row: str, rate: float, head: float) -> tuple[str, str]:
    """Name and settings of a run on held-out classes."""
    settings = f"{ROWS[row]} lr={rate * SETS[name].faster:g} embedding_lr={head:g}"
    return f"{name} held out, {row}, {rate:g} x{head:g}", settings


def score(out: Path, run: str) -> tuple[float, float] | None:
    """R@1 and mAP@R of a run with the first seed; None where it has not ended."""
    folder = side_by_side.folder_of(out, run, 0)
    return last_of(folder) if side_by_side.ended(folder) else None


def last_of(folder: Path) -> tuple[float, float]:
    """R@1 and mAP@R of the last epoch of a run that ended; 0 where it failed."""
    if (folder / side_by_side.FAILED).is_file():
        return 0.0, 0.0
    last = json.loads((folder / "result.json").read_text())["last"]
    return last["R@1"], last["mAP@R"]


def tries(out: Path, name: str, row: str) -> dict[str, str]:
    """What can be tried by now, settings by the name of the run: every rate, then the best with a faster head."""
    at_once = {rate: tried(name, row, rate, HEADS[0]) for rate in RATES}
    scores = {rate: score(out, run) for rate, (run, _) in at_once.items()}
    found = list(at_once.values())
    if all(one is not None for one in scores.values()):
        fastest = max(scores, key=lambda rate: scores[rate] or (0.0, 0.0))
        found += [tried(name, row, fastest, head) for head in HEADS[1:]]
    return dict(found)


def best(out: Path, name: str, row: str) -> str | None:
    """The settings with the highest R@1 on held-out classes; None as long as some are not finished."""
    scores = {settings: score(out, run) for run, settings in tries(out, name, row).items()}
    if any(found is None for found in scores.values()):
        return None
    return max(scores, key=lambda settings: scores[settings] or (0.0, 0.0))


def _every(args: argparse.Namespace, name: str, epochs: int) -> list[str]:
    epochs = args.epochs or epochs
    common = [f"epochs={epochs}", f"evaluate_every={epochs}", "evaluate_first=false", "save_minutes=60"]
    root = args.sources["cub"] if name == "cub" else args.data[name]  # CUB has a reader of its own
    return [*SETS[name].settings.split(), *common, *_needed(args, name, root), "data.workers=4", *args.settings]


def _needed(args: argparse.Namespace, name: str, root: Path) -> list[str]:
    """The data and the weights."""
    weights = [] if "weights=" in SETS[name].settings else [f"weights={args.weights}"]
    return [f"data.root={root}", *weights]


def _as_it_stands(args: argparse.Namespace, name: str) -> list[str]:
    """Of the recipe ``folder``, nothing but data and weights."""
    needed = [*SETS[name].stands.split(), *_needed(args, name, args.data[name])]
    return [*needed, *([f"epochs={args.epochs}"] if args.epochs else []), *args.settings]


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Unfinished runs that can be done by now: on held-out classes, then on the test classes, seed by seed."""
    choosing, testing = [], []
    one, all_rows = copy.copy(args), copy.copy(args)
    one.seeds, one.seed, one.rows, all_rows.rows = 1, 0, ".", "."
    for name, row in itertools.product(args.data, args.losses):
        data = SETS[name]
        runs = {run: text for run, text in tries(args.out, name, row).items() if score(args.out, run) is None}
        every = [*_every(args, name, data.choosing), f"data.hold_out={data.held_out:g}"]
        choosing += side_by_side.jobs_of(one, data.recipe, runs, every)
        settings = best(args.out, name, row)
        if settings is not None and re.search(args.tested, row):
            chosen = {f"{name}, {row}": settings}
            testing += side_by_side.jobs_of(all_rows, data.recipe, chosen, _every(args, name, data.epochs))
    for name in args.data if args.as_it_stands else ():
        testing += side_by_side.jobs_of(
            all_rows, "folder", {f"{name}, {AS_IT_STANDS}": ""}, _as_it_stands(args, name)
        )
    return [*choosing, *sorted(testing, key=lambda job: job.seed)]


def table(args: argparse.Namespace) -> str:
    """The results on the test classes, then what the settings were chosen from."""
    about = side_by_side.machine_of(args.out)
    lines = [
        "# Losses on embeddings: test classes, last epoch, mean ± standard deviation over seeds",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}.",
        "",
        "`python -m benchmarks.embeddings`: the learning rate of every loss (1e-5, 3e-5 or 1e-4; Omniglot 30 "
        "times that), then whether the layers behind the backbone learn at ten times that rate, are chosen on "
        "held-out training classes; all have the same head.",
        "",
    ]
    for name in args.data:
        epochs, choosing = (args.epochs or one for one in (SETS[name].epochs, SETS[name].choosing))
        lines += [f"## {name}, {epochs} epochs", "", "| loss | seeds | R@1 | mAP@R | chosen |", "|" + "---|" * 5]
        for row in [*args.losses, *([AS_IT_STANDS] if args.as_it_stands else [])]:
            run = f"{name}, {row}"
            scores = [last_of(folder) for folder in side_by_side.ended_of(args.out, run)]
            if scores:
                cells = [mean_of(list(values)) for values in zip(*scores, strict=True)]
                chosen = f"`{best(args.out, name, row)}`" if row in ROWS else ""
                lines.append(
                    f"| {row} | {side_by_side.seeds_of(args.out, run)} | {' | '.join(cells)} | {chosen} |"
                )
        lines += [
            "",
            f"Held-out training classes ({SETS[name].held_out:.0%}), {choosing} epochs, one seed, R@1 / mAP@R:",
        ]
        heads = [f"the best x{head}" for head in HEADS[1:]]
        lines += ["", f"| loss | {' | '.join([f'{rate:g}' for rate in RATES] + heads)} |"]
        lines += ["|" + "---|" * (1 + len(RATES) + len(heads))]
        for row in args.losses:
            found = [score(args.out, run) for run in tries(args.out, name, row)]
            if any(one is not None for one in found):
                cells = [_cell(one) for one in [*found, *[None] * len(heads)][: len(RATES) + len(heads)]]
                lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def write_table(args: argparse.Namespace) -> str:
    """Write the table of what is finished."""
    text = table(args)
    write_text(args.out / "table.md", text)
    return text


def _cell(found: tuple[float, float] | None) -> str:
    if found is None:
        return ""
    return "{:.1f} / {:.1f}".format(*found) if any(found) else "failed"


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the data prepared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="NAME=DIR: cub, flowers, cars, omniglot")
    side_by_side.add_running_arguments(parser, out="runs/embeddings", epochs=0, seeds=3)
    parser.add_argument("--tested", default=".", help="of these rows, those to test: a regular expression")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], help="settings for every run")
    args = parser.parse_args(words)
    side_by_side.check_rows(args.rows, [*ROWS, AS_IT_STANDS])
    args.losses = [row for row in ROWS if re.search(args.rows, row)]
    given = dict(text.partition("=")[::2] for text in args.data)
    unknown = sorted(set(given) - set(SETS))
    if unknown or not all(given.values()):
        parser.error(f"data: expected NAME=DIR with a name of {', '.join(SETS)}, received {' '.join(args.data)}")
    args.as_it_stands = bool(re.search(args.rows, AS_IT_STANDS) and re.search(args.tested, AS_IT_STANDS))
    args.sources = {name: Path(folder).expanduser() for name, folder in given.items()}
    args.data = args.sources
    if not args.table:
        args.data = {name: prepared(name, folder, args.out) for name, folder in args.sources.items()}
    return args


def main() -> None:
    """Choose, test, and write the table."""
    args = parsed()
    if not args.table:
        side_by_side.train(
            jobs_of(args),
            parallel=args.parallel,
            mps=args.mps,
            minutes=args.minutes,
            further=lambda: jobs_of(args),
            keep=args.keep,
        )
    print(write_table(args))


if __name__ == "__main__":
    side_by_side.without_traceback(main)
