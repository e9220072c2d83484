"""Losses on embeddings without the similarity matrix: time and memory beside the matrix products they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rankgrad.lab.bench import retrieval, timing
from rankgrad.lab.bench.tables import Cells, in_time
from rankgrad.losses import RecallLoss
from rankgrad.memory import EmbeddingMemory

DIM = 512
#: Name, queries, remembered candidates (0: the batch itself), whether products may use TF32.
CASES = (
    ("batch of 16,384, fp32", 16_384, 0, False),
    ("batch of 65,536, TF32", 65_536, 0, True),
    ("4,096 queries, memory of 1,000,000, TF32", 4_096, 1_000_000, True),
)


def _unit(rows: int, device: torch.device) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, DIM, device=device), dim=1)


def _step(loss: Callable[..., Tensor], queries: Tensor, labels: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(loss(queries, labels), queries)


def cells(device: torch.device, cases: tuple[tuple[str, int, int, bool], ...] = CASES) -> Cells:
    """A row a case and reach: time, its products alone, the ratio, and memory over the inputs."""
    table: Cells = [
        ["recall from embeddings", "reach", "time", "its products alone", "ratio", "memory over the inputs"]
    ]
    for name, many, remembered, tf32 in cases:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            torch.manual_seed(0)
            queries = _unit(many, device).requires_grad_()
            labels = torch.arange(many, device=device) // retrieval.PER_CLASS
            memory = EmbeddingMemory(min(remembered, 1)).to(device)
            if remembered:
                memory.push(_unit(remembered, device), torch.arange(remembered, device=device) % (remembered // 4))
            candidates = memory._candidates()[0] if remembered else queries
            alone = timing.seconds(_products(queries, candidates, 3 if remembered else 4), device, budget=0.5)
            for reach, loss in (("lam", RecallLoss(lam=0.2, margin=0.02)), ("automatic", RecallLoss())):
                loss.memory = memory
                step = _step(loss.to(device).eval(), queries, labels)  # eval: the memory stays as it is
                peak = timing.peak_bytes(step, device)
                taken = timing.seconds(step, device, budget=0.5)
                line = [in_time(taken), in_time(alone), f"{taken / alone:.2f}x", f"{peak / 2**20:,.0f} MiB"]
                table.append([name, reach, *line])
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    return table


def _products(queries: Tensor, candidates: Tensor, many: int) -> Callable[[], None]:
    """As many products of a block of queries with all candidates as the issue's figures count, block by block."""
    queries, candidates = queries.detach(), candidates.detach()

    def run() -> None:
        for part in queries.split(1024):
            for _ in range(many):
                part @ candidates.T

    return run
