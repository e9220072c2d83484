"""The automatic reach of `spearman_loss`: which share of the spread trains a ranker without shrinking its scores?

    python -m benchmarks.spearman --data DIR [--steps 200]       DIR has MQ2008's S1.txt ... S5.txt

A small network, Adam, all training lists in every step, one seed. Each cell has Spearman's coefficient on lists
that were not trained on, and the standard deviation of the scores there. Window and margin are shares of the
standard deviation of the scores in a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import rankgrad
from benchmarks import side_by_side
from rankgrad import metrics
from rankgrad.lab.training import machine

RATES = (1e-2, 1e-3)
WINDOWS = (1.0, 0.5, 0.2, 0.1, 0.05)
MARGINS = (0.0, 0.5)


class Queries(NamedTuple):
    """Items with features, target values and the list each is in; the lists before ``tested`` are trained on."""

    features: Tensor
    target: Tensor
    groups: Tensor
    tested: int

    def part(self, test: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Features, targets and lists to train or to test on."""
        chosen = (self.groups >= self.tested) == test
        return self.features[chosen], self.target[chosen], self.groups[chosen]


def made_up(n: int, levels: bool) -> Queries:
    """Lists of ``n`` items, 4,000 in all; targets are continuous, or grades from 0 to 3."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(4000 // n).repeat_interleave(n)
    features = torch.randn(len(groups), 16, generator=generator)
    target = features[:, :4].sum(1) + 0.5 * torch.randn(len(groups), generator=generator)
    if levels:
        target = torch.bucketize(target, torch.tensor([0.5, 2.0, 3.0])).float()
    return Queries(features, target, groups, 2000 // n)


def diabetes() -> Queries:
    """scikit-learn's patients in lists of 40."""
    features, target = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))[:440]
    return Queries((features / features.std(0))[order], target[order], torch.arange(440) // 40, 7)


def mq2008(folder: Path) -> Queries:
    """Fold 1: trained on the first three parts, tested on the last."""
    lines = [(folder / f"S{part}.txt").read_text().splitlines() for part in (1, 2, 3, 5)]
    rows = [line.partition("#")[0].split() for part in lines for line in part]
    numbers: dict[str, int] = {}
    groups = torch.tensor([numbers.setdefault(row[1], len(numbers)) for row in rows])
    features = torch.tensor([[float(cell.partition(":")[2]) for cell in row[2:]] for row in rows])
    first = sum(map(len, lines[:3]))
    return Queries(2 * features - 1, torch.tensor([float(row[0]) for row in rows]), groups, int(groups[first]))


def by_shares(window: float, margin: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss with shares of the spread."""

    def loss(scores: Tensor, target: Tensor, groups: Tensor) -> Tensor:
        spread = float(scores.detach().std())
        given = {"window": max(window * spread, 1e-12), "margin": margin * spread}
        return rankgrad.spearman_loss(scores, target, groups=groups, **given)

    return loss


def squared_error(scores: Tensor, target: Tensor, groups: Tensor) -> Tensor:
    """For comparison: against targets of unit variance."""
    return ((target - target.mean()) / target.std() - scores).square().mean()


def trained(queries: Queries, loss: Callable[[Tensor, Tensor, Tensor], Tensor], rate: float, steps: int) -> str:
    """A cell of the table."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(queries.features.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(network.parameters(), rate)
    features, target, groups = queries.part(test=False)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(features).squeeze(1), target, groups).backward()
        optimizer.step()
    features, target, groups = queries.part(test=True)
    scores = network(features).squeeze(1).detach()
    several = torch.stack([target[groups == one].std() > 0 for one in groups.unique()])  # others have no order
    found = metrics.spearman(scores, target, groups=groups, reduction="none")[several].nan_to_num(0).mean()
    return f"{float(found):.3f} / {float(scores.std()):.2g}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=side_by_side.folder, required=True, help="a folder with S1.txt ... S5.txt of MQ2008"
    )
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    sets = {
        "lists of 6": made_up(6, levels=False),
        "lists of 20": made_up(20, levels=False),
        "20, grades": made_up(20, levels=True),
        "lists of 200": made_up(200, levels=False),
        "diabetes": diabetes(),
        "MQ2008": mq2008(args.data),
    }
    print(machine.summary(torch.device("cpu")))
    for rate in RATES:
        print(f"\nRate {rate:g}:\n\n| window, margin | {' | '.join(sets)} |\n" + "|---" * (1 + len(sets)) + "|")
        losses = {f"{w:g}, {m:g}": by_shares(w, m) for w in WINDOWS for m in MARGINS}
        for name, loss in {**losses, "mean squared error": squared_error}.items():
            cells = [trained(queries, loss, rate, args.steps) for queries in sets.values()]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    side_by_side.without_traceback(main)
