"""The GPU engine: which lists go where, and why.

Nothing here waits for the device, and nothing is sized or chosen by how many items are relevant, p, which only the
device knows: shapes and the hint ``max_relevant`` decide. Three regimes, each with its launches in one file and
its kernels in ``_kernels``:

:mod:`short <rankgrad.engine.short>`, many lists of up to 65,536 items, longer ones with a hint of up to 16
    One program takes a whole list and compares all its items with up to 16 relevant ones at a time: two sweeps
    over a row that stays in the cache, two or three launches, no sort. The work is two sweeps for every 16
    relevant items, so it is made for the few of retrieval; and there must be lists enough to keep all programs
    busy, more of them the longer they are. The hint promises that two sweeps are all: with it 16 lists are enough.
:mod:`long <rankgrad.engine.long>`, everything else
    All programs work on every list: the p relevant items are sorted, the n items streamed past them through a
    table of cells. Two reads of the data, (n + p) log p work, whatever p is.
:mod:`dense <rankgrad.engine.dense>`, where the hint allows one relevant item in eight or more
    The whole list is sorted by torch, whose radix sort is quicker than searching and counting among so many. It
    costs the same for any p: without the hint that would be several times what a sparse list needs.

All of them take lambdas, windows and shares of the spread. By lambda relevant items move by steps of their own and
must be ranked again; by window they all rise equally far, keep their order, and slopes are summed between two
places. float64 scores, ragged lists and lists of 2^32 items and more are for the reference.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import dense, long, reference, short
from rankgrad.engine.launching import Launcher, Plan, kinds, on_its_device, processors_of
from rankgrad.engine.precision import EQUAL, LEAST_SHARE
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.triton_arguments import as_numbers, bits

LONGEST_SHORT_LIST = 65_536  # 16 bits hold an index
LONGEST_SPARSE_LIST = 1 << 30  # the same with a hint of up to 16 relevant items, which need no index of 16 bits
FEWEST_SHORT_LISTS = 16  # fewer lists would leave most of the device idle: one program takes a list
ITEMS_A_SHORT_LIST = 256  # and the longer they are, the more lists it takes to keep all programs busy
DENSE = 8  # one relevant item in so many, or more, is a case for whole sorts
SHORTEST_DENSE_LIST = 1025
_LONGEST_SORTED = 2**31 - 4096  # by torch, in blocks whose ends are 32-bit numbers
_MOMENTS_BLOCK, _MOMENTS_PROGRAMS = 1024, 1024


def supports(request: Request) -> bool:
    """Whether the kernels take a request: a 32-bit key and a 32-bit index make a word."""
    scores = request.scores
    return (
        scores.dtype != torch.float64
        and scores.numel() > 0
        and scores.shape[-1] < 2**32
        and request.offsets is None
    )


def regime(request: Request) -> ModuleType:
    """Where a request goes; see above."""
    calls, per_call, n = request.scores.shape
    most = request.max_relevant
    if most is not None and most * DENSE > n and SHORTEST_DENSE_LIST <= n <= _LONGEST_SORTED:
        return dense
    few = most is not None and most <= short.GROUP and n <= LONGEST_SPARSE_LIST
    enough = FEWEST_SHORT_LISTS if few else max(FEWEST_SHORT_LISTS, n // ITEMS_A_SHORT_LIST)
    if (n <= LONGEST_SHORT_LIST or few) and calls * per_call >= enough:
        return short
    return long


def scales_at_once(request: Request) -> bool:
    """Whether the gradient of the mean takes no pass of its own."""
    return request.by_window and regime(request) is short


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    with on_its_device(request.scores):
        return regime(request).evaluate(request)  # type: ignore[no-any-return]


def standings(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand; see :func:`rankgrad.engine.reference.standings`.

    Many lists of up to 65,536 items go to torch's sort, all at once; others to the kernels of long lists.
    """
    calls, per_call, n = request.scores.shape
    engine = reference if n <= LONGEST_SHORT_LIST and calls * per_call > 1 else long
    above, own = (torch.empty_like(request.scores, dtype=torch.int64) for _ in range(2))
    poison = request.scores.new_empty(request.shape, dtype=torch.float64)
    with on_its_device(request.scores):
        for here, part in long.turns(request, n):
            above[here], own[here], poison[here] = engine.standings(part)
    return above, own, poison


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from rankgrad.engine._kernels import moments, reduction

    return moments, reduction


@functools.lru_cache(maxsize=256)
def _plan(*key: Any) -> Plan:
    return Plan()


def reduce(losses: Tensor, lists: Tensor, mean: bool, out: Tensor) -> None:
    """Sum or mean of each call's list losses, ``[calls, lists]``, into ``out``, ``[calls]``, in one launch."""
    losses = losses.contiguous()
    calls, per_call = losses.shape
    with on_its_device(losses):
        launch = Launcher(_plan(losses.device, per_call, *kinds(losses, lists, out)), losses.device)
        launch(_kernels()[1].reduce_losses, (calls, 1), losses, lists, out, per_call, MEAN=mean, BLOCK=1024)


def scale(answer: Answer, upstream: Tensor | None, reduction: str, out: Tensor) -> None:
    """The gradient times ``upstream`` (None: ones) into ``out``, in one launch; it may be the answer's memory."""
    losses, divisor, lists = answer.losses.contiguous(), answer.divisor.contiguous(), answer.lists.contiguous()
    gradient = answer.gradient.contiguous()
    arriving = divisor if upstream is None else upstream.contiguous()
    calls, per_call, n = gradient.shape
    rows, device = calls * per_call, gradient.device
    blocks = min(-(-n // 2048), max(1, 16 * processors_of(device) // rows))
    key = kinds(gradient, arriving, losses, divisor, lists, out)
    with on_its_device(gradient):
        Launcher(_plan(device, calls, per_call, n, *key), device)(
            _kernels()[1].scale_changes, (rows, blocks), gradient, arriving, losses, divisor, lists, out, n,
            per_call,
            REDUCTION=("mean", "sum", "none").index(reduction), ONES=upstream is None, BLOCK=2048,
        )  # fmt: skip


def moments(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Moments and spread of each call's finite existing scores, in one pass and one small launch.

    Args:
        scores: ``[calls, ...]``, not float64.
        mask: bool in the same shape, or None.

    Returns:
        float64 ``[calls, 4]`` (see :func:`rankgrad.engine.spread.moments`) and the spread, float64 ``[calls]``.
    """
    scores, device = scores.contiguous(), scores.device
    exists = scores if mask is None else as_numbers(mask)
    calls = scores.shape[0]
    size = scores.numel() // calls
    parts_a_call = max(1, min(-(-size // _MOMENTS_BLOCK), _MOMENTS_PROGRAMS, 8 * processors_of(device)))
    parts = torch.empty(calls, parts_a_call, 4, dtype=torch.float64, device=device)
    out = torch.empty(calls, 4, dtype=torch.float64, device=device)
    spread = torch.empty(calls, dtype=torch.float64, device=device)
    with on_its_device(scores):
        launch = Launcher(_plan(device, calls, size, *kinds(scores, exists)), device)
        launch(
            _kernels()[0].part_moments, (calls, parts_a_call), scores, exists, parts, size,
            MASKED=mask is not None, BLOCK=_MOMENTS_BLOCK,
        )  # fmt: skip
        launch(
            _kernels()[0].merge_moments, (calls, 1), parts, out, spread, parts_a_call, bits(LEAST_SHARE),
            bits(torch.finfo(torch.float32).tiny), bits(EQUAL),
            BLOCK=_MOMENTS_PROGRAMS,
        )  # fmt: skip
    return out, spread
