"""Losses on embeddings without the similarity matrix: time and memory beside the matrix products they need."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankgrad.lab.bench import retrieval, timing
from rankgrad.lab.bench.lines import Measurement
from rankgrad.losses import PairRankingLoss, ProxyRankingLoss, RecallLoss
from rankgrad.memory import EmbeddingMemory

DIM = 512


class Case(NamedTuple):
    """Queries, remembered candidates (0: the batch itself), whether products may use TF32, and the goals."""

    queries: int
    remembered: int
    tf32: bool
    most_memory: int | None
    most_time: float | None
    most_ratio: float | None

    @property
    def name(self) -> str:
        """For the table."""
        against = f" against a memory of {self.remembered:,}" if self.remembered else ""
        return f"{self.queries:,} queries{against}, {'TF32' if self.tf32 else 'fp32'}"


CASES = (
    Case(16_384, 0, False, 300 << 20, 0.030, None),
    Case(65_536, 0, True, 1536 << 20, None, 2.0),
    Case(4_096, 1_000_000, True, 2 << 30, None, 2.0),
)
SMALL = (Case(256, 0, False, 300 << 20, 0.030, None), Case(64, 1024, True, 2 << 30, None, 2.0))


def _unit(rows: int, device: torch.device) -> Tensor:
    return nn.functional.normalize(torch.randn(rows, DIM, device=device), dim=1)


def _step(loss: Callable[..., Tensor], queries: Tensor, labels: Tensor) -> Callable[[], Any]:
    def step() -> None:
        loss(queries, labels).backward()
        queries.grad = None
        for parameter in loss.parameters() if isinstance(loss, nn.Module) else ():
            parameter.grad = None

    return step


def lines(device: torch.device, cases: tuple[Case, ...]) -> Iterator[Measurement]:
    """A line a case and loss; the batch's other losses behind the first case."""
    for number, case in enumerate(cases):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = case.tf32
        try:
            torch.manual_seed(0)
            queries = _unit(case.queries, device).requires_grad_()
            labels = torch.arange(case.queries, device=device) // retrieval.PER_CLASS
            memory = EmbeddingMemory(min(case.remembered, 1)).to(device)
            if case.remembered:
                numbers = torch.arange(case.remembered, device=device)
                memory.push(_unit(case.remembered, device), numbers % (case.remembered // retrieval.PER_CLASS))
            candidates = memory._views()[0] if case.remembered else queries
            products = 3 if case.remembered else 4
            alone = timing.seconds(_products(queries, candidates, products), device, budget=0.3)
            yield from _of_case(
                case, queries, labels, memory, f"its {products} products", alone, others=not number
            )
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        del queries, labels, memory, candidates
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _of_case(
    case: Case, queries: Tensor, labels: Tensor, memory: EmbeddingMemory, other: str, alone: float, *, others: bool
) -> Iterator[Measurement]:
    device = queries.device
    losses: dict[str, nn.Module] = {
        "recall, window": RecallLoss(window=0.1, margin=0.05),
        "recall, window, max_relevant": RecallLoss(window=0.1, margin=0.05, max_relevant=retrieval.PER_CLASS),
        "recall": RecallLoss(),
    }
    for loss in losses.values():
        loss.memory = memory
    if others:
        losses["pairs with a hinge"] = PairRankingLoss()
        losses["proxies of 10,000 classes"] = ProxyRankingLoss(10_000, DIM, pairs=0)
    for name, loss in losses.items():
        goals: dict[str, Any] = {}
        if name.startswith("recall"):
            goals = {name: getattr(case, name) for name in ("most_memory", "most_time", "most_ratio")}
        line = Measurement(f"{case.name}: {name}", other=other, beside=alone, **goals)
        try:
            step = _step(loss.to(device).eval(), queries, labels)  # eval: the memory stays as it is
            line.memory = timing.peak_bytes(step, device)
            line.time = timing.seconds(step, device, budget=0.3)
        except torch.OutOfMemoryError:
            line.fault = "does not fit"
        yield line


def _products(queries: Tensor, candidates: Tensor, many: int) -> Callable[[], None]:
    """As many products of a block of queries with all candidates as the goals count, block by block."""
    queries, candidates = queries.detach(), candidates.detach()

    def run() -> None:
        for part in queries.split(1024):
            for _ in range(many):
                part @ candidates.T

    return run
