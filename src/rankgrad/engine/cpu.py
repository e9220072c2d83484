"""The CPU engine: launches the Numba kernels; without Numba, or for float64, the same algorithm in torch."""

import functools
import importlib.util
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rankgrad.engine import stepwise, stream
from rankgrad.engine.forms import FORMS, weight_tables
from rankgrad.engine.precision import count_dtype

_LONG = 1 << 16  # lists at least this long are cut into chunks when there are fewer lists than threads


@functools.cache
def _numba_kernels() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None:
        warnings.warn(
            "rankgrad: Numba is not installed; using the slower torch version of the CPU engine "
            "(pip install 'rankgrad[fast]')",
            stacklevel=2,
        )
        return None
    from numba.np.ufunc.parallel import _launch_threads

    from rankgrad.engine._kernels import stream_cpu

    threads = torch.get_num_threads()
    _launch_threads()
    torch.set_num_threads(threads)  # the launch sets OpenMP's number of threads, which is torch's too
    return stream_cpu


def _kernels(scores: Tensor) -> Any:
    """The Numba kernels, if they are for these scores: a 32-bit key and a 32-bit index make a word."""
    if scores.dtype == torch.float64 or scores.shape[-1] >= 2**32:
        return None
    return _numba_kernels()


def _threads() -> int:
    import numba

    threads = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    return threads


@functools.cache
def _decoding(dtype: torch.dtype) -> Any:
    """The values of all 16-bit patterns."""
    if dtype == torch.float32:
        return torch.empty(0).numpy()
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float().numpy()


class _Rows:
    """The lists of all calls as rows of NumPy arrays, in the form the kernels take."""

    def __init__(self, scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float) -> None:
        n = scores.shape[-1]
        self.decode = _decoding(scores.dtype)
        rows = scores.detach().contiguous().reshape(-1, n)
        self.scores = (rows if scores.dtype == torch.float32 else rows.view(torch.uint16)).numpy()
        self.relevance = relevance.contiguous().reshape(-1, n).view(torch.uint8).numpy()
        self.masked = mask is not None
        exists = relevance.new_empty(len(rows), 0) if mask is None else mask.contiguous().reshape(-1, n)
        self.mask = exists.view(torch.uint8).numpy()
        self.half = torch.tensor(margin / 2, dtype=torch.float32).numpy()[()]
        self.threads = _threads()
        self.chunks = self.threads if n >= _LONG and len(rows) < self.threads else 1

    def __len__(self) -> int:
        return len(self.scores)

    def row(self, at: int) -> tuple[Any, ...]:
        return self.scores[at], self.decode, self.relevance[at], self.mask[at], self.masked, self.half


def relevant_ranks(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step one; see :func:`rankgrad.engine.reference.relevant_ranks`."""
    kernels = _kernels(scores)
    if kernels is None:
        return stream.relevant_ranks(scores, relevance, mask, margin)
    rows = _Rows(scores, relevance, mask, margin)
    n = scores.shape[-1]
    above, position = torch.zeros(scores.shape, dtype=torch.int64), torch.full(scores.shape, n)
    count = torch.empty(scores.shape[:-1], dtype=torch.int64)
    poison = torch.zeros(scores.shape[:-1], dtype=torch.float64)
    nothing = torch.empty(0, dtype=count_dtype(n)).numpy()
    for at in range(len(rows)):
        words, _, higher, _, nan = kernels.standing(*rows.row(at), nothing, rows.chunks)
        p = len(words)
        above.view(-1, n)[at, :p] = torch.from_numpy(higher[:p])
        position.view(-1, n)[at, :p] = torch.from_numpy((words & 0xFFFFFFFF).astype("int64"))
        count.view(-1)[at] = p
        if nan:
            poison.view(-1)[at] = torch.nan
    return above, position, count, poison


def rank_changes(
    scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float, position: Tensor, steps: Tensor
) -> Tensor:
    """Step two; see :func:`rankgrad.engine.reference.rank_changes`."""
    kernels = _kernels(scores)
    if kernels is None:
        return stream.rank_changes(scores, relevance, mask, margin, position, steps)
    rows = _Rows(scores, relevance, mask, margin)
    n = scores.shape[-1]
    changes = torch.zeros(scores.shape, dtype=count_dtype(n))
    for at in range(len(rows)):
        out = changes.view(-1, n)[at].numpy()
        words, spare, above, _, _ = kernels.standing(*rows.row(at), out, rows.chunks)
        move = steps.view(-1, n)[at, : len(words)].numpy()
        if len(words):
            kernels.move(*rows.row(at), words, spare, above, move, out, rows.chunks)
        else:
            out[:] = 0
    return changes


def list_losses(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    form: str,
    lam: float,
    margin: float,
    with_changes: bool,
    max_relevant: int | None = None,
    lists: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both steps and the loss between them; see :func:`rankgrad.engine.stepwise.list_losses`."""
    kernels = _kernels(scores)
    if kernels is None:
        return stepwise.list_losses(
            stream, scores, relevance, mask, weights, form, lam, margin, with_changes, lists
        )
    calls, per_call, n = scores.shape
    rows = _Rows(scores, relevance, mask, margin)
    relevant = relevance if mask is None else relevance & mask
    lists = relevant.any(-1).sum(-1) if lists is None else lists
    items = torch.full((calls, per_call), n) if mask is None else mask.sum(-1)
    changes = torch.empty(calls, per_call, n if with_changes else 0, dtype=count_dtype(n))
    losses = torch.empty(calls, per_call, dtype=torch.float64)
    args = (
        FORMS.index(form),
        torch.zeros(2, 1, dtype=torch.float64).numpy()
        if weights is None
        else torch.stack(weight_tables(weights)).numpy(),
        lam,
    )
    for_row = lists.repeat_interleave(per_call).numpy()
    out, into = changes.view(calls * per_call, -1).numpy(), losses.view(-1).numpy()
    if rows.chunks == 1:
        kernels.many_lists(
            rows.scores, rows.decode, rows.relevance, rows.mask, rows.masked, rows.half, *args, for_row, out, into
        )
    else:
        for at in range(len(rows)):
            into[at] = kernels.one_list(*rows.row(at), *args, for_row[at], out[at], rows.chunks)
    return losses, changes, items, lists
