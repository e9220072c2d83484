"""The paper's speed table: AP loss, forward and backward, of one list of n scores with p relevant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankgrad.engine import dispatch, reference
from rankgrad.lab.bench import timing
from rankgrad.losses import average_precision_loss

LENGTHS = (100_000, 320_000, 1_000_000, 10_000_000, 100_000_000)
LAM, MARGIN = 0.5, 0.15
#: The paper's table, in seconds: one Xeon core at 2.2 GHz, and a V100.
PAPER = {
    "cpu": {100_000: 0.033, 1_000_000: 0.331, 10_000_000: 3.86, 100_000_000: 36.4},
    "cuda": {100_000: 0.0013, 1_000_000: 0.007, 10_000_000: 0.061, 100_000_000: 0.62},
}


@dataclass
class LongListRow:
    """One line of the table; times in seconds, None where not measured."""

    n: int
    relevant: str
    p: int
    plain: float | None
    reference: float | None
    engine: float | None
    hinted: float | None
    replay: float | None
    floor: float
    peak: int
    launches: int | None
    equal: bool
    skew: dict[str, float] = field(default_factory=dict)


def relevant_counts(n: int) -> dict[str, int]:
    """How many items are relevant, by the table's names for it."""
    return {"100": 100, "1,000": 1000, "1 %": n // 100, "50 %": n // 2}


def make_list(n: int, p: int, device: torch.device, kind: str = "random") -> tuple[Tensor, Tensor]:
    """Scores and relevance; ``kind`` one of random, sorted, one gap, equal."""
    generator = torch.Generator(device).manual_seed(n + p)
    scores = torch.randn(n, generator=generator, device=device)
    relevance = torch.zeros(n, dtype=torch.bool, device=device)
    relevance[torch.randperm(n, generator=generator, device=device)[:p]] = True
    if kind == "sorted":
        scores = scores.sort().values
    elif kind == "one gap":
        scores = torch.where(relevance, scores, 1e-6 * scores)
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    return scores, relevance


def plain_loss(scores: Tensor, relevance: Tensor) -> Tensor:
    """The method as published: two argsorts a ranking, ranked again in backward. For its speed only."""

    def ranks(values: Tensor) -> Tensor:
        return torch.argsort(torch.argsort(values, descending=True)).float() + 1

    class Rank(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor) -> Tensor:
            result = ranks(values)
            ctx.save_for_backward(values, result)
            return result

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            values, result = ctx.saved_tensors  # type: ignore[attr-defined]
            step = LAM * len(values)
            change: Tensor = ranks(values + step * grad) - result
            return change / step

    shifted = scores + torch.where(relevance, -MARGIN / 2, MARGIN / 2)
    whole: Tensor = Rank.apply(shifted)
    own = ranks(shifted.detach()[relevance])
    return 1 - (own / whole[relevance]).mean()


def step_of(loss: Callable[[Tensor, Tensor], Tensor], scores: Tensor, relevance: Tensor) -> Callable[[], Tensor]:
    """A call that runs forward and backward and returns the gradient."""
    leaf = scores.detach().requires_grad_()

    def step() -> Tensor:
        loss(leaf, relevance).backward()
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        return grad

    return step


def ours(hint: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Our AP loss at the table's settings."""
    return lambda scores, relevance: average_precision_loss(
        scores, relevance, lam=LAM, margin=MARGIN, max_relevant=hint
    )


def measure(
    device: torch.device, n: int, name: str, *, bandwidth: float, baselines: bool, skew: bool
) -> LongListRow:
    """One row. The engine's time is None if its gradient is not the reference's."""
    p = relevant_counts(n)[name]
    scores, relevance = make_list(n, p, device)
    gpu = device.type == "cuda"
    engine, hinted = step_of(ours(), scores, relevance), step_of(ours(p), scores, relevance)
    slow = step_of(ours(), scores, relevance)

    def with_sorts() -> Tensor:
        with dispatch.forced(reference):
            return slow()

    expected = with_sorts().clone()
    equal = torch.equal(engine(), expected) and torch.equal(hinted(), expected)
    row = LongListRow(
        n=n,
        relevant=name,
        p=p,
        plain=timing.seconds(step_of(plain_loss, scores, relevance), device) if baselines else None,
        reference=timing.seconds(with_sorts, device) if baselines else None,
        engine=timing.seconds(engine, device) if equal else None,
        hinted=timing.seconds(hinted, device) if equal and gpu else None,
        replay=None,
        floor=n * (2 * 5 + 4) / bandwidth,
        peak=timing.peak_bytes(hinted if gpu else engine, device),
        launches=timing.launches(hinted) if gpu else None,
        equal=equal,
    )
    if gpu and equal:
        without, with_hint = (timing.graph_seconds(run, device) for run in (engine, hinted))
        row.replay = min(without, with_hint) if name == "50 %" else without
        row.hinted = with_hint
    if skew and equal and row.engine:
        for kind in ("sorted", "one gap", "equal"):
            run = step_of(ours(p if name == "50 %" else None), *make_list(n, p, device, kind))
            row.skew[kind] = timing.graph_seconds(run, device) if gpu else timing.seconds(run, device)
    return row


def rows(
    device: torch.device, lengths: tuple[int, ...], *, baselines_up_to: int, skew_at: int
) -> Iterator[LongListRow]:
    """All rows of the table, as they are measured."""
    bandwidth = timing.copy_bandwidth(device)
    for n in lengths:
        for name in relevant_counts(n):
            yield measure(device, n, name, bandwidth=bandwidth, baselines=n <= baselines_up_to, skew=n == skew_at)
            if device.type == "cuda":
                torch.cuda.empty_cache()


def growth(table: list[LongListRow], name: str) -> float | None:
    """The exponent of n in the engine's time from a million items on, by least squares of the logarithms."""
    return timing.growth_exponent(
        [
            (row.n, row.replay or row.engine)
            for row in table
            if row.relevant == name and row.n >= 1_000_000 and row.engine
        ]
    )
