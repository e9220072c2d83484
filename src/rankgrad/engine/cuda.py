"""The GPU engine: chooses among the regimes of lists, by shape and the hint ``max_relevant``.

Nothing here waits for the device, and nothing is sized or chosen by how many items are relevant, which only
the device knows.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import dense, long, reference, short
from rankgrad.engine.launching import Launcher, Plan, kinds, on_its_device, programs
from rankgrad.engine.request import Answer, Request

LONGEST_SHORT_LIST = 65_536
FEWEST_SHORT_LISTS = 16  # fewer lists would leave most of the device idle: one program takes a list
ITEMS_A_SHORT_LIST = 256  # and the longer they are, the more lists it takes to keep all programs busy
SHORTEST_DENSE_LIST = 1024
DENSE = 8  # one relevant item in so many, or more, is a case for whole sorts
_MOST_ROWS = 65_535  # a grid's second axis ends there


def supports(request: Request) -> bool:
    """Whether the kernels take a request: a 32-bit key and a 32-bit index make a word."""
    scores = request.scores
    return (
        scores.dtype != torch.float64
        and scores.numel() > 0
        and scores.shape[-1] < 2**32
        and request.offsets is None
        and not request.by_window
        and not request.margin_is_share
    )


def standings(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand; see :func:`rankgrad.engine.reference.standings`."""
    scores = request.scores
    if scores.shape[0] * scores.shape[1] > _MOST_ROWS:
        return reference.standings(request)
    above, _, count, poison = on_its_device(long.relevant_ranks)(
        scores, request.relevance, request.mask, request.margin
    )
    slots = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    return above, slots.where(slots <= count.unsqueeze(-1), 0), poison


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    scores, mask, most = request.scores, request.mask, request.max_relevant
    calls, per_call, n = scores.shape
    engine: ModuleType = long
    if most is not None and most * DENSE > n and SHORTEST_DENSE_LIST < n < 2**31:
        engine = dense
    elif n <= LONGEST_SHORT_LIST and calls * per_call >= max(FEWEST_SHORT_LISTS, n // ITEMS_A_SHORT_LIST):
        engine = short
    losses, changes, items, lists = on_its_device(engine.list_losses)(
        scores, request.relevance, mask, request.tables, request.form, request.strength, request.margin,
        request.with_gradient, most, request.lists,
    )  # fmt: skip
    return Answer(losses, changes, request.strength * items.clamp(min=1).double(), lists)


@functools.lru_cache(maxsize=256)
def _plan(*key: Any) -> Plan:
    return Plan()


@on_its_device
def reduce(losses: Tensor, lists: Tensor, mean: bool, out: Tensor) -> None:
    """Sum or mean of each call's list losses, ``[calls, lists]``, into ``out``, ``[calls]``, in one launch."""
    losses = losses.contiguous()
    calls, per_call = losses.shape
    launch = Launcher(_plan(losses.device, per_call, *kinds(losses, lists, out)), losses.device)
    launch(short.kernels().reduce_losses, (calls, 1), losses, lists, out, per_call, MEAN=mean, BLOCK=1024)


def scale(answer: Answer, upstream: Tensor, reduction: str, out: Tensor) -> None:
    """The gradient at what arrives into ``out``, in one launch; ``out`` may be the memory of the answer's."""
    on_its_device(_scale)(answer.gradient, answer, upstream.contiguous(), reduction, out)


def _scale(gradient: Tensor, answer: Answer, upstream: Tensor, reduction: str, out: Tensor) -> None:
    calls, per_call, n = gradient.shape
    rows, device = calls * per_call, gradient.device
    blocks = min(-(-n // 2048), max(1, 16 * programs(device) // rows))
    losses, divisor, lists = answer.losses, answer.divisor, answer.lists
    launch = Launcher(
        _plan(device, calls, per_call, n, *kinds(gradient, upstream, losses, divisor, lists, out)), device
    )
    launch(
        short.kernels().scale_changes, (rows, blocks), gradient, upstream, losses, divisor, lists, out, n,
        per_call, REDUCTION=("mean", "sum", "none").index(reduction), BLOCK=2048,
    )  # fmt: skip
