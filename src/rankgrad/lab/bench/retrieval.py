"""Losses on a batch of embeddings, 4 of a class: ours against pytorch-metric-learning's FastAP and SmoothAP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rankgrad.engine import dispatch, reference
from rankgrad.graphs import CALLS_BEFORE, graphed
from rankgrad.lab.bench import timing
from rankgrad.lab.bench.long_lists import step_of
from rankgrad.losses import RecallLoss

BATCHES = (128, 512, 1024, 4096, 16384)
DIM, PER_CLASS = 512, 4


@dataclass
class RetrievalRow:
    """One loss at one batch size; seconds and bytes, None where it does not fit."""

    batch: int
    loss: str
    eager: float | None
    replay: float | None
    peak: int | None
    note: str = ""


Step = Callable[[], Tensor]


def similarity_alone(embeddings: Tensor, labels: Tensor) -> Tensor:
    """What every loss on embeddings pays for."""
    unit = F.normalize(embeddings, dim=1)
    return (unit @ unit.T).sum()


Loss = Callable[[Tensor, Tensor], Tensor]


def _losses(batch: int, device: torch.device) -> Iterator[tuple[str, Loss, Loss | None]]:
    """Name, loss, and the plain Module whose result by the reference it must have, if it is ours."""
    yield "similarity alone", similarity_alone, None
    recall = RecallLoss().to(device).eval()
    yield "recall", recall, recall
    if device.type == "cuda":
        yield "recall, graphed", graphed(recall).eval(), recall
    hinted = RecallLoss(max_relevant=PER_CLASS - 1).to(device).eval()
    yield "recall, max_relevant", hinted, hinted
    filled = RecallLoss(memory=3).to(device)
    for seed in range(3):
        torch.manual_seed(seed + 1)
        embeddings, labels = batch_of(batch, device)
        filled(embeddings.requires_grad_(), labels)  # only batches with a gradient are remembered
    filled.eval()
    yield "recall, memory 3", filled, filled
    try:
        from pytorch_metric_learning import losses as baselines
    except ModuleNotFoundError:
        return
    yield "pml FastAP", baselines.FastAPLoss(), None
    if batch <= 512:  # needs memory for batch^3 numbers
        yield "pml SmoothAP", baselines.SmoothAPLoss(), None


def batch_of(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Embeddings and labels, :data:`PER_CLASS` of a class."""
    labels = torch.arange(batch, device=device) // PER_CLASS
    return torch.randn(batch, DIM, device=device), labels


def measure(name: str, step: Step, batch: int, device: torch.device, *, oracle: Step | None) -> RetrievalRow:
    """One row; no time for a gradient that is not the ``oracle``'s by the reference."""
    if oracle is not None:
        for _ in range(CALLS_BEFORE + 2):  # recorded losses are replayed by then
            got = step().clone()
        with dispatch.forced(reference):
            expected = oracle()
        if not torch.equal(got, expected):
            return RetrievalRow(batch, name, None, None, None, "differs from the reference")
    try:
        captured = oracle is not None and device.type == "cuda" and "graphed" not in name
        replay = timing.graph_seconds(step, device) if captured else None
        return RetrievalRow(batch, name, timing.seconds(step, device), replay, timing.peak_bytes(step, device))
    except torch.OutOfMemoryError:
        return RetrievalRow(batch, name, None, None, None, "does not fit")


def rows(device: torch.device, batches: tuple[int, ...]) -> Iterator[RetrievalRow]:
    """All rows, as they are measured."""
    for batch in batches:
        torch.manual_seed(0)
        data = batch_of(batch, device)
        for name, loss, plain in _losses(batch, device):
            oracle = None if plain is None else step_of(plain, *data)
            yield measure(name, step_of(loss, *data), batch, device, oracle=oracle)
            if device.type == "cuda":
                torch.cuda.empty_cache()


def list_launches(device: torch.device) -> dict[str, float]:
    """Recall loss from a 128 x 512 score matrix: replay time, launches, and Python's share in eager mode."""
    from rankgrad.losses import recall_loss

    torch.manual_seed(0)
    scores = torch.randn(128, 512, device=device, requires_grad=True)
    relevance = torch.rand(128, 512, device=device) < 3 / 512

    def step() -> None:
        scores.grad = None
        loss = recall_loss(scores, relevance, lam=0.2, margin=0.02, weight="loglog")
        loss.backward()

    return {
        "replay": timing.graph_seconds(step, device),
        "eager": timing.seconds(step, device),
        "launches": timing.launches(step),
    }
