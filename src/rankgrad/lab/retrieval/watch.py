"""What is watched while embeddings are trained: their spread, and how many of them get a gradient.

*Spread* is 1 - |mean of the unit embeddings of a batch|: 0 if all are the same vector, near 1 if they point
everywhere. A loss on ranks depends on scores only through their order, so embeddings may shrink towards one point
while it still falls; from there no gradient leads back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rankgrad import distributed
from rankgrad.lab.training.errors import TrainingError
from rankgrad.pairs import unit_length

#: Steps that are averaged before anything is said; a tenth of a shorter run.
STEPS = 20
#: Embeddings have collapsed when their spread stays below this ...
COLLAPSED_SPREAD = 0.01
#: ... and below this share of its largest value (untrained networks start low) ...
COLLAPSED_SHARE = 0.1
#: ... for so many steps, or for a quarter of a shorter run.
PATIENCE = 100
#: Steps at least: at first all embeddings may move together and separate again within about ten steps.
LEAST_PATIENCE = 10
#: Share of the embeddings without any gradient above which a note is printed.
MOSTLY_ZERO = 0.95


def spread(embeddings: Tensor) -> Tensor:
    """1 - |mean of unit embeddings| of the batch of all processes, a scalar without gradient."""
    rows = unit_length(embeddings.detach())
    mean = distributed.total(rows.sum(0)) / (len(rows) * distributed.count())
    found: Tensor = 1 - mean.norm()
    return found


def zero_share(gradient: Tensor) -> Tensor:
    """Share of the rows of all processes whose gradient is zero, a scalar."""
    return distributed.total((gradient == 0).all(1).float().mean()) / distributed.count()


class Watch:
    """Reads the rows of finished steps; a resumed run starts with the rows that were logged before.

    Args:
        advice: What to change where no gradient arrives; see :func:`advice`.
        total: Steps of the run.
    """

    def __init__(self, advice: str, total: int) -> None:
        self.advice = advice
        self.steps = max(1, min(STEPS, total // 10))
        self.patience = min(PATIENCE, max(LEAST_PATIENCE, total // 4))
        self.largest = 0.0
        self._collapsed_for = 0  # steps in a row
        self._noted = False
        self._last: deque[Mapping[str, float]] = deque(maxlen=self.steps)  # rows

    def read(self, rows: Sequence[Mapping[str, float]]) -> list[str]:
        """Notes to print after these steps; raises where the embeddings have collapsed."""
        notes = []
        for row in rows:
            self._last.append(row)
            if len(self._last) < self.steps:
                continue
            now = self._mean("spread")
            self.largest = max(self.largest, now)
            collapsed = now < COLLAPSED_SPREAD and now < COLLAPSED_SHARE * self.largest
            self._collapsed_for = self._collapsed_for + 1 if collapsed else 0
            if self._collapsed_for == self.patience:
                raise self._collapsed(now, row)
            if not self._noted and self._mean("zero_gradients") > MOSTLY_ZERO:
                self._noted = True
                notes.append(self._no_gradient(row))
        return notes

    def _mean(self, name: str) -> float:
        return math.fsum(row[name] for row in self._last) / self.steps

    def _collapsed(self, now: float, row: Mapping[str, float]) -> TrainingError:
        return TrainingError(
            f"loss: the embeddings collapsed at step {row['step']:.0f} (epoch {row['epoch']:.0f}, learning rate "
            f"{row['lr']:.3g}): all items get nearly the same one, the spread of a batch fell from "
            f"{self.largest:.3f} to {now:.4f}",
            "Training stopped. Try a lower lr, head_epochs=2, optim.warmup=100, optim.clip=1, or the loss without "
            "memory.",
        )

    def _no_gradient(self, row: Mapping[str, float]) -> str:
        zero, loss = self._mean("zero_gradients"), self._mean("loss")
        begin = f"step {row['step']:.0f}: {zero:.0%} of the embeddings get no gradient, the loss is {loss:.3g}"
        return f"{begin}; {self.advice}"


def advice(name: str, arguments: Mapping[str, object]) -> str:
    """What to change in a loss whose gradients are nearly all zero."""
    if name.startswith("pml:"):
        return "a larger margin leaves more to learn, another miner finds more pairs"
    if name == "proxy":
        return "a larger loss.threshold leaves more to learn"
    reach = "lam" if "lam" in arguments else "window"
    return (
        f"if the loss is small, a larger loss.margin leaves more to learn; if it is not, loss.{reach} is too "
        "short to reach the items that are ranked wrongly: enlarge it"
    )


def unknown(device: torch.device) -> Tensor:
    """NaN, for what a step does not measure."""
    return torch.full((), math.nan, device=device)
