"""The paper's complexity table, measured: time against list length for every method, forward and backward.

One list of n scores (normal), 1 % of them relevant. A method goes on to longer lists until a call would take
more than the given seconds or more memory than there is. Both are predicted from its shorter lists, so that
nothing runs for long and no machine is filled up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import dispatch, reference
from rankgrad.lab.bench import timing
from rankgrad.lab.bench.long_lists import LAM, MARGIN, make_list, plain_loss, step_of
from rankgrad.lab.training import machine
from rankgrad.losses import average_precision_loss, recall_loss
from rankgrad.surrogates import METHODS

LENGTHS = (*(m * 10**e for e in range(2, 7) for m in (1, 3)), 10_000_000)
#: The exponent is fitted over this many of the longest lists.
TAIL = 3
_LEAST_BYTES = 64 * 2**20  # peaks below this say nothing about growth
_LONG = 0.5  # seconds; longer calls are made once
_SHARE = 0.8  # of the memory that is free; beyond it a machine swaps or kills

Loss = Callable[[Tensor, Tensor], Tensor]
Work = Callable[[float, float], float]


@dataclass(frozen=True)
class Contender:
    """A row of the table: ``prepare(scores)`` gives the loss, ``work(n, p)`` the claimed operations."""

    label: str
    claim: str
    work: Work
    prepare: Callable[[Tensor], Loss]
    ours: bool = False


@dataclass
class Point:
    """One method at one length. ``seconds`` is None where ``note`` says why."""

    n: int
    seconds: float | None
    peak: int | None = None
    note: str = ""


@dataclass
class CostCurve:
    """One method on one device, and the exponents of n: measured, and of the claim over the same lists."""

    name: str
    label: str
    claim: str
    points: list[Point] = field(default_factory=list)
    exponent: float | None = None
    claimed: float | None = None
    fitted: tuple[int, ...] = ()

    @property
    def end(self) -> str:
        """Why there is no longer list, or nothing."""
        return self.points[-1].note if self.points else ""


def _log(x: float) -> float:
    return math.log2(max(x, 2))


#: Label, and operations as claimed. n items of which p are relevant.
_BASELINES: Mapping[str, tuple[str, Work]] = {
    "mohapatra2018": ("Mohapatra et al. 2018", lambda n, p: n * _log(p)),
    "chen2019": ("Chen et al. 2019", lambda n, p: n * p),
    "yue2007": ("Yue et al. 2007", lambda n, p: n**2),
    "fastap": ("FastAP, 10 bins", lambda n, p: n),
    "sodeep": ("SoDeep, h = n", lambda n, p: n**3),
    "sodeep_fixed": ("SoDeep, h = 64", lambda n, p: n),
    "smoothap": ("Smooth-AP", lambda n, p: n * p),
    "permutahedron": ("permutahedron", lambda n, p: n * _log(n)),
}


def _baseline(name: str) -> Contender:
    method = METHODS[name]
    label, work = _BASELINES[name]
    return Contender(label, method.complexity, work, lambda s: partial(method.loss, **method.arguments(s)))


def contenders() -> dict[str, Contender]:
    """Every row, by name: our losses, the paper's method as published, and its baselines."""
    stream: tuple[str, Work] = ("O((n + p) log p)", lambda n, p: n * _log(p))
    ours: dict[str, Any] = {"lam": LAM, "margin": MARGIN}
    return {
        "ap": Contender("rankgrad, AP", *stream, lambda s: partial(average_precision_loss, **ours), ours=True),
        "recall": Contender("rankgrad, recall", *stream, lambda s: partial(recall_loss, **ours), ours=True),
        "rambo": Contender("RaMBO, plain sorts", "O(n log n)", lambda n, p: n * _log(n), lambda s: plain_loss),
        **{name: _baseline(name) for name in METHODS},
    }


def relevant_of(n: int) -> int:
    """1 % of the items, at least one."""
    return max(1, n // 100)


def predicted(points: Sequence[tuple[float, float]], n: int, *, at_least: float, at_most: float) -> float:
    """The last value carried on to n with the growth of the last two, between two exponents; 0 from nothing."""
    if not points:
        return 0.0
    last_n, last = points[-1]
    exponent = max(at_least, min(timing.growth_exponent(points[-2:]) or 0.0, at_most))
    return float(last * (n / last_n) ** exponent)


def fit(curve: CostCurve, work: Work) -> None:
    """Exponents over the longest lists."""
    measured = [(p.n, p.seconds) for p in curve.points if p.seconds][-TAIL:]
    curve.fitted = tuple(n for n, _ in measured)
    curve.exponent = timing.growth_exponent(measured)
    curve.claimed = timing.growth_exponent([(n, work(n, relevant_of(n))) for n in curve.fitted])


def _next_point(
    contender: Contender, points: Sequence[Point], n: int, device: torch.device, limit: float
) -> Point:
    known = [(p.n, p.seconds) for p in points if p.seconds]
    claim = timing.growth_exponent([(m, contender.work(m, relevant_of(m))) for m in (n // 3, n)])
    expected = predicted(known, n, at_least=claim or 1.0, at_most=4.0)
    if expected > limit:
        return Point(n, None, note=f"> {limit:g} s")
    peaks = [(p.n, max(p.peak, _LEAST_BYTES)) for p in points if p.peak is not None]
    # The worst is a matrix of n x n: assumed for a peak that has just become measurable.
    small = [size == _LEAST_BYTES for _, size in peaks[-2:]]
    room = predicted(peaks, n, at_least=2.0 if small in ([True, False], [False]) else 1.0, at_most=2.0)
    if room > _SHARE * machine.available_bytes(device):
        return Point(n, None, note="out of memory")
    try:
        with timing.memory_over_now(device) as peak:
            scores, relevance = make_list(n, relevant_of(n), device)
            step = step_of(contender.prepare(scores), scores, relevance)
            if contender.ours and n <= 100_000 and not _equals_reference(step):
                return Point(n, None, note="differs from the reference")
            # A first call that takes long against expectation compiles something: it is not the answer.
            once_over = _LONG if expected > _LONG / 2 else math.inf
            took = timing.seconds(step, device, budget=0.2, once_over=once_over)
            return Point(n, took, peak()) if took <= limit else Point(n, None, peak(), f"> {limit:g} s")
    except (torch.OutOfMemoryError, MemoryError):
        return Point(n, None, note="out of memory")
    except RuntimeError as error:  # an operator that refuses the size: say so and go on with the others
        text = str(error).strip().splitlines()[0][:60]
        return Point(n, None, note="out of memory" if "allocate memory" in text else f"fails: {text}")


def _equals_reference(step: Callable[[], Tensor]) -> bool:
    got = step().clone()
    with dispatch.forced(reference):
        return torch.equal(got, step())


def measure(
    device: torch.device, lengths: Sequence[int], *, limit: float, names: Sequence[str] | None = None
) -> Iterator[tuple[dict[str, CostCurve], str, int]]:
    """All curves, growing; after each point (curves, the method's name, its length)."""
    chosen = {name: one for name, one in contenders().items() if names is None or name in names}
    curves = {name: CostCurve(name, one.label, one.claim) for name, one in chosen.items()}
    for n in lengths:
        for name, contender in chosen.items():
            curve = curves[name]
            if not curve.end:
                if not curve.points:  # compilers and libraries start up outside the first time
                    _next_point(contender, [], n, device, limit)
                curve.points.append(_next_point(contender, curve.points, n, device, limit))
                fit(curve, contender.work)
            yield curves, name, n
